"""Which files root may trust: those that no other user can have written.

Who may write a folder may replace its content, so every folder on the path counts, and every link
is followed step by step as the kernel follows it. Also helpers to read and write small files.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.config.resolve import ErrorHandler, raise_error
from gpuops.errors import ConfigError
from gpuops.model import UnknownReason
from gpuops.resources import data_dir

_BYTES_MAX = 2**16
ENTRIES_MAX = 4096


def text_of(path: Path) -> str | None:
    """Return the stripped content of *path*, None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MAX).decode("utf-8", errors="replace").strip()
    except OSError:
        return None


def read_file(path: Path, bytes_max: int) -> tuple[bytes, int] | None:
    """Return the first *bytes_max* of the regular file *path*, and the uid of its owner.

    None where there is none: *path* may name anything of another user. A pipe is not waited for,
    and a link as its last part is not followed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            return (file.read(bytes_max), found.st_uid) if stat.S_ISREG(found.st_mode) else None
    except OSError:
        return None


def read_json(path: Path, bytes_max: int) -> tuple[dict[str, Any], int] | None:
    """Return the JSON object in *path* and the uid of its owner; None as for `read_file`."""
    found = read_file(path, bytes_max)
    try:
        body = None if found is None else json.loads(found[0])
    except (ValueError, RecursionError):
        return None
    return (body, found[1]) if found is not None and isinstance(body, dict) else None


def number_of(path: Path, base: int = 10) -> int | None:
    """Return the integer in *path*, None if it cannot be read or is none."""
    try:
        return int(text_of(path) or "", base)
    except ValueError:
        return None


def is_there(path: Path) -> bool:
    """Return whether *path* exists; False if that cannot be seen."""
    try:
        path.stat()
    except OSError:
        return False
    return True


def entries_of(folder: Path) -> list[Path]:
    """Return the entries of *folder* by name, at most `ENTRIES_MAX`; none if it is missing."""
    try:
        return sorted(folder.iterdir())[:ENTRIES_MAX]
    except OSError:
        return []


def atomic_write(path: Path, content: bytes, mode: int) -> None:
    """Replace *path* atomically with *content* and *mode*; nothing is synced to the disk.

    Raises:
        OSError: It cannot be written; the old file stays.
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
    """Create *path* if missing; return None if it is ours and writable, else the problem.

    *private*: created with mode 700, and refused if others may write into it. Links are not
    followed.
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


def is_ours(folder: Path) -> bool:
    """Return whether *folder* exists, is no link, belongs to us, and others cannot write in it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    private = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and private


def reason_of(error: OSError) -> UnknownReason:
    """Return the reason for "unknown" that matches *error*."""
    if error.errno in {errno.EACCES, errno.EPERM}:
        return UnknownReason.NO_PERMISSION
    if error.errno == errno.ENOENT:
        return UnknownReason.MISSING_TOOL
    return UnknownReason.NOT_SUPPORTED


# As in path_resolution(7).
_LINKS_MAX = 40
_FOLDERS = ("suites", "rules", "profiles", "baselines", "xid", "checks.d")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFolders:
    """The folders of the checks' data; a later one overrides an earlier one.

    ``site_checks`` has the site's executables and ``silences`` are files; only a site has them.
    """

    suites: tuple[Path, ...]
    rules: tuple[Path, ...]
    profiles: tuple[Path, ...]
    baselines: tuple[Path, ...]
    xid: tuple[Path, ...]
    site_checks: Path | None = None
    silences: tuple[Path, ...] = ()


