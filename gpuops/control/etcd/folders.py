"""Private folders of processes that may be killed: the next process removes what they left."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def locked_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """Return a new private folder in *parent* and the descriptor that marks it as in use.

    The mark ends with this process. Folders of this user with *prefix* that have none are removed.

    Raises:
        OSError: None can be made.
    """
    for left in own_folders(prefix, parent):
        with suppress(OSError):
            _remove_unused(left)
    # Under its name only once it is marked: another process may look in between.
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.removeprefix("."))), fd


def own_folders(prefix: str, parent: Path) -> Iterator[Path]:
    """Yield the folders of this user in *parent* whose names begin with *prefix*."""
    for found in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if found.lstat().st_uid == os.geteuid() and found.is_dir() and not found.is_symlink():
                yield found


def _remove_unused(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
