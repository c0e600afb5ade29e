"""Which files root may believe: those that nobody else can have written.

Whoever may write a folder may replace what is in it, so every folder on the way counts, and every
link is followed here step by step as the kernel follows it.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuops.config.resolve import ErrorHandler, raise_error
from gpuops.errors import ConfigError
from gpuops.resources import data_dir

# As path_resolution(7) has it.
_LINKS_MAX = 40
_FOLDERS = ("suites", "rules", "profiles", "xid", "checks.d")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFolders:
    """Where the data of checks is read from; a later folder overrides an earlier one.

    ``site_checks`` holds the site's executables and ``silences`` are files; the site alone has any.
    """

    suites: tuple[Path, ...]
    rules: tuple[Path, ...]
    profiles: tuple[Path, ...]
    xid: tuple[Path, ...]
    site_checks: Path | None = None
    silences: tuple[Path, ...] = ()


def check_folders(
    site_dir: Path | None, *, uid: int, complain: ErrorHandler = raise_error
) -> CheckFolders:
    """Return the shipped folders and those of the site, which *uid* may believe.

    Raises:
        ConfigError: The site's folder is not there; or see `refuse_foreign`.
    """
    folders = [data_dir("checks")]
    silences: tuple[Path, ...] = ()
    if site_dir is not None:
        folders.append(site_dir)
        silences = _vetted_site(site_dir, uid, complain)
    return CheckFolders(
        suites=tuple(folder / "suites" for folder in folders),
        rules=tuple(folder / "rules" for folder in folders),
        profiles=tuple(folder / "profiles" for folder in folders),
        xid=tuple(folder / "xid" for folder in folders),
        site_checks=None if site_dir is None else site_dir / "checks.d",
        silences=silences,
    )


def _vetted_site(site_dir: Path, uid: int, complain: ErrorHandler) -> tuple[Path, ...]:
    """Return the site's silences, once everything in *site_dir* that is read may be believed."""
    if not site_dir.is_dir():
        complain(ConfigError(f"the site's folder {site_dir} (check.site_dir) is not there"))
    for folder in (site_dir, *(site_dir / name for name in _FOLDERS)):
        refuse_foreign(folder, uid=uid, complain=complain)
    silences = site_dir / "silences.toml"
    return (silences,) if silences.exists() else ()


def refuse_foreign(directory: Path, *, uid: int, complain: ErrorHandler = raise_error) -> None:
    """Return quietly where root may believe *directory* and what is in it.

    Only root (*uid* 0) is held to this: a user harms nobody by believing their own files.

    Raises:
        ConfigError: Names what somebody else owns or may write: the folder, a file in it, or a
            folder or link on the way to one.
    """
    if uid != 0 or not directory.is_dir():
        return
    for path in (directory, *sorted(directory.iterdir())):
        try:
            _refuse(path)
        except ConfigError as exc:
            complain(exc)


def refuse_foreign_file(path: Path, *, uid: int) -> None:
    """Return quietly where root may believe *path*; a folder like ``/tmp`` may be on the way.

    Raises:
        ConfigError: See `refuse_foreign`.
    """
    if uid == 0:
        _refuse(path)


def _refuse(path: Path) -> None:
    """Raise where *path*, or a folder or a link on the way to it, is not root's alone.

    In a sticky folder of root's others may write but not replace what is root's; where they could
    add something that is read, as in *path* itself, it does not do.
    """
    steps = list(_steps(path))
    for number, (step, status) in enumerate(steps):
        on_the_way = number < len(steps) - 1
        sticky = on_the_way and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        closed = stat.S_ISLNK(status.st_mode) or sticky or not status.st_mode & 0o022
        if status.st_uid != 0 or not closed:
            what = "it" if step == path else step
            raise ConfigError(
                f"root does not read {path}: {what} belongs to uid {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}; make it root's own and writable by root only"
            )


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield what opening *path* goes through, from ``/`` on; ends where something is not there."""
    here, links = Path("/"), 0
    yield here, here.lstat()
    waiting = list(reversed(path.absolute().parts[1:]))
    while waiting:
        step = here / waiting[-1] if waiting[-1] != ".." else here.parent
        waiting.pop()
        try:
            status = step.lstat()
            leads_to = step.readlink() if stat.S_ISLNK(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as exc:
            raise ConfigError(f"root cannot look at {step}: {exc.strerror}") from exc
        yield step, status
        if leads_to is None:
            here = step
            continue
        links += 1
        if links > _LINKS_MAX:
            raise ConfigError(f"root does not read {path}: it is a loop of links at {step}")
        here = Path("/") if leads_to.is_absolute() else here
        waiting += reversed([part for part in leads_to.parts if part != "/"])


def current_uid() -> int:
    """Return the effective user id of this process."""
    return os.geteuid()