def check_folders(
    site_dir: Path | None, *, uid: int, on_error: ErrorHandler = raise_error
) -> CheckFolders:
    """Return the shipped folders and those of the site, if *uid* may trust them.

    Raises:
        ConfigError: The site's folder is missing; or see `refuse_foreign`.
    """
    folders = [data_dir("checks")]
    silences: tuple[Path, ...] = ()
    if site_dir is not None:
        folders.append(site_dir)
        silences = _vetted_site(site_dir, uid, on_error)
    return CheckFolders(
        suites=tuple(folder / "suites" for folder in folders),
        rules=tuple(folder / "rules" for folder in folders),
        profiles=tuple(folder / "profiles" for folder in folders),
        baselines=tuple(folder / "baselines" for folder in folders),
        xid=tuple(folder / "xid" for folder in folders),
        site_checks=None if site_dir is None else site_dir / "checks.d",
        silences=silences,
    )


def _vetted_site(site_dir: Path, uid: int, on_error: ErrorHandler) -> tuple[Path, ...]:
    """Check all files in *site_dir* that are read; return the site's silences."""
    if not site_dir.is_dir():
        on_error(ConfigError(f"the site's folder {site_dir} (check.site_dir) does not exist"))
    for folder in (site_dir, *(site_dir / name for name in _FOLDERS)):
        refuse_foreign(folder, uid=uid, on_error=on_error)
    silences = site_dir / "silences.toml"
    return (silences,) if silences.exists() else ()


def refuse_foreign(directory: Path, *, uid: int, on_error: ErrorHandler = raise_error) -> None:
    """Check that root may trust *directory* and its content.

    Only for root (*uid* 0) of a system: a user's own files are no risk for others.

    Raises:
        ConfigError: Names what another user owns or may write: the folder, a file in it, or a
            folder or link on the path to one.
    """
    if not is_system_root(uid) or not directory.is_dir():
        return
    for path in (directory, *sorted(directory.iterdir())):
        try:
            _refuse(path)
        except ConfigError as exc:
            on_error(exc)


def refuse_foreign_file(path: Path, *, uid: int) -> None:
    """Check that root may trust *path*; a folder like ``/tmp`` may be on its path.

    Raises:
        ConfigError: See `refuse_foreign`.
    """
    if is_system_root(uid):
        _refuse(path)


def _refuse(path: Path) -> None:
    """Raise if *path*, or a folder or a link on the way to it, is writable by others than root.

    In a sticky folder of root's others may write but not replace root's files; it is not allowed as
    *path* itself, where others could add files that are read.
    """
    steps = list(_steps(path))
    for number, (step, status) in enumerate(steps):
        is_parent = number < len(steps) - 1
        sticky = is_parent and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        closed = stat.S_ISLNK(status.st_mode) or sticky or not status.st_mode & 0o022
        if status.st_uid != 0 or not closed:
            what = "it" if step == path else step
            raise ConfigError(
                f"root does not read {path}: {what} belongs to uid {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}; make it root's own and writable by root only"
            )


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each component of *path*, from ``/`` on; ends at a missing one."""
    here, links = Path("/"), 0
    yield here, here.lstat()
    waiting = list(reversed(path.absolute().parts[1:]))
    while waiting:
        step = here / waiting[-1] if waiting[-1] != ".." else here.parent
        waiting.pop()
        try:
            status = step.lstat()
            link_target = step.readlink() if stat.S_ISLNK(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as exc:
            raise ConfigError(f"root cannot read {step}: {exc.strerror}") from exc
        yield step, status
        if link_target is None:
            here = step
            continue
        links += 1
        if links > _LINKS_MAX:
            raise ConfigError(f"root does not read {path}: it is a loop of links at {step}")
        here = Path("/") if link_target.is_absolute() else here
        waiting += reversed([part for part in link_target.parts if part != "/"])


def is_system_root(uid: int) -> bool:
    """Return whether *uid*, of this process, is root of a system, not a user shown as root.

    A namespace with a single uid (user_namespaces(7)) is one user's: that of `unshare
    --map-root-user`, of enroot's --root, of pyxis' --container-remap-root.
    """
    users = (text_of(Path("/proc/self/uid_map")) or "").splitlines()
    return uid == 0 and not (len(users) == 1 and users[0].split()[2:] == ["1"])


def current_uid() -> int:
    """Return the effective user id of this process."""
    return os.geteuid()
