"""The workers of one generation on this node: started, watched, ended."""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM, Signals

from gpuops.agent.elastic.exit_watcher import ExitWatcher, ObservedExit
from gpuops.agent.elastic.exits import ExitContext, RankFiles, read_exception, read_tail, to_exit
from gpuops.agent.elastic.rings import RingReader
from gpuops.agent.elastic.teardown import Teardown, end_workers, kill_groups, signal_process
from gpuops.agent.monitors.progress import RankProgress
from gpuops.host.clock import Clock
from gpuops.model import WorkerExit
from gpuops.scrub import scrub_lines
from gpuops.wire.ring import AgentRequest, Beat, WorkerFlag


def free_port() -> int:
    """Return a port that is free on every address: the workers' rank 0 will listen on all."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


log = logging.getLogger(__name__)


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
    def calls_for_a_look(self) -> bool:
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
        """Let go of the watcher and the rings."""
        self._watcher.close()
        for worker in self._workers.values():
            worker.ring.close()
