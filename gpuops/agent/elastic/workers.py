"""The workers of one generation on this node: started, watched, ended."""

import logging
import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM, Signals

from gpuops.agent.elastic.exits import ExitContext, RankFiles, read_exception, read_tail, to_exit
from gpuops.agent.elastic.teardown import (
    ExitWatcher,
    ObservedExit,
    Teardown,
    end_workers,
    kill_groups,
    signal_process,
)
from gpuops.agent.monitors.progress import RankProgress
from gpuops.host.clock import Clock
from gpuops.model import WorkerExit
from gpuops.scrub import scrub_lines
from gpuops.wire.ring import (
    HEADER_BYTES,
    RING_BYTES,
    SLOTS_MAX,
    STEP_UNKNOWN,
    AgentRequest,
    Beat,
    WorkerFlag,
    read_beats,
    read_flags,
    write_request,
)

log = logging.getLogger(__name__)

_BYTES_MAX = RING_BYTES + SLOTS_MAX * 64


class RingReader:
    """Returns each beat once. A ring that is not there yet, or is damaged, has no beats.

    The same way back go the agent's requests.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_seq = 0
        self._ring: mmap.mmap | None = None
        self._is_damaged = False
        self._is_writable = False
        self._wanted: tuple[AgentRequest, int] | None = None

    def poll(self) -> list[Beat]:
        """Return the beats since the last call, oldest first; the ring holds the newest 1024."""
        if self._ring is None:
            self._open()
        if self._ring is None or self._is_damaged:
            return []
        try:
            beats = read_beats(memoryview(self._ring), self.last_seq)
        except ValueError as error:  # RingError, or a number that is none of ours
            self._is_damaged = True
            log.warning(
                "the heartbeats in %s are ignored (%s): steps and hangs of this rank are not seen;"
                " if the script's environment has another gpuops than the agent, install the same",
                self.path.name,
                str(error),
            )
            return []
        if beats:
            self.last_seq = beats[-1].seq
        return beats

    @property
    def flags(self) -> WorkerFlag:
        """Return the flags of the worker's last beat; nothing where there is no ring.

        With `Flag.TERM_IS_OURS` SIGKILL takes nothing from the script that SIGTERM would not have
        taken: it has no handler for it. `Flag.ASKED` says that the script reads
        `gpuops.should_stop`; one that never does is stopped after its next step.
        """
        if self._ring is None or self._is_damaged:
            return WorkerFlag(0)
        return read_flags(memoryview(self._ring))

    def request(self, request: AgentRequest, stop_step: int = STEP_UNKNOWN) -> bool:
        """Ask *request* of the worker, from *stop_step* on; return whether it can see that now.

        A worker without a ring yet is asked once it has one. Give all ranks of a run the same
        *stop_step*, above the last step of each: they leave their loops at the same step then.
        """
        self._wanted = request, stop_step
        if self._ring is None:
            self._open()
        else:
            self._ask()
        return self._ring is not None and self._is_writable and not self._is_damaged

    def _ask(self) -> None:
        if self._wanted is not None and self._ring is not None and self._is_writable:
            write_request(memoryview(self._ring), *self._wanted)

    def close(self) -> None:
        """Close the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _open(self) -> None:
        for mode, prot in (
            (os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE),
            (os.O_RDONLY, mmap.PROT_READ),
        ):
            try:
                fd = os.open(self.path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if HEADER_BYTES <= os.fstat(fd).st_size <= _BYTES_MAX:
                    self._ring = mmap.mmap(fd, 0, prot=prot)
                    self._is_writable = mode == os.O_RDWR
                    self._ask()
                    return
            except (OSError, ValueError):
                self._is_damaged = True
            finally:
                os.close(fd)


def free_port() -> int:
    """Return a port that is free on every address: the workers' rank 0 will listen on all."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker process and what it leaves."""

    rank: int
    local_rank: int
    pid: int
    ring: RingReader
    files: RankFiles


class Workers:
    """A generation that has been started. Everything here is bounded in time."""

    def __init__(self, workers: Sequence[Worker], clock: Clock) -> None:
        self._workers = {worker.local_rank: worker for worker in workers}
        self._pids = {worker.local_rank: worker.pid for worker in workers}
        self._clock = clock
        self._watcher = ExitWatcher(self._pids, clock)
        self._teardown = Teardown()
        self._is_wound_down = False

    @property
    def all(self) -> tuple[Worker, ...]:
        """Return the workers by local rank."""
        return tuple(self._workers.values())

    def of_rank(self, rank: int) -> Worker:
        """Return the worker of a global rank."""
        return next(worker for worker in self._workers.values() if worker.rank == rank)

    def beat_counts(self) -> dict[int, int]:
        """Return how often each global rank has beaten so far."""
        return {worker.rank: worker.ring.last_seq for worker in self._workers.values()}

    def signal(self, local_rank: int, number: Signals) -> bool:
        """Send *number* to one worker that lives; say whether it got it."""
        if local_rank in self._watcher.seen():
            return False
        return signal_process(self._pids[local_rank], number)

    def kill(self) -> None:
        """SIGKILL what is left, from any thread; waits for nothing."""
        seen = self._watcher.seen()
        kill_groups(pid for local_rank, pid in self._pids.items() if local_rank not in seen)

    @property
    def pids(self) -> dict[int, int]:
        """Return the process ids by global rank."""
        return {worker.rank: worker.pid for worker in self._workers.values()}

    @property
    def needs_exit_check(self) -> bool:
        """Say whether torch has something to find: a failure, or the end of all."""
        if not self._watcher.sees_all:
            return True
        seen = self._watcher.seen()
        return len(seen) == len(self._pids) or any(end.code != 0 for end in seen.values())

    @property
    def has_failed(self) -> bool:
        """Say whether a worker is known to have ended otherwise than with exit code 0.

        Where torch reaped one first only torch knows its code, and is asked.
        """
        return any(end.code not in {0, None} for end in self._watcher.seen().values())

    @property
    def all_ended(self) -> bool:
        """Say whether no worker is left."""
        return len(self._watcher.seen()) == len(self._pids)

    @property
    def stuck_ranks(self) -> tuple[int, ...]:
        """Return the global ranks that outlived SIGKILL."""
        return tuple(self._workers[local_rank].rank for local_rank in self._teardown.stuck)

    @property
    def exiting_ranks(self) -> tuple[int, ...]:
        """Return the global ranks that have not given back all memory some seconds after it."""
        return tuple(self._workers[local_rank].rank for local_rank in self._teardown.exiting)

    @property
    def left(self) -> tuple[int, ...]:
        """Return the local ranks that were still there after SIGKILL: nobody waits for them."""
        return self._teardown.stuck + self._teardown.exiting

    def beats(self) -> dict[int, list[Beat]]:
        """Return the new beats by global rank."""
        return {worker.rank: worker.ring.poll() for worker in self._workers.values()}

    def let_others_fail(self, within_s: float) -> None:
        """Give the others a moment to end by themselves."""
        self._watcher.wait(lambda seen: len(seen) == len(self._pids), within_s)

    def end(self, first: Signals, grace_s: float, is_urgent: Callable[[], bool]) -> None:
        """End those that are left; see `end_workers`."""
        if self._is_wound_down:
            return  # torch may have reaped them: their process ids are anyone's now
        for worker in self._workers.values():
            worker.ring.request(AgentRequest.TERMINATE)
        done = end_workers(
            self._pids,
            self._watcher,
            self._clock,
            first=first,
            grace_s=grace_s,
            is_urgent=is_urgent,
            at_once=[
                # Our handler in the shim does nothing that a process without one would do.
                worker.local_rank
                for worker in self._workers.values()
                if first is SIGTERM and worker.ring.flags & WorkerFlag.HANDLES_SIGTERM
            ],
        )
        self._teardown.sent.update(done.sent)
        self._teardown.stuck, self._teardown.exiting = done.stuck, done.exiting
        self._is_wound_down = not done.stuck

    def exits(
        self, node: str, progress: Callable[[int], RankProgress], codes: Mapping[int, int]
    ) -> list[WorkerExit]:
        """Return every worker's end, by rank.

        Args:
            node: This node's name.
            progress: How far a rank came.
            codes: Exit codes by global rank as torch has them, for those it reaped first.
        """
        seen = self._watcher.seen()
        now = ObservedExit(0, None, self._clock.now_us(), self._clock.mono_ns())
        ends = []
        for worker in sorted(self._workers.values(), key=lambda w: w.rank):
            end = seen.get(worker.local_rank, now)
            if end.code is None:
                end = ObservedExit(
                    worker.pid, codes.get(worker.rank), end.seen_us, end.seen_mono_ns
                )
            place = ExitContext(
                node=node, rank=worker.rank, local_rank=worker.local_rank, pid=worker.pid
            )
            tail, log_path = read_tail(worker.files, scrub_lines)
            ends.append(
                to_exit(
                    place,
                    end,
                    sent=self._teardown.sent.get(worker.local_rank),
                    note=read_exception(worker.files, scrub_lines),
                    progress=progress(worker.rank),
                    tail=tail,
                    log_path=log_path,
                )
            )
        return ends

    def close(self) -> None:
        """Close the watcher and the rings."""
        self._watcher.close()
        for worker in self._workers.values():
            worker.ring.close()
