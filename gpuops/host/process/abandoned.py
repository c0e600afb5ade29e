"""Children that an earlier run had to leave behind, inside a call that no signal ends.

Each child carries the name of its question, so that the next run finds it and reports it again
instead of leaving one more: on a dead mount they could not be ended until the next boot.
"""

import os
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.process.inspect import process_state
from gpuops.host.procfs import Process, processes

# The kernel keeps 15 bytes of a name.
_NAME = re.compile(r"gpuops:[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class AbandonedProcess:
    """A child that asks its question still; ``age_s`` is since its start."""

    pid: int
    state: str
    age_s: float


def name_of(question: str) -> str:
    """Return the process name of a child that asks *question*."""
    return f"gpuops:{zlib.crc32(os.fsencode(question)):08x}"


def is_probe(process: Process) -> bool:
    """Say whether *process* has the name of a child of ours."""
    return _NAME.fullmatch(process.name) is not None


def abandoned(
    *, uid: int | None = None, now_s: float | None = None
) -> Mapping[str, AbandonedProcess]:
    """Return by name the oldest of the children that *uid* (this process') has on this machine.

    *now_s* is since boot. Children of a run that still goes on are among them: whoever asks the
    same question judges by their age.
    """
    uid = os.geteuid() if uid is None else uid
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME) if now_s is None else now_s
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    found: dict[str, AbandonedProcess] = {}
    for process in processes():
        if not is_probe(process) or _owner(process.pid) != uid:
            continue
        # Its main thread may have ended, and another be inside the kernel still.
        now = process_state(process.pid)
        if now is None or now.ended:
            continue
        child = AbandonedProcess(process.pid, now.state, now_s - process.start_ticks / ticks_per_s)
        if process.name not in found or found[process.name].age_s < child.age_s:
            found[process.name] = child
    return found


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
