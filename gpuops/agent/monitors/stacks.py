"""The stacks of a process, as faulthandler and py-spy print them; pure.

Their output is controlled by the job: it is bounded here, and made printable where it is shown. The
innermost frame is first, as both print them.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

THREADS_MAX = 256
FRAMES_MAX = 100
_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.{1,500})", line (\d{1,9}|\?\?\?) in (.{1,500})$')
_BACKWARD = re.compile(r"/torch/autograd/(?:graph|__init__)\.py$")


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A position in a function: ``line`` 0 where it is not known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread's frames. ``owns_gil`` is None where the source does not report it."""

    frames: tuple[StackFrame, ...]
    is_main: bool = False
    owns_gil: bool | None = None
    name: str = ""

    @property
    def is_native(self) -> bool:
        """Return whether C++ started the thread, and it runs Python."""
        return bool(self.frames) and not self.is_main and self.frames[-1].function != "_bootstrap"


@dataclass(frozen=True, slots=True)
class Stacks:
    """All threads of a process at one moment; ``source`` is the tool that read them."""

    threads: tuple[ThreadStack, ...]
    source: str

    @property
    def main(self) -> ThreadStack | None:
        """Return the main thread.

        While it waits in the backward pass, the Python of autograd's thread for the GPU (a hook
        that offloads, gathers or reads) is on top of it: that is what it waits for.
        """
        main = next((thread for thread in self.threads if thread.is_main), None)
        if main is None or not main.frames or not _BACKWARD.search(main.frames[0].file):
            return main
        engine = next((thread for thread in self.threads if thread.is_native), None)
        if engine is None:
            return main
        owns_gil = main.owns_gil or engine.owns_gil
        return replace(main, frames=engine.frames + main.frames, owns_gil=owns_gil)

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
    """Return the stacks in the output of ``py-spy dump --json`` for *pid*, None if malformed."""
    try:
        found = json.loads(data)
        if not isinstance(found, list):
            return None
        threads = tuple(_thread(item, pid) for item in found[:THREADS_MAX])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Stacks(threads, "py-spy") if threads else None


def _thread(item: dict[str, Any], pid: int) -> ThreadStack:
    frames = tuple(
        StackFrame(str(f["filename"])[:500], int(f["line"]), str(f["name"])[:500])
        for f in item["frames"][:FRAMES_MAX]
    )
    name = str(item.get("thread_name") or "")[:100]
    # The kernel gives the first thread of a process the number of the process.
    is_main = item.get("os_thread_id") == pid or name == "MainThread"
    return ThreadStack(frames, is_main, bool(item["owns_gil"]), name)
