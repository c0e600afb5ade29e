"""The store that an address names: a directory, or any URL that fsspec knows.

`check_address` does not import what the keeper needs: a launch is rejected before that is loaded.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuops.checkpoint.types import CheckpointError
from gpuops.errors import EXIT_USAGE
from gpuops.scrub import scrub

if TYPE_CHECKING:  # imports what the keeper needs
    from gpuops.checkpoint.storage.api import CheckpointStore

# The common protocols; fsspec knows many more.
COMMON_PROTOCOLS = (
    "s3",
    "gs",
    "az",
    "abfs",
    "oss",
    "oci",
    "hdfs",
    "sftp",
    "smb",
    "webhdfs",
    "file",
)
_READ_ONLY_PROTOCOLS = {"http", "https"}
_ONE_SLASH = re.compile(
    rf"({'|'.join((*COMMON_PROTOCOLS, 's3a', 'gcs', *_READ_ONLY_PROTOCOLS))}):/?(?!/)", re.ASCII
)


class AddressError(CheckpointError):
    """No state can be stored there: the address is invalid, or a package is missing."""

    exit_code = EXIT_USAGE


def local_directory(address: str) -> Path | None:
    """Return the directory that *address* names; None for a URL."""
    path = address.removeprefix("file://")
    return None if "://" in path else Path(path)


def check_address(address: str) -> None:
    """Raise unless *address* is a directory, or a URL that is supported here.

    Raises:
        AddressError: It is neither; lists the supported ones, or the package to install.
    """
    safe_address = scrub(address)
    if "://" not in address:
        if found := _ONE_SLASH.match(address):
            raise AddressError(
                f"{safe_address}: a URL begins with {found[1]}://; for a directory use ./"
            )
        return
    protocol, _, rest = address.partition("://")
    if not rest.strip("/"):
        raise AddressError(f"{safe_address}: {protocol}:// is incomplete; use s3://bucket/name")
    if protocol == "file":
        return
    if protocol in _READ_ONLY_PROTOCOLS:
        raise AddressError(
            f"{safe_address}: {protocol}:// is read-only; for a server that speaks "
            "S3 give s3://bucket/name and set AWS_ENDPOINT_URL"
        )
    protocols = _known_protocols(safe_address)
    if protocol not in protocols:
        suggestions = ", ".join(name for name in COMMON_PROTOCOLS if name in protocols)
        raise AddressError(
            f"{safe_address}: unknown protocol {protocol!r}; use a directory, "
            f"or a URL that begins with {suggestions}"
        )
    _require_package(safe_address, protocol, protocols[protocol])


def _known_protocols(safe_address: str) -> dict[str, Any]:
    """Return fsspec's entry for each protocol."""
    try:
        from fsspec.registry import known_implementations, registry
    except ImportError as exc:
        raise AddressError(
            f"{safe_address} needs the Python module fsspec, which is missing: pip install fsspec, "
            "or give a directory"
        ) from exc
    return {
        name: known_implementations.get(name, {}) for name in (*registry, *known_implementations)
    }


def _require_package(safe_address: str, protocol: str, implementation: dict[str, Any]) -> None:
    package = str(implementation.get("class", "fsspec")).partition(".")[0]
    if package != "fsspec":
        # Importing it takes seconds for some packages, and is left to the user of the store.
        if find_spec(package) is None:
            raise AddressError(
                f"{safe_address} needs the Python module {package}, which is missing; install it"
            )
        return
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ImportError as exc:
        raise AddressError(f"{safe_address} cannot be used here: {exc}") from exc


def open_store(address: str, *, first_response_timeout_s: float | None = None) -> "CheckpointStore":
    """Return the store at *address*: a path, ``file:///path``, or a URL such as ``s3://bucket/run``.

    Nothing is read yet. *first_response_timeout_s*: how long to wait for the first response of a
    URL's server; None: as long as the start of a training allows.

    Raises:
        AddressError: fsspec, or what it needs for this kind of URL, is not installed; or the URL
            is not valid.
        CheckpointError: fsspec rejects it.
    """
    check_address(address)
    if (path := local_directory(address)) is not None:
        from gpuops.checkpoint.storage.directory import DirectoryStore

        return DirectoryStore(path)
    from gpuops.checkpoint.storage.object_store import FIRST_RESPONSE_TIMEOUT_S, open_object_store

    return open_object_store(
        address, first_response_timeout_s=first_response_timeout_s or FIRST_RESPONSE_TIMEOUT_S
    )
