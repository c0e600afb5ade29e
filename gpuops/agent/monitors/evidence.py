"""What can be known of workers that make no progress, gathered while they are still there.

All of a node's ranks at once, within a deadline, in a thread of its own: reading about a process
that hangs can hang. What has been found when the deadline comes is what there is.

Stacks come from faulthandler and py-spy, whose output is text of the job's own making: bounded
here, and made printable where it is shown. Innermost frame first, as both print them.
"""

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuops.host.process.inspect import ProcessLook, look_at
from gpuops.host.process.pyspy import dump, find_pyspy

log = logging.getLogger(__name__)

THREADS_MAX = 256
FRAMES_MAX = 100
_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.{1,500})", line (\d{1,9}|\?\?\?) in (.{1,500})$')
# When to look, seconds from the first look. The last two tell a rank that works from one that
# hangs in the same place; they are left out where the user has said how long is too long.
LOOKS_S = (0.0, 0.3)
LONG_LOOKS_S = (0.0, 0.3, 1.0, 2.0)
# Both answer within 0.2 s on a node with a processor to spare. A rank without a stack is a wrong
# name in the verdict, so a busy node gets the time that it needs.
DUMP_WAIT_S = 1.0
SPY_WAIT_S = 2.5
# For all looks together; what is not there then is decided without.
EVIDENCE_S = 8.0
_DUMP_BYTES_MAX = 2**20
_SOURCE_BYTES_MAX = 2**20
# Where torch is told to leave the flight recorder's dump of a rank, newest name first.
_RECORDER_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceTarget:
    """One worker to find out about; ``dumps`` says that SIGUSR2 makes it write to ``stacks``."""

    rank: int
    local_rank: int
    pid: int
    stacks: Path | None = None
    dumps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One look at a worker; None for what could not be had."""

    at_s: float
    look: ProcessLook | None
    dumped: Stacks | None = None
    spied: Stacks | None = None

    @property
    def stacks(self) -> Stacks | None:
        """Return the stacks, of py-spy where there are any: it tells of the interpreter lock."""
        return self.spied or self.dumped


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """All looks at one worker, oldest first; ``source_line`` is where its main thread stands."""

    target: EvidenceTarget
    samples: tuple[WorkerSample, ...] = ()
    source_line: str | None = None
    recorder_path: str | None = None


class SystemEvidenceReader:
    """How the workers of this machine can be seen; py-spy is looked for as `find_pyspy` says."""

    def __init__(self, search_path: str | None, beside: Path | None = None) -> None:
        self._pyspy = find_pyspy(search_path, beside)

    def look(self, pid: int) -> ProcessLook | None:
        """Return what the system says of *pid*, None where it is gone."""
        return look_at(pid)

    def dump(self, targets: Sequence[EvidenceTarget], wait_s: float) -> Mapping[int, Stacks]:
        """Return by rank the stacks that the workers themselves wrote within *wait_s*."""
        # The size is taken before asking: a worker may have answered when the signal is sent.
        sizes_before = [(t, t.stacks, _size(t.stacks)) for t in targets if t.stacks]
        begun = {t.rank: (path, before) for t, path, before in sizes_before if _ask(t)}
        found: dict[int, Stacks] = {}
        sizes: dict[int, int] = {}
        end_s = time.monotonic() + wait_s
        while len(found) < len(begun) and time.monotonic() < end_s:
            time.sleep(0.02)
            for rank, (path, before) in begun.items():
                size = _size(path)
                # Complete once it grows no more; what is read too early is only shorter.
                if rank not in found and size > before and size == sizes.get(rank):
                    stacks = parse_faulthandler(_read(path, before))
                    found |= {rank: stacks} if stacks is not None else {}
                sizes[rank] = size
        return found

    def spy(self, targets: Sequence[EvidenceTarget], wait_s: float) -> Mapping[int, Stacks]:
        """Return by rank the stacks that were read from outside within *wait_s*."""
        if self._pyspy is None:
            return {}
        pids = {target.rank: target.pid for target in targets}
        said = dump(self._pyspy, pids, wait_s)
        read = {rank: parse_pyspy(data, pids[rank]) for rank, data in said.items()}
        return {rank: stacks for rank, stacks in read.items() if stacks is not None}

    def source_line(self, path: str, line: int) -> str | None:
        """Return one line of a source file, None where it cannot be read."""
        try:
            with Path(path).open("rb") as file:
                lines = file.read(_SOURCE_BYTES_MAX).decode("utf-8", errors="replace").split("\n")
        except (OSError, ValueError):
            return None
        return lines[line - 1].strip() if 0 < line <= len(lines) else None

    def is_there(self, path: str) -> bool:
        """Say whether there is a file."""
        return Path(path).is_file()


@dataclass(slots=True)
class EvidenceCollector:
    """The facts on one node's workers, as they come in; `start` returns at once."""

    targets: Sequence[EvidenceTarget]
    eyes: SystemEvidenceReader
    env: Mapping[str, str]
    looks_s: Sequence[float] = LOOKS_S
    clock_s: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep
    _facts: dict[int, RankFacts] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin; whatever goes wrong is the end of it, and of nothing else."""
        self._facts = {target.rank: RankFacts(target=target) for target in self.targets}
        threading.Thread(target=self._run, name="gpuops-evidence", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether everything is there, at most *timeout_s* later."""
        return self._done.wait(timeout_s)

    @property
    def is_done(self) -> bool:
        """Say whether everything is there."""
        return self._done.is_set()

    @property
    def facts(self) -> dict[int, RankFacts]:
        """Return what is known so far, by rank."""
        return dict(self._facts)

    def _run(self) -> None:
        try:
            begun_s = self.clock_s()
            for number, at_s in enumerate(self.looks_s):
                self.pause(max(0.0, begun_s + at_s - self.clock_s()))
                self._sample(is_last=number == len(self.looks_s) - 1)
            self._complete()
        except Exception:  # boundary: less evidence, said by the verdicts
            log.exception("gathering evidence failed")
        finally:
            self._done.set()

    def _sample(self, *, is_last: bool) -> None:
        looks = {target.rank: self.eyes.look(target.pid) for target in self.targets}
        for target in self.targets:
            self._add(target.rank, WorkerSample(at_s=self.clock_s(), look=looks[target.rank]))
        # Who is stopped or inside the kernel would not answer, and may hold up who reads it.
        awake = [t for t in self.targets if (look := looks[t.rank]) and look.state in "RSI"]
        spied = self.eyes.spy(awake, SPY_WAIT_S)
        # A signal may wake what slept in a system call: where py-spy reads, it is the last thing.
        unseen = [t for t in awake if is_last or t.rank not in spied]
        dumped = self.eyes.dump(
            [t for t in unseen if t.dumps and signal.SIGUSR2 in _caught(looks[t.rank])], DUMP_WAIT_S
        )
        for target in self.targets:
            facts = self._facts[target.rank]
            newest = replace(
                facts.samples[-1], spied=spied.get(target.rank), dumped=dumped.get(target.rank)
            )
            samples = (*facts.samples[:-1], newest)
            self._facts[target.rank] = replace(facts, samples=samples)

    def _add(self, rank: int, sample: WorkerSample) -> None:
        facts = self._facts[rank]
        self._facts[rank] = replace(facts, samples=(*facts.samples, sample))

    def _complete(self) -> None:
        """Look at files, last: the file system may be what hangs."""
        for rank, facts in list(self._facts.items()):
            path = self._recorder_path(rank)
            if path is not None and self.eyes.is_there(path):
                facts = replace(facts, recorder_path=path)  # noqa: PLW2901 the same, completed
            stacks = facts.samples[-1].stacks if facts.samples else None
            main = stacks.main if stacks else None
            if main is not None and main.frames:
                line = self.eyes.source_line(main.frames[0].file, main.frames[0].line)
                facts = replace(facts, source_line=line)  # noqa: PLW2901 the same, completed
            self._facts[rank] = facts

    def _recorder_path(self, rank: int) -> str | None:
        prefixes = (self.env.get(name) for name in _RECORDER_PREFIXES)
        prefix = next((text for text in prefixes if text), None)
        return None if prefix is None else f"{prefix}{rank}"


def _caught(look: ProcessLook | None) -> frozenset[int]:
    return look.caught if look is not None else frozenset()


def _ask(target: EvidenceTarget) -> bool:
    """Send SIGUSR2 to *target* if it is a running child of ours; return whether it was."""
    try:
        fd = os.pidfd_open(target.pid)
    except OSError:
        return False
    try:
        # None: it runs. After the descriptor was opened, so it is no later process of that number.
        if os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        signal.pidfd_send_signal(fd, signal.SIGUSR2)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_DUMP_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError:
        return ""
