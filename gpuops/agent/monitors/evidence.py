"""Collects evidence on workers that make no progress, while they are still alive.

All ranks of a node are sampled at once, within a deadline, in a separate thread: reading the state
of a process that hangs can hang. At the deadline the evidence collected so far is used.
"""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpuops.agent.monitors.recorder.kept import keep_recorders
from gpuops.agent.monitors.recorder.reader import parse_dumps, read_bodies
from gpuops.agent.monitors.source_line import statement_at
from gpuops.agent.monitors.stacks import Stacks, parse_faulthandler, parse_pyspy
from gpuops.convert.flight_recorder import BYTES_MAX, read_dump
from gpuops.detect.recorder_dump import RankDump, parse_dump
from gpuops.host.process.inspect import ProcessDetails, read_details
from gpuops.host.process.pyspy import StackRecordings, dump, find_pyspy
from gpuops.host.process.traffic import Traffic, read_traffic
from gpuops.model import Json

log = logging.getLogger(__name__)

# When to sample, seconds from the first sample. The long ones tell a rank that works from one that
# hangs in one place, and begin `LEAD_S` before the limit; a limit that the user has set holds for
# both, so two are enough.
SAMPLES_S = (0.0, 0.3)
LONG_SAMPLES_S = (0.0, 0.3, 1.0, 2.0, 3.5, 5.0, 6.5, 8.0)
LEAD_S = 6.0
LATE_S = 0.3
# Both answer within 0.2 s on a node with an idle processor. A rank without a stack may cause a
# wrong diagnosis, so a busy node gets more time.
DUMP_WAIT_S = 1.0
SPY_WAIT_S = 2.5
RECORDER_WAIT_S = 2.0
# For all samples together; the diagnosis is made without those that are missing then.
EVIDENCE_S = 8.0
# Between the long samples the stacks are recorded, until before the last one.
RECORD_S = 7
RECORD_LATE_S = 4.0  # on a busy machine; the long samples end 2 s after the limit
_RECORDED_MIN = 100
_FILE_BYTES_MAX = 2**20
# torch's variables for the path of the flight recorder's dump of a rank, newest name first.
_RECORDER_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceTarget:
    """One worker to sample; ``dumps``: SIGUSR2 makes it write its stacks to ``stacks``.

    ``recorder``, ``groups``: where it serves its flight recorder and notes its groups.
    """

    rank: int
    local_rank: int
    pid: int
    stacks: Path | None = None
    dumps: bool = False
    recorder: Path | None = None
    groups: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One sample of a worker; None for what could not be read."""

    at_s: float
    process: ProcessDetails | None
    traffic: Traffic | None = None
    dumped: Stacks | None = None
    spied: Stacks | None = None

    @property
    def stacks(self) -> Stacks | None:
        """Return the stacks, preferably of py-spy: it reports the interpreter lock."""
        return self.spied or self.dumped


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """All samples of one worker, oldest first; ``source_line`` is that of its main thread.

    ``elsewhere``: in which share of a recording its main thread was not where it mostly was.
    ``dump``: its collectives, None where it has no flight recorder or did not answer;
    ``recorder_kept``: the file that holds them. ``recorder_path``: what torch wrote at a time-out.
    """

    target: EvidenceTarget
    samples: tuple[WorkerSample, ...] = ()
    elsewhere: float | None = None
    source_line: str | None = None
    recorder_path: str | None = None
    dump: RankDump | None = None
    recorder_kept: Path | None = None


class SystemEvidenceReader:
    """Reads the state of workers on this host; `find_pyspy` finds py-spy."""

    def __init__(self, search_path: str | None, next_to: Path | None = None) -> None:
        self._pyspy = find_pyspy(search_path, next_to)

    def inspect(self, pid: int) -> ProcessDetails | None:
        """Return the state of process *pid*, None where it is gone."""
        return read_details(pid)

    def traffic(self, pids: Sequence[int]) -> Mapping[int, Traffic]:
        """Return by process the bytes that it and its children have moved so far."""
        return read_traffic(pids)

    def collectives(self, targets: Sequence[EvidenceTarget], wait_s: float) -> Mapping[int, Json]:
        """Return by rank what their flight recorders hold, as far as they answer in *wait_s*."""
        return read_bodies(targets, wait_s)

    def dump(self, targets: Sequence[EvidenceTarget], wait_s: float) -> Mapping[int, Stacks]:
        """Return by rank the stacks that the workers themselves wrote within *wait_s*."""
        # The size is read before the signal is sent: a worker may answer at once.
        sizes_before = [(t, t.stacks, _size(t.stacks)) for t in targets if t.stacks]
        begun = {t.rank: (path, before) for t, path, before in sizes_before if _request_dump(t)}
        found: dict[int, Stacks] = {}
        sizes: dict[int, int] = {}
        end_s = time.monotonic() + wait_s
        while len(found) < len(begun) and time.monotonic() < end_s:
            time.sleep(0.02)
            for rank, (path, before) in begun.items():
                size = _size(path)
                # Complete once it stops growing; a stack that is read too early is only shorter.
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
        outputs = dump(self._pyspy, pids, wait_s)
        read = {rank: parse_pyspy(data, pids[rank]) for rank, data in outputs.items()}
        return {rank: stacks for rank, stacks in read.items() if stacks is not None}

    def record(self, targets: Sequence[EvidenceTarget]) -> StackRecordings | None:
        """Begin to record the stacks of *targets*, for `RECORD_S`; return None if it cannot."""
        if self._pyspy is None:
            return None
        try:
            return StackRecordings(self._pyspy, {t.rank: t.pid for t in targets}, RECORD_S)
        except OSError as exc:
            log.debug("no stacks are recorded: %s", exc)
            return None

    def source_line(self, path: str, line: int) -> str | None:
        """Return the statement at a line of a source file, None where it cannot be read."""
        try:
            return statement_at(_read(Path(path), 0), line)
        except ValueError:
            return None

    def exists(self, path: str) -> bool:
        """Return whether *path* is a file."""
        return Path(path).is_file()

    def dumped_collectives(self, path: str, target: EvidenceTarget) -> RankDump | None:
        """Return what torch wrote to *path* at a time-out of *target*, None where it did not.

        A file that is older than the newest group of *target* is of an earlier generation.
        """
        try:
            if target.groups is None or _mtime_ns(Path(path)) < _mtime_ns(target.groups):
                return None
            with Path(path).open("rb") as file:
                return parse_dump(read_dump(file.read(BYTES_MAX + 1)), target.rank)
        except (OSError, ValueError) as exc:
            log.debug("%s is not used: %s", path, exc)
            return None

    def keep(self, folder: Path, bodies: Mapping[int, Json]) -> Path | None:
        """Keep the flight recorders *bodies* in *folder*; return the file, if it was written."""
        return keep_recorders(folder, bodies)


@dataclass(slots=True)
class EvidenceCollector:
    """Collects the facts on one node's workers in a thread; `start` returns at once.

    The flight recorders are kept in *folder*.
    """

    targets: Sequence[EvidenceTarget]
    reader: SystemEvidenceReader
    env: Mapping[str, str]
    samples_s: Sequence[float] = SAMPLES_S
    clock_s: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] | None = None
    folder: Path | None = None
    _bodies: dict[int, Json] = field(default_factory=dict)
    _is_forgotten: bool = False
    _facts: dict[int, RankFacts] = field(default_factory=dict)
    _hurried: threading.Event = field(default_factory=threading.Event)
    _sampled_s: float = -math.inf
    _done: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin; an error ends the collection, and nothing else."""
        self._facts = {target.rank: RankFacts(target=target) for target in self.targets}
        threading.Thread(target=self._run, name="gpuops-evidence", daemon=True).start()

    def hurry(self) -> None:
        """Take two samples in all, and the last one soon: the workers are about to be ended."""
        self._hurried.set()

    def forget(self) -> None:
        """Keep no file: there is no hang after all."""
        self._is_forgotten = True

    def wait(self, timeout_s: float) -> bool:
        """Return whether the collection is complete, at most *timeout_s* later."""
        return self._done.wait(timeout_s)

    @property
    def facts(self) -> dict[int, RankFacts]:
        """Return the facts so far, by rank."""
        return dict(self._facts)

    def _run(self) -> None:
        try:
            begun_s = self.clock_s()
            is_long = self.samples_s[-1] > RECORD_S
            recordings = self.reader.record(self.targets) if is_long else None
            for number, at_s in enumerate(self.samples_s):
                is_last = number == len(self.samples_s) - 1
                if number and not is_last and self._is_omitted(begun_s + at_s):
                    continue
                self._wait_until(begun_s + at_s)
                self._sample(is_last=is_last)
            if recordings is not None:
                self._add(recordings.end(0.0 if self._hurried.is_set() else RECORD_LATE_S))
            self._complete()
        except Exception:  # boundary: the diagnoses report missing evidence
            log.exception("collecting evidence failed")
        finally:
            self._done.set()

    def _is_omitted(self, at_s: float) -> bool:
        """Return whether to go on to the next sample: a busy machine takes fewer, not longer."""
        return self._hurried.is_set() or self.clock_s() - at_s > LATE_S

    def _wait_until(self, at_s: float) -> None:
        (self.pause or self._hurried.wait)(max(0.0, at_s - self.clock_s()))
        if self._hurried.is_set():
            # One wait for a disk would look like two if the samples did not lie apart.
            time.sleep(max(0.0, min(at_s, self._sampled_s + SAMPLES_S[-1]) - self.clock_s()))

    def _sample(self, *, is_last: bool) -> None:
        self._sampled_s = self.clock_s()
        processes = {target.rank: self.reader.inspect(target.pid) for target in self.targets}
        for rank, process in processes.items():
            facts = self._facts[rank]
            sample = WorkerSample(at_s=self.clock_s(), process=process)
            self._facts[rank] = replace(facts, samples=(*facts.samples, sample))
        self._read_recorders(processes, is_last=is_last)
        # A process that is stopped or inside the kernel does not answer, and may block its reader.
        awake = [t for t in self.targets if (p := processes[t.rank]) and p.state in "RSI"]
        traffic = self.reader.traffic([target.pid for target in awake])
        spied = self.reader.spy(awake, SPY_WAIT_S)
        # A signal may interrupt a system call: where py-spy works, it is sent at the end only.
        unseen = [t for t in awake if is_last or t.rank not in spied]
        dumped = self.reader.dump(
            [
                t
                for t in unseen
                if t.dumps and signal.SIGUSR2 in _handled_signals(processes[t.rank])
            ],
            DUMP_WAIT_S,
        )
        for target in self.targets:
            facts = self._facts[target.rank]
            newest = replace(
                facts.samples[-1],
                traffic=traffic.get(target.pid),
                spied=spied.get(target.rank),
                dumped=dumped.get(target.rank),
            )
            samples = (*facts.samples[:-1], newest)
            self._facts[target.rank] = replace(facts, samples=samples)

    def _read_recorders(
        self, processes: Mapping[int, ProcessDetails | None], *, is_last: bool
    ) -> None:
        """Read them once, before the samples of stacks delay who would answer, or time-outs end it.

        The last sample reads those that are missing. Threads of a process in state D may answer.
        """
        if len(self._facts[self.targets[0].rank].samples) > 1 and not is_last:
            return
        asked = [
            t
            for t in self.targets
            if self._facts[t.rank].dump is None and (p := processes[t.rank]) and p.state in "RSID"
        ]
        bodies = self.reader.collectives(asked, RECORDER_WAIT_S)
        for rank, held in parse_dumps(bodies).items():
            self._facts[rank] = replace(self._facts[rank], dump=held)
            self._bodies[rank] = bodies[rank]

    def _add(self, recorded: Mapping[int, Sequence[int]]) -> None:
        """Add what was recorded: by rank, how often each stack was seen."""
        for rank, counts in recorded.items():
            if (n_seen := sum(counts)) >= _RECORDED_MIN:
                elsewhere = 1.0 - max(counts) / n_seen
                self._facts[rank] = replace(self._facts[rank], elsewhere=elsewhere)

    def _complete(self) -> None:
        """Read and write files, last: the file system may be what hangs."""
        for rank, facts in list(self._facts.items()):
            path = self._recorder_path(rank)
            if path is not None and self.reader.exists(path):
                dump = facts.dump or self.reader.dumped_collectives(path, facts.target)
                facts = replace(facts, recorder_path=path, dump=dump)  # noqa: PLW2901 completed
            stacks = facts.samples[-1].stacks if facts.samples else None
            main = stacks.main if stacks else None
            if main is not None and main.frames:
                line = self.reader.source_line(main.frames[0].file, main.frames[0].line)
                facts = replace(facts, source_line=line)  # noqa: PLW2901 the same, completed
            self._facts[rank] = facts
        if self.folder is not None and self._bodies and not self._is_forgotten:
            kept = self.reader.keep(self.folder, self._bodies)
            for rank in self._bodies:
                self._facts[rank] = replace(self._facts[rank], recorder_kept=kept)

    def _recorder_path(self, rank: int) -> str | None:
        prefixes = (self.env.get(name) for name in _RECORDER_PREFIXES)
        prefix = next((text for text in prefixes if text), None)
        return None if prefix is None else f"{prefix}{rank}"


def _handled_signals(process: ProcessDetails | None) -> frozenset[int]:
    return process.caught if process is not None else frozenset()


def _request_dump(target: EvidenceTarget) -> bool:
    """Send SIGUSR2 to *target* if it is a running child of this agent; return whether it is."""
    try:
        fd = os.pidfd_open(target.pid)
    except OSError:
        return False
    try:
        # None: it runs. The descriptor was opened before, so the number has not been reused.
        if os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        signal.pidfd_send_signal(fd, signal.SIGUSR2)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _mtime_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_FILE_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError:
        return ""
