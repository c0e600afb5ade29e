"""Small files of the system, replaced or read as a whole, and why reading one failed."""

import errno
import os
import stat
from pathlib import Path

from gpuops.model import UnknownReason

_BYTES_MAX = 2**16
ENTRIES_MAX = 4096


def text_of(path: Path) -> str | None:
    """Return what *path* holds without the space around it, None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MAX).decode("utf-8", errors="replace").strip()
    except OSError:
        return None


def number_of(path: Path, base: int = 10) -> int | None:
    """Return the whole number that *path* holds, None where it cannot be read or is none."""
    try:
        return int(text_of(path) or "", base)
    except ValueError:
        return None


def entries_of(folder: Path) -> list[Path]:
    """Return what is in *folder* by name, at most `ENTRIES_MAX`; nothing where it is not there."""
    try:
        return sorted(folder.iterdir())[:ENTRIES_MAX]
    except OSError:
        return []


def atomic_write(path: Path, content: bytes, mode: int) -> None:
    """Give *path* the *content* and the *mode* in one step; nothing is synced to the disk.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, mode)
        draft.replace(path)
    except BaseException:  # boundary: no draft stays behind, whatever ends this
        draft.unlink(missing_ok=True)
        raise


def why_not_ours(path: Path, *, private: bool) -> str | None:
    """Make *path* if need be; return None where it is ours and writable, else what is wrong.

    *private*: made for nobody else's eyes, and refused where others may write into it. Links are
    not followed.
    """
    try:
        path.mkdir(mode=0o700 if private else 0o755, parents=True, exist_ok=True)
        found = path.lstat()
        writable = os.access(path, os.W_OK | os.X_OK)
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError as exc:
        return exc.strerror or str(exc)
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    if private and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write into it (chmod 700 it)"
    if read_only:
        return "its file system is read-only"
    return None if writable else "no permission to write"


def reason_of(error: OSError) -> UnknownReason:
    """Return the reason for "unknown" that fits *error*."""
    if error.errno in {errno.EACCES, errno.EPERM}:
        return UnknownReason.NO_PERMISSION
    if error.errno == errno.ENOENT:
        return UnknownReason.MISSING_TOOL
    return UnknownReason.NOT_SUPPORTED
