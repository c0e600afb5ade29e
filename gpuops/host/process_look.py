"""One process from outside, without touching it: what it waits in, what it used, what it catches.

Nothing here stops the process or waits for it (no ptrace), so it also works on one in state D.
"""

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.procfs import parse_stat
from gpuops.host.small_files import text_of
from gpuops.host.threads import process_state

_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]{16})$", re.MULTILINE)
_IO = re.compile(r"^[rw]char: (\d+)$", re.MULTILINE)
_STACK_LINES_MAX = 32
# utime and stime, fields 14 and 15 of proc(5), counted from the state (field 3).
_UTIME, _STIME = 11, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """What ``/proc`` says of a process at one moment.

    ``state`` is D where any of its threads is in D, else its main thread's; ``wchan`` and
    ``kernel_stack`` are of that thread (the stack for root only). ``io_bytes`` is None where
    another user's process does not tell.
    """

    state: str
    wchan: str | None = None
    kernel_stack: tuple[str, ...] = ()
    cpu_s: float = 0.0
    io_bytes: int | None = None
    caught: frozenset[int] = frozenset()


def look_at(pid: int, root: Path = Path("/")) -> ProcessLook | None:
    """Return what there is to see of *pid*, None where it is gone."""
    folder = root / f"proc/{pid}"
    whole = process_state(pid, root)
    text = text_of(folder / "stat") or ""
    if whole is None or parse_stat(text) is None:
        return None
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    kernel = text_of(folder / "stack") or ""
    io = _IO.findall(text_of(folder / "io") or "")
    return ProcessLook(
        state=whole.state,
        wchan=whole.wchan,
        kernel_stack=tuple(line.strip() for line in kernel.splitlines()[:_STACK_LINES_MAX]),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        io_bytes=sum(map(int, io)) if io else None,
        caught=_caught(text_of(folder / "status") or ""),
    )


def _caught(status: str) -> frozenset[int]:
    match = _CAUGHT.search(status)
    mask = int(match[1], 16) if match else 0
    return frozenset(int(n) for n in signal.Signals if mask >> (n - 1) & 1)
