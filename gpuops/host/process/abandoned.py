"""Records of child processes that could not be ended, so that the next run does not start another.

A process name and arguments can be chosen by anyone, also for a process of root (a set-user-ID
program). So a left-over child is known only by a record that its parent wrote: boot, pid and start
time, in a folder that only this user can write, under the full hash of its question. The folder is
in memory: a dead disk must not delay the parent.
"""

import hashlib
import os
import re
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.host.process.inspect import process_state
from gpuops.host.procfs import process
from gpuops.host.trust import atomic_write, entries_of, is_ours, text_of, why_not_ours

_FILE = re.compile(r"([0-9a-f]{40})\.(\d+)")


@dataclass(frozen=True, slots=True)
class AbandonedProcess:
    """A child that still runs; ``age_s`` since its start, ``wchan`` as of `process_state`."""

    pid: int
    state: str
    age_s: float
    wchan: str | None = None


def name_of(question: str) -> str:
    """Return the process name of a child for *question*: for people, nothing is decided by it."""
    return f"gpuops:{zlib.crc32(os.fsencode(question)):08x}"


def _key(question: str) -> str:
    return hashlib.sha256(os.fsencode(question)).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class AbandonedProbes:
    """The oldest recorded child of each question; ``pids`` are those of all.

    Without a ``folder`` nothing is recorded.
    """

    folder: Path | None = None
    by_key: Mapping[str, AbandonedProcess] = field(default_factory=dict)
    pids: frozenset[int] = frozenset()

    def find(self, question: str) -> AbandonedProcess | None:
        """Return the child that earlier runs left behind for *question*."""
        return self.by_key.get(_key(question))

    def record(self, question: str, pid: int) -> None:
        """Record the child *pid*; without a folder of our own it stays unknown."""
        found = process(pid)
        if self.folder is None or found is None:
            return
        for folder in (self.folder.parent, self.folder):
            if why_not_ours(folder, private=True) is not None:
                return
        with suppress(OSError):
            text = f"{_boot()} {found.start_ticks}\n"
            atomic_write(self.folder / f"{_key(question)}.{pid}", text.encode(), 0o600)

    def forget(self, question: str, pid: int) -> None:
        """Remove the record of *pid*, which has ended."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / f"{_key(question)}.{pid}").unlink()


def records_folder() -> Path:
    """Return where this user's records are."""
    uid = os.geteuid()
    parent = Path("/run/gpuops") if uid == 0 else Path(f"/dev/shm/gpuops-{uid}")  # noqa: S108 checked
    return parent / "abandoned"


def abandoned(folder: Path | None = None, *, now_s: float | None = None) -> AbandonedProbes:
    """Return the children that are on record in *folder* (default: ours) and still run.

    *now_s* is since boot. They include children of a run in progress; callers judge by their age.
    Records of processes that have ended are removed.
    """
    folder = records_folder() if folder is None else folder
    if not (is_ours(folder.parent) and is_ours(folder)):
        return AbandonedProbes(folder)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME) if now_s is None else now_s
    ticks_per_s, boot = os.sysconf("SC_CLK_TCK"), _boot()
    found: dict[str, AbandonedProcess] = {}
    pids = set()
    for path in entries_of(folder):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        key, pid = match[1], int(match[2])
        ticks, now = _start_ticks(path, pid, boot), process_state(pid)
        if ticks is None or now is None or now.ended:
            with suppress(OSError):
                path.unlink()
            continue
        pids.add(pid)
        child = AbandonedProcess(pid, now.state, now_s - ticks / ticks_per_s, now.wchan)
        if key not in found or found[key].age_s < child.age_s:
            found[key] = child
    return AbandonedProbes(folder, found, frozenset(pids))


def _boot() -> str:
    return text_of(Path("/proc/sys/kernel/random/boot_id")) or "unknown"


def _start_ticks(path: Path, pid: int, boot: str) -> int | None:
    """Return the start of *pid* if it is the process that *path* records."""
    found = process(pid)
    if found is None or text_of(path) != f"{boot} {found.start_ticks}":
        return None
    return found.start_ticks
