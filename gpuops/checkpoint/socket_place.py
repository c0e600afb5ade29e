"""Where a keeper's socket is in its folder, however long the name of that is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET = "keeper.sock"


def socket_of(folder: Path) -> Path:
    """Return the path of the socket in *folder*."""
    return folder / SOCKET


@contextmanager
def reachable(folder: Path, name: str = SOCKET) -> Iterator[str]:
    """Yield a short path to *name* in *folder*.

    The address of a socket has 107 bytes at most (unix(7)), which the folders of a run exceed.

    Raises:
        OSError: The folder cannot be opened.
    """
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
