"""The store that an address names: a directory, or any URL that fsspec knows."""

from pathlib import Path

from gpuops.checkpoint.address import check_address
from gpuops.checkpoint.directory import DirectoryStore
from gpuops.checkpoint.state_store import CheckpointStore


def open_store(address: str, *, first_answer_s: float | None = None) -> CheckpointStore:
    """Return the store at *address*: a path, ``file:///path``, or a URL such as ``s3://bucket/run``.

    Nothing is looked at yet. *first_answer_s*: how long the server of a URL is waited for that has
    not answered before; None: as long as a training that starts can afford.

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
    from gpuops.checkpoint.object_store import FIRST_ANSWER_S, open_object_store

    return open_object_store(address, first_answer_s=first_answer_s or FIRST_ANSWER_S)
