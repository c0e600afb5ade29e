"""Whether a directory is this user's own: in a place like /tmp others can have made it first."""

import os
import stat
from pathlib import Path


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
