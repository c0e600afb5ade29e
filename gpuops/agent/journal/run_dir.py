"""The folder of one run, and the private one of its heartbeat rings.

``<run.dir>/<UTC time>-<name>-<last 8 of the run id>/`` holds the journal, a directory for each
generation and ``state.json``, the current state. The loss of any of it never ends a run.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuops.errors import UsageError
from gpuops.host.trust import atomic_write, why_not_ours
from gpuops.units import US_PER_S

STATE_SCHEMA = "gpuops.run-state/1"
RING_PREFIX = "gpuops-rings-"
_LOCK = "lock"
SPACE_BYTES_MIN = 64 * 2**20  # below this a rank's own output goes to the console only
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def folder_name(name: str, run_id: str, created_us: int) -> str:
    """Return ``20260302T091400Z-train-9f3c21ab``."""
    slug = _UNSAFE.sub("-", name).strip("-.")[:40] or "run"
    moment = datetime.fromtimestamp(created_us // US_PER_S, tz=UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{slug}-{run_id[-8:]}"


@dataclass(frozen=True, slots=True)
class RunParent:
    """The parent directory of runs; ``problem``: why it is not the configured one."""

    path: Path
    problem: str | None = None


def writable_parent(wanted: Path, *, was_asked_for: bool, fallbacks: Iterable[Path]) -> RunParent:
    """Return *wanted* if it can be created and written, else a private directory of this user.

    That is the first of *fallbacks* that only this user can write to, else a new one.

    Raises:
        UsageError: The user named *wanted*, and it cannot be written; or no directory can.
    """
    problem = why_not_writable(wanted)
    if problem is None:
        return RunParent(wanted.absolute())
    if was_asked_for:
        raise UsageError(f"cannot write the run directory {wanted}: {problem}")
    for path in fallbacks:
        if why_not_ours(path, private=True) is None and why_not_writable(path) is None:
            return RunParent(path.absolute(), problem)
    try:
        return RunParent(Path(tempfile.mkdtemp(prefix=f"gpuops-{os.geteuid()}-")), problem)
    except OSError:
        raise UsageError(
            f"cannot write the run directory {wanted}: {problem}; try --run-dir DIR"
        ) from None


def why_not_writable(path: Path) -> str | None:
    """Return why no file can be created in *path*, None where one can; *path* is created too."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as exc:
        return exc.strerror or str(exc)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run on this node; ``group_rank`` distinguishes agents in one directory."""

    path: Path
    rings: Path
    rings_lock: int = -1

    @property
    def journal(self) -> Path:
        """Return the path of the run's own copy of its events."""
        return self.path / "journal"

    def generation(self, number: int) -> Path:
        """Return the directory of the logs of generation *number*."""
        return self.path / f"generation-{number}"

    def ring(self, generation: int, rank: int) -> Path:
        """Return the path of the heartbeat ring of *rank*."""
        return self.rings / f"generation-{generation}" / f"rank{rank}.ring"

    def remove_rings_before(self, generation: int) -> None:
        """Free the memory of the rings of generations before *generation*."""
        for older in self.rings.glob("generation-*"):
            number = older.name.rpartition("-")[2]
            if number.isdecimal() and int(number) < generation:
                shutil.rmtree(older, ignore_errors=True)

    def write_state(self, state: Mapping[str, object], *, group_rank: int) -> None:
        """Replace the state file atomically.

        Raises:
            OSError: The directory is gone, full or read-only.
        """
        name = "state.json" if group_rank == 0 else f"state-{group_rank}.json"
        text = json.dumps({"schema": STATE_SCHEMA, **state}) + "\n"
        atomic_write(self.path / name, text.encode(), 0o600)

    def remove_rings(self) -> None:
        """Free the memory of the rings."""
        shutil.rmtree(self.rings, ignore_errors=True)
        if self.rings_lock >= 0:
            os.close(self.rings_lock)


def create_rings(candidates: Iterable[Path]) -> tuple[Path, int]:
    """Return a new private directory for rings, in memory if possible, and its lock.

    The descriptor holds the lock until it is closed, at the latest by the end of this process.
    Directories of killed agents are removed.

    Raises:
        OSError: None of *candidates* is usable.
    """
    problem: OSError | None = None
    for parent in candidates:
        _remove_leftovers(parent)
        try:
            return _locked_directory(parent)
        except OSError as exc:
            problem = exc
    raise problem or OSError("there is no directory for heartbeat rings")


def _locked_directory(parent: Path) -> tuple[Path, int]:
    # It gets the name that `_remove_leftovers` matches only once it is locked.
    folder = Path(tempfile.mkdtemp(prefix=".gpuops-", dir=parent))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = folder.rename(parent / folder.name.replace(".gpuops-", RING_PREFIX, 1))
    except OSError:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return named, lock


def _remove_leftovers(parent: Path) -> None:
    """Remove directories that no agent locks; process ids of other containers have no meaning."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{RING_PREFIX}*"):
            if path.lstat().st_uid == os.geteuid() and not _is_locked(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    """Return whether an agent holds the lock *path*, or whether that is unknown."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def has_space(path: Path) -> bool:
    """Return whether *path* has space for rank logs: a full disk ends a job at its next print."""
    try:
        return shutil.disk_usage(path).free >= SPACE_BYTES_MIN
    except OSError:
        return False
