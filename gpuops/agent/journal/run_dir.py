"""The folder of one run, and the private one of its heartbeat rings.

``<run.dir>/<UTC time>-<name>-<last 8 of the run id>/`` holds the journal, a directory for each
generation and ``state.json``, which says what runs now. Losing any of it never ends a run.
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
from gpuops.host.trust import why_not_ours
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
    """Where runs go; ``problem`` says why not where they should have gone."""

    path: Path
    problem: str | None = None


def writable_parent(wanted: Path, *, was_asked_for: bool, fallbacks: Iterable[Path]) -> RunParent:
    """Return *wanted* if it can be made and written, else a private directory of this user.

    That is the first of *fallbacks* that nobody else can have prepared, else a new one.

    Raises:
        UsageError: The user named *wanted*, and it cannot be written; or nothing can.
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
    """Return why no file can be made in *path*, which is made itself where it is not there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as exc:
        return exc.strerror or str(exc)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run on this node; ``group_rank`` tells agents in one directory apart."""

    path: Path
    rings: Path
    rings_lock: int = -1

    @property
    def journal(self) -> Path:
        """Return where the run's own copy of its events is."""
        return self.path / "journal"

    def generation(self, number: int) -> Path:
        """Return where the logs of generation *number* are."""
        return self.path / f"generation-{number}"

    def ring(self, generation: int, rank: int) -> Path:
        """Return the ring of *rank*."""
        return self.rings / f"generation-{generation}" / f"rank{rank}.ring"

    def remove_rings_before(self, generation: int) -> None:
        """Give the memory of the rings of generations before *generation* back."""
        for older in self.rings.glob("generation-*"):
            number = older.name.rpartition("-")[2]
            if number.isdecimal() and int(number) < generation:
                shutil.rmtree(older, ignore_errors=True)

    def write_state(self, state: Mapping[str, object], *, group_rank: int) -> None:
        """Replace the state file as a whole; a reader never sees half of it.

        Raises:
            OSError: The directory is gone, full or read-only.
        """
        name = "state.json" if group_rank == 0 else f"state-{group_rank}.json"
        partial = self.path / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps({"schema": STATE_SCHEMA, **state}) + "\n", encoding="utf-8")
        partial.replace(self.path / name)

    def remove_rings(self) -> None:
        """Give the memory of the rings back."""
        shutil.rmtree(self.rings, ignore_errors=True)
        if self.rings_lock >= 0:
            os.close(self.rings_lock)


def create_rings(candidates: Iterable[Path]) -> tuple[Path, int]:
    """Return a new private directory for rings, in memory where there is such a place.

    The descriptor with it holds a lock on it until it is closed, by whatever end of this process.
    Directories of agents that were killed before they could tidy up are removed.

    Raises:
        OSError: None of the places takes one.
    """
    problem: OSError | None = None
    for parent in candidates:
        _remove_leftovers(parent)
        try:
            return _locked_directory(parent)
        except OSError as exc:
            problem = exc
    raise problem or OSError("no place for heartbeat rings was named")


def _locked_directory(parent: Path) -> tuple[Path, int]:
    # It gets the name by which leftovers are found once it is locked, not before.
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
    """Remove what no living agent locks; other containers' process ids would say nothing here."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{RING_PREFIX}*"):
            if path.lstat().st_uid == os.geteuid() and not _is_locked(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    """Say whether an agent holds *path*, or nobody can know."""
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
    """Say whether rank logs may go below *path*: a full disk ends a job at its next print."""
    try:
        return shutil.disk_usage(path).free >= SPACE_BYTES_MIN
    except OSError:
        return False
