"""What is left of a process that was sent SIGKILL: nothing, one that is being taken apart, or more.

The kernel takes a process apart in its own name: the memory of one that held a hundred GiB is
given back for seconds, in which it can be seen and does nothing else. A process that waits inside
the kernel for a device, or for a file system, may stay for ever.
"""

from enum import StrEnum
from pathlib import Path

from gpuops.host.small_files import text_of

_ENDED = ("Z", "X")
_FLAGS = 6  # field 9 of proc(5), counted from the state (field 3)
_PF_EXITING = 0x4


class Left(StrEnum):
    """What is left of a process."""

    NOTHING = "nothing"  # but its exit code
    EXITING = "exiting"
    STUCK = "stuck"


def left_of(pid: int, root: Path = Path("/")) -> Left:
    """Return what is left of *pid* by one look at all its threads.

    `Left.STUCK`, where one is in state D, or runs as if nothing had been sent; a single look may
    find so of one that exits, too.
    """
    found = [fields for thread in _threads(pid, root) if (fields := _fields(thread))]
    living = [(state, flags) for state, flags in found if state not in _ENDED]
    if not living:
        return Left.NOTHING
    is_exiting = all(state != "D" and flags & _PF_EXITING for state, flags in living)
    return Left.EXITING if is_exiting else Left.STUCK


def _threads(pid: int, root: Path) -> list[Path]:
    try:
        return list((root / f"proc/{pid}/task").iterdir())
    except OSError:
        return []


def _fields(thread: Path) -> tuple[str, int] | None:
    """Return state and flags of *thread*, None where it is gone."""
    fields = (text_of(thread / "stat") or "").rpartition(")")[2].split()
    try:
        return fields[0], int(fields[_FLAGS])
    except (IndexError, ValueError):
        return None
