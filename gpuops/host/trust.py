"""Which files root may believe: those that nobody else can have written."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ConfigError
from gpuops.resources import data_dir


@dataclass(frozen=True, slots=True)
class CheckFolders:
    """Where suites and log rules are read from; a later folder overrides an earlier one."""

    suites: tuple[Path, ...]
    rules: tuple[Path, ...]


def check_folders(site_dir: Path | None, *, uid: int) -> CheckFolders:
    """Return the shipped folders and those of the site, which *uid* may believe.

    Raises:
        ConfigError: See `refuse_foreign`.
    """
    folders = [data_dir("checks")]
    if site_dir is not None:
        folders.append(site_dir)
        for folder in (site_dir, site_dir / "suites", site_dir / "rules"):
            refuse_foreign(folder, uid=uid)
    return CheckFolders(
        suites=tuple(folder / "suites" for folder in folders),
        rules=tuple(folder / "rules" for folder in folders),
    )


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
        _refuse(path, path.stat())


def refuse_foreign_file(path: Path, *, uid: int) -> None:
    """Return quietly where *path* and its folder belong to root and are closed to others.

    A folder like ``/tmp``, where others write but may not replace a file of root's, is fine.

    Raises:
        ConfigError: Names which of the two somebody else owns or may write.
    """
    if uid != 0:
        return
    real = path.resolve()
    _refuse(path, real.stat())
    folder = real.parent.stat()
    if not folder.st_mode & stat.S_ISVTX or folder.st_uid != 0:
        _refuse(real.parent, folder)


def _refuse(path: Path, status: os.stat_result) -> None:
    if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"root does not read {path}: it belongs to uid {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}; make it root's own and writable by root only"
        )


def current_uid() -> int:
    """Return the effective user id of this process."""
    return os.geteuid()
