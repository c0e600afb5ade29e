"""The state of a process over all its threads.

The main thread of a process that ends is a zombie as long as another thread stays in the kernel,
so ``/proc/PID/stat`` alone does not tell of a driver call that no signal ends.
"""

from dataclasses import dataclass
from pathlib import Path

from gpuops.host.procfs import parse_stat

_ENDED = ("Z", "X")


@dataclass(frozen=True, slots=True)
class ThreadState:
    """The state letter of a thread (proc(5)), and the kernel function it waits in, where told."""

    state: str
    wchan: str | None = None

    @property
    def ended(self) -> bool:
        """Return whether the thread runs no more."""
        return self.state in _ENDED


def process_state(pid: int, root: Path = Path("/")) -> ThreadState | None:
    """Return the state of *pid*: of its thread in state D, else of its main thread, else of any.

    A thread that has ended speaks only where all have; None where the process is gone.
    """
    found = [thread_state(pid, thread_id, root) for thread_id in _thread_ids(pid, root)]
    return max((state for state in found if state is not None), key=_weight, default=None)


def thread_state(pid: int, thread_id: int, root: Path = Path("/")) -> ThreadState | None:
    """Return the state of one thread of *pid*, None where it is gone."""
    task = root / f"proc/{pid}/task/{thread_id}"
    stat = parse_stat(_text(task / "stat"))
    if stat is None:
        return None
    wchan = _text(task / "wchan").strip()
    return ThreadState(stat.state, None if wchan in {"", "0"} else wchan)


def _weight(found: ThreadState) -> int:
    return 2 if found.state == "D" else 0 if found.ended else 1


def _thread_ids(pid: int, root: Path) -> list[int]:
    try:
        ids = [int(entry.name) for entry in (root / f"proc/{pid}/task").iterdir()]
    except (OSError, ValueError):
        return []
    return sorted(ids, key=lambda thread_id: (thread_id != pid, thread_id))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
