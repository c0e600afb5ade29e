"""Directories of a spool, opened step by step.

Root reads spools that users own, and a user may replace any of their entries at any moment by a
link, a FIFO, a device, a mount or another's file. So each step is opened relative to the descriptor
of the one before, no link is followed, and each must have the expected owner.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def open_folder(path: Path, *names: str, uid: int) -> Iterator[int]:
    """Yield a descriptor of the directory *path* / *names*; *path* and all below are *uid*'s.

    Of another user's *path* the parent must be ours.

    Raises:
        OSError: One is missing, a link, no directory, another user's, or another user's mount.
    """
    with contextlib.ExitStack() as stack:
        if uid != os.geteuid():
            # The directory itself may be a mount of its user; the one above is ours.
            names, path = (path.name, *names), path.parent
        fd = os.open(path, _FOLDER)
        stack.callback(os.close, fd)
        _check_owner(fd, os.geteuid())
        for name in names:
            fd = _open_entry(name, _FOLDER, fd, uid)
            stack.callback(os.close, fd)
        yield fd


def open_file(folder: int, name: str, *, uid: int) -> int:
    """Return a descriptor to read the regular file *name* of *uid* in an open directory.

    Raises:
        OSError: It is missing, of another kind, another user's, or a mount of another user.
    """
    return _open_entry(name, _FILE, folder, uid)


def ensure_folder(folder: int, name: str) -> None:
    """Create the directory *name* (mode 700) in an open directory, if it is missing.

    Raises:
        OSError: It cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)


def open_to_append(folder: int, name: str) -> int:
    """Return a descriptor to append to the regular file *name* of ours; create it if missing.

    Raises:
        OSError: It cannot be opened, or is of another kind or another user's.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _checked(os.open(name, flags, 0o600, dir_fd=folder), os.geteuid())


def replace_file(folder: int, name: str, content: bytes, *, sync: bool = False) -> None:
    """Replace the file *name* in an open directory of ours; *sync* it to the disk.

    Raises:
        OSError: It cannot be written; the old file stays.
    """
    draft = f"{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    if sync:
        os.fsync(folder)


def _open_entry(name: str, flags: int, folder: int, uid: int) -> int:
    if uid == os.geteuid():
        return _checked(os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder), uid)
    # Another user's entry is not opened before it is known: a device acts when it is opened, and a
    # FUSE file system may never answer, not even stat.
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if _mount_id(handle) != _mount_id(folder):
            raise PermissionError(errno.EPERM, "it is a mount")
        _check_owner(handle, uid)
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        if is_folder != (flags == _FOLDER) or not (is_folder or _is_regular(handle)):
            raise PermissionError(errno.EPERM, "it is of another kind")
        # The descriptor's own link: it leads to what was judged, whatever has the name now.
        return os.open(f"/proc/self/fd/{handle}", flags & ~os.O_NOFOLLOW)
    finally:
        os.close(handle)


def _checked(fd: int, uid: int) -> int:
    try:
        _check_owner(fd, uid)
        if not _is_regular(fd) and not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise PermissionError(errno.EPERM, "it is no regular file")
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _check_owner(fd: int, uid: int) -> None:
    owner = os.fstat(fd).st_uid
    if owner != uid:
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}, not to {uid}")


def _mount_id(fd: int) -> str:
    """Return the id of the mount of *fd*, without asking its file system."""
    text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    return next(line for line in text.splitlines() if line.startswith("mnt_id:"))
