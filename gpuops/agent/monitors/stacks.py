"""Python stacks out of what faulthandler and py-spy write; both are text of the job's own making.

Innermost frame first, as both have them. Bounded, and made printable where it is shown.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

THREADS_MAX = 256
FRAMES_MAX = 100
_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.{1,500})", line (\d{1,9}|\?\?\?) in (.{1,500})$')


@dataclass(frozen=True, slots=True)
class StackFrame:
    """Where a function stands: ``line`` 0 where that is not known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread's frames. ``owns_gil`` is None where the source does not say."""

    frames: tuple[StackFrame, ...]
    is_main: bool = False
    owns_gil: bool | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Stacks:
    """All threads of a process at one moment, and by whom they were read."""

    threads: tuple[ThreadStack, ...]
    source: str

    @property
    def main(self) -> ThreadStack | None:
        """Return the main thread."""
        return next((thread for thread in self.threads if thread.is_main), None)

    @property
    def gil_owner(self) -> ThreadStack | None:
        """Return the thread that holds the interpreter lock, None where none or not known."""
        return next((thread for thread in self.threads if thread.owns_gil), None)


def parse_faulthandler(text: str) -> Stacks | None:
    """Return the stacks of one dump of all threads, None where *text* holds none.

    The threads come newest first, so the main thread is the last.
    """
    threads: list[list[StackFrame]] = []
    for line in text.splitlines():
        if _HEADER.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            number = int(match[2]) if match[2].isdecimal() else 0
            threads[-1].append(StackFrame(match[1], number, match[3]))
    kept = [tuple(frames[:FRAMES_MAX]) for frames in threads[-THREADS_MAX:]]
    if not kept:
        return None
    last = len(kept) - 1
    return Stacks(
        tuple(ThreadStack(frames, is_main=n == last) for n, frames in enumerate(kept)),
        "faulthandler",
    )


def parse_pyspy(data: bytes, pid: int) -> Stacks | None:
    """Return the stacks in what ``py-spy dump --json`` printed of *pid*, None for other text."""
    try:
        found = json.loads(data)
        threads = tuple(_thread(item, pid) for item in _listed(found)[:THREADS_MAX])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Stacks(threads, "py-spy") if threads else None


def _listed(found: object) -> Sequence[Any]:
    if not isinstance(found, list):
        raise TypeError("not a list of threads")
    return found


def _thread(item: dict[str, Any], pid: int) -> ThreadStack:
    frames = tuple(
        StackFrame(str(f["filename"])[:500], int(f["line"]), str(f["name"])[:500])
        for f in item["frames"][:FRAMES_MAX]
    )
    name = str(item.get("thread_name") or "")[:100]
    # The kernel gives the first thread of a process the number of the process.
    is_main = item.get("os_thread_id") == pid or name == "MainThread"
    return ThreadStack(frames, is_main, bool(item["owns_gil"]), name)
