"""The store that an address names: a directory, or any URL that fsspec knows."""

from pathlib import Path

from gpuops.checkpoint.storage.address import check_address
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.directory import DirectoryStore


def open_store(address: str, *, first_response_timeout_s: float | None = None) -> CheckpointStore:
    """Return the store at *address*: a path, ``file:///path``, or a URL such as ``s3://bucket/run``.

    Nothing is looked at yet. *first_response_timeout_s*: how long the server of a URL is waited for
    that has not answered before; None: as long as a training that starts can afford.

    Raises:
        AddressError: fsspec, or what it needs for this kind of URL, is not installed; or the URL
            is none.
        CheckpointError: fsspec cannot make anything of it.
    """
    check_address(address)
    if address.startswith("file://"):
        return DirectoryStore(Path(address.removeprefix("file://")))
    if "://" not in address:
        return DirectoryStore(Path(address))
    from gpuops.checkpoint.storage.object_store import FIRST_RESPONSE_TIMEOUT_S, open_object_store

    return open_object_store(
        address, first_response_timeout_s=first_response_timeout_s or FIRST_RESPONSE_TIMEOUT_S
    )
