"""Files in a directory that others write to as well: opened by name, never through a link."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from gpuops.checkpoint.types import CheckpointError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: what has the name of a file may be a pipe that nobody writes to.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_BYTES = 2**20
_ADVICE = {
    errno.ENOSPC: ": free some space, or keep fewer states",
    errno.EDQUOT: ": free some of the quota, or keep fewer states",
    errno.EROFS: ": it is mounted read-only",
    errno.EACCES: ": another user owns it, or its mode forbids it",
    errno.ENOTDIR: ": it is a file, or one of the names before the last is",
    errno.ELOOP: ": it is a symbolic link, and none is followed here",
    errno.ESTALE: ": the file server no longer knows it",
}


@contextlib.contextmanager
def wrap_os_errors(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError of the block into a CheckpointError that says what was tried, and on what."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        advice = _ADVICE.get(exc.errno or 0, "")
        raise CheckpointError(f"cannot {action} {path}: {reason}{advice}") from exc


@contextlib.contextmanager
def open_directory(path: Path | str, *, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a directory; below *dir_fd* it may not be a link.

    Raises:
        OSError: It is none, or not to be opened.
    """
    # The store's own root may be reached through links: its user named it.
    flags = _DIRECTORY if dir_fd is not None else _DIRECTORY & ~os.O_NOFOLLOW
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        close_quietly(fd)


def close_quietly(fd: int) -> None:
    """Close *fd*, through which nothing was written: what closing it says is of no account."""
    with contextlib.suppress(OSError):
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make the directory *path* and those above it where they are not there, on stable storage.

    Raises:
        OSError: One of them cannot be made.
    """
    if path.is_dir():
        return
    make_directories(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        with open_directory(path.parent) as parent:
            os.fsync(parent)


def open_regular_file(name: str, dir_fd: int) -> int:
    """Return a descriptor of the regular file *name*.

    Raises:
        OSError: It is none, or not to be opened.
    """
    fd = os.open(name, _READ, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        close_quietly(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return fd


def read_bounded(name: str, dir_fd: int, bytes_max: int) -> bytes:
    """Return at most *bytes_max* + 1 bytes of the regular file *name*.

    Raises:
        OSError: It is none, or cannot be read.
    """
    fd = open_regular_file(name, dir_fd)
    try:
        parts, left_bytes = [], bytes_max + 1
        while left_bytes and (part := os.read(fd, min(left_bytes, _READ_BYTES))):
            parts.append(part)
            left_bytes -= len(part)
    finally:
        close_quietly(fd)
    return b"".join(parts)


def list_names(fd: int) -> list[str]:
    """Return what is in the directory *fd*, sorted.

    Raises:
        OSError: It cannot be listed.
    """
    return sorted(os.listdir(fd))


def create(name: str, dir_fd: int) -> int:
    """Return a descriptor of the new file *name*.

    Raises:
        OSError: There is something of this name, or it cannot be made.
    """
    return os.open(name, _CREATE, 0o666, dir_fd=dir_fd)


def write_synced(name: str, content: bytes, dir_fd: int) -> None:
    """Make the new file *name* with *content*, on stable storage.

    Raises:
        OSError: It cannot be made or written; a part of it may be there.
    """
    fd = create(name, dir_fd)
    try:
        write_all(fd, memoryview(content))
        os.fsync(fd)
    finally:
        os.close(fd)  # file servers tell of a failed write here, too


def write_all(fd: int, data: memoryview) -> None:
    """Write all of *data*.

    Raises:
        OSError: Not all of it could be written.
    """
    while data:
        n_written = os.write(fd, data)
        if n_written == 0:
            raise OSError(errno.EIO, "the file takes no more bytes, and no reason is given")
        data = data[n_written:]


def require_free_space(fd: int, nbytes: int) -> None:
    """Say nothing where the file system of *fd* has room for *nbytes*, or does not tell.

    Raises:
        OSError: With both figures, before half of it fills what others need.
    """
    filesystem = os.fstatvfs(fd)
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if filesystem.f_blocks and free_bytes < nbytes:
        raise OSError(errno.ENOSPC, f"it needs {nbytes} bytes, and {free_bytes} are free there")


def rename(old: str, new: str, dir_fd: int) -> None:
    """Give *old* the name *new* in the same directory.

    Raises:
        OSError: It cannot be renamed.
    """
    os.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def remove_tree(name: str, dir_fd: int) -> None:
    """Remove the directory *name* as far as it can be; what stays is for the next sweep."""
    with contextlib.suppress(OSError):  # of closing what it looked into
        shutil.rmtree(name, ignore_errors=True, dir_fd=dir_fd)


def regular_file_size(name: str, dir_fd: int) -> int:
    """Return the size of the regular file *name*; -1 for anything else.

    Raises:
        OSError: There is nothing of this name, or it cannot be looked at.
    """
    found = os.lstat(name, dir_fd=dir_fd)
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def is_directory(name: str, dir_fd: int) -> bool:
    """Return whether *name* is a directory, and not a link to one.

    Raises:
        OSError: It cannot be looked at.
    """
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=dir_fd).st_mode)
    except FileNotFoundError:
        return False
