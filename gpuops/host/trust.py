"""Which files root may believe (DESIGN §12): those that nobody else can have written."""

import os
import stat
from pathlib import Path

from gpuops.errors import ConfigError


def refuse_foreign(directory: Path, *, uid: int) -> None:
    """Return quietly where *directory* and the files in it belong to root and are closed to others.

    Only root (*uid* 0) is held to this: a user harms nobody by believing their own files. Links
    are judged by what they lead to.

    Raises:
        ConfigError: Names the first file that somebody else owns or may write.
    """
    if uid != 0 or not directory.is_dir():
        return
    for path in (directory, *sorted(directory.iterdir())):
        status = path.stat()
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"root does not read {path}: it belongs to uid {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}; make it root's own and writable by root only"
            )


def current_uid() -> int:
    """Return the effective user id of this process."""
    return os.geteuid()
