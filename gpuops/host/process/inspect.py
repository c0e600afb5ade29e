"""Inspect other processes: state, threads, children, result of a SIGKILL.

Nothing here stops the process or waits for it (no ptrace), so it also works for state D.

The main thread of an exiting process is a zombie while another thread is in the kernel, so
``/proc/PID/stat`` alone does not reveal a driver call that no signal ends.

After SIGKILL a process has ended, is exiting, or is stuck. Freeing a hundred GiB of memory takes
the kernel seconds, in which the process is still visible. A process that waits inside the kernel
for a device, or for a file system, may stay forever.
"""

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpuops.host.procfs import parse_stat
from gpuops.host.trust import text_of

_PASSES = 3  # a process may start another one during a pass


def kill_env_tagged(name: str, value: str, root: Path = Path("/")) -> list[int]:
    """SIGKILL the processes of this user with ``name=value``; return their pids without waiting.

    Processes that hide or have overwritten their environment are not found.
    """
    mark = f"{name}={value}".encode()
    killed: list[int] = []
    for _ in range(_PASSES):
        found = [pid for pid in _own(root / "proc") if pid not in killed and _kill(pid, mark, root)]
        if not found:
            break
        killed += found
    return killed


def _own(proc: Path) -> list[int]:
    """Return the processes of this user, except this one."""
    uid, mine, found = os.geteuid(), os.getpid(), []
    with suppress(OSError), os.scandir(proc) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.name.isdecimal() and entry.stat().st_uid == uid:
                    found.append(int(entry.name))
    return [pid for pid in found if pid != mine]


def _kill(pid: int, mark: bytes, root: Path) -> bool:
    # The descriptor first, so that the environment read below is of the same process.
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        words = (root / f"proc/{pid}/environ").read_bytes().split(b"\0")
        if mark not in words:
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(process)
    return True


_ENDED = ("Z", "X")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The state letter of a thread (proc(5)), and the kernel function it waits in, if known."""

    state: str
    wchan: str | None = None

    @property
    def ended(self) -> bool:
        """Return whether the thread has ended."""
        return self.state in _ENDED


def process_state(pid: int, root: Path = Path("/")) -> ThreadState | None:
    """Return the state of *pid*: of its thread in state D, else of its main thread, else of any.

    An ended thread counts only if all have ended; None if the process is gone.
    """
    found = [thread_state(pid, thread_id, root) for thread_id in _thread_ids(pid, root)]
    return max((state for state in found if state is not None), key=_weight, default=None)


def thread_state(pid: int, thread_id: int, root: Path = Path("/")) -> ThreadState | None:
    """Return the state of one thread of *pid*, None if it is gone."""
    task = root / f"proc/{pid}/task/{thread_id}"
    stat = parse_stat(text_of(task / "stat") or "")
    if stat is None:
        return None
    wchan = text_of(task / "wchan") or ""
    return ThreadState(stat.state, None if wchan in {"", "0"} else wchan)


def _weight(found: ThreadState) -> int:
    return 2 if found.state == "D" else 0 if found.ended else 1


def _thread_ids(pid: int, root: Path) -> list[int]:
    try:
        ids = [int(entry.name) for entry in (root / f"proc/{pid}/task").iterdir()]
    except (OSError, ValueError):
        return []
    return sorted(ids, key=lambda thread_id: (thread_id != pid, thread_id))


_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]{16})$", re.MULTILINE)
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)
_STACK_LINES_MAX = 32
# utime and stime, fields 14 and 15 of proc(5), counted from the state (field 3).
_UTIME, _STIME = 11, 12
_PPID = 1  # field 4
_GENERATIONS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDetails:
    """The state of a process in ``/proc`` at one moment.

    ``state`` is D if any of its threads is in D, else its main thread's; ``wchan`` and
    ``kernel_stack`` are of that thread (the stack for root only). ``main_cpu_s`` and
    ``main_waits`` (how often it waited for something) are of its main thread, None if not known.
    """

    state: str
    wchan: str | None = None
    kernel_stack: tuple[str, ...] = ()
    cpu_s: float = 0.0
    main_cpu_s: float | None = None
    main_waits: int | None = None
    caught: frozenset[int] = frozenset()


def read_details(pid: int, root: Path = Path("/")) -> ProcessDetails | None:
    """Return the details of *pid*, None if it is gone."""
    folder = root / f"proc/{pid}"
    overall = process_state(pid, root)
    text = text_of(folder / "stat") or ""
    if overall is None or parse_stat(text) is None:
        return None
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    kernel = text_of(folder / "stack") or ""
    status = text_of(folder / "status") or ""
    waits = _SWITCHES.search(status)
    # schedstat: nanoseconds on a processor, to the nanosecond; stat counts hundredths of a second.
    on_cpu_ns = (text_of(folder / f"task/{pid}/schedstat") or "").partition(" ")[0]
    return ProcessDetails(
        state=overall.state,
        wchan=overall.wchan,
        kernel_stack=tuple(line.strip() for line in kernel.splitlines()[:_STACK_LINES_MAX]),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        main_cpu_s=int(on_cpu_ns) / 1e9 if on_cpu_ns.isdecimal() else None,
        main_waits=int(waits[1]) if waits else None,
        caught=_caught(status),
    )


def _caught(status: str) -> frozenset[int]:
    match = _CAUGHT.search(status)
    mask = int(match[1], 16) if match else 0
    return frozenset(int(n) for n in signal.Signals if mask >> (n - 1) & 1)


def ancestors(pid: int, root: Path = Path("/")) -> list[int]:
    """Return the parent of *pid*, its parent, and so on."""
    found: list[int] = []
    while pid > 1 and len(found) < _GENERATIONS_MAX:
        fields = (text_of(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) <= _PPID or not fields[_PPID].isdecimal():
            break
        pid = int(fields[_PPID])
        found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Return the living descendants of *pid*, parents before children."""
    import psutil  # 60 ms, which `gpuops check` must not take where no process has to be killed

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


_FLAGS = 6  # field 9 of proc(5), counted from the state (field 3)
_PF_EXITING = 0x4


class KillOutcome(StrEnum):
    """The result of a SIGKILL."""

    NOTHING = "nothing"  # it has ended
    EXITING = "exiting"
    STUCK = "stuck"


def kill_outcome(pid: int, root: Path = Path("/")) -> KillOutcome:
    """Return the state of *pid* after SIGKILL by one pass over its threads.

    `KillOutcome.STUCK` if a thread is in state D, or runs as before the signal; a single pass may
    also find this for one that is exiting.
    """
    found = [fields for thread in _threads(pid, root) if (fields := _fields(thread))]
    living = [(state, flags) for state, flags in found if state not in _ENDED]
    if not living:
        return KillOutcome.NOTHING
    is_exiting = all(state != "D" and flags & _PF_EXITING for state, flags in living)
    return KillOutcome.EXITING if is_exiting else KillOutcome.STUCK


def _threads(pid: int, root: Path) -> list[Path]:
    try:
        return list((root / f"proc/{pid}/task").iterdir())
    except OSError:
        return []


def _fields(thread: Path) -> tuple[str, int] | None:
    """Return state and flags of *thread*, None if it is gone."""
    fields = (text_of(thread / "stat") or "").rpartition(")")[2].split()
    try:
        return fields[0], int(fields[_FLAGS])
    except (IndexError, ValueError):
        return None
