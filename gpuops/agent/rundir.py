"""The folder of one run, and the private one of its heartbeat rings.

``<run.dir>/<UTC time>-<name>-<last 8 of the run id>/`` holds the journal, a directory for each
generation and ``state.json``, which says what runs now. Losing any of it never ends a run.
"""

import contextlib
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
from gpuops.units import US_PER_S

STATE_SCHEMA = "gpuops.run-state/1"
RING_PREFIX = "gpuops-rings-"
SPACE_BYTES_MIN = 64 * 2**20  # below this a rank's own output goes to the console only
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}")


def folder_name(name: str, run_id: str, created_us: int) -> str:
    """Return ``20260302T091400Z-train-9f3c21ab``."""
    slug = _UNSAFE.sub("-", name).strip("-.")[:40] or "run"
    moment = datetime.fromtimestamp(created_us // US_PER_S, tz=UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{slug}-{run_id[-8:]}"


def writable_parent(wanted: Path, *, was_asked_for: bool, fallbacks: Iterable[Path]) -> Path:
    """Return the first directory that can be made and written: *wanted*, else a fallback.

    Raises:
        UsageError: The user named *wanted*, and it cannot be written; or nothing can.
    """
    problem = _trouble(wanted)
    if problem is None:
        return wanted.absolute()
    if was_asked_for:
        raise UsageError(f"cannot write the run directory {wanted}: {problem}")
    for path in fallbacks:
        if _trouble(path) is None:
            return path.absolute()
    raise UsageError(f"cannot write the run directory {wanted}: {problem}; try --run-dir DIR")


def _trouble(path: Path) -> str | None:
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


def create_rings(candidates: Iterable[Path]) -> Path:
    """Return a new private directory for rings, in memory where there is such a place.

    Directories of agents that were killed before they could tidy up are removed.

    Raises:
        OSError: None of the places takes one.
    """
    problem: OSError | None = None
    for parent in candidates:
        _remove_leftovers(parent)
        try:
            return Path(tempfile.mkdtemp(prefix=f"{RING_PREFIX}{os.getpid()}-", dir=parent))
        except OSError as exc:
            problem = exc
    raise problem or OSError("no place for heartbeat rings was named")


def _remove_leftovers(parent: Path) -> None:
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{RING_PREFIX}*"):
            pid = path.name.removeprefix(RING_PREFIX).partition("-")[0]
            mine = path.lstat().st_uid == os.geteuid()
            if mine and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)


def has_space(path: Path) -> bool:
    """Say whether rank logs may go below *path*: a full disk ends a job at its next print."""
    try:
        return shutil.disk_usage(path).free >= SPACE_BYTES_MIN
    except OSError:
        return False
