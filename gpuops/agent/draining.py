"""A drain on one node: the workers finish their step, save if they can, and stop.

A script that asks `gpuops.should_stop` or handles the signal itself has until the deadline. Any
other cannot save; once each of its ranks has completed a step it has nothing more to gain.
"""

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuops.agent.workers import Workers
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S
from gpuops.wire import STEP_UNKNOWN, Flag, Request

log = logging.getLogger(__name__)


class Draining:
    """One drain, of at most *grace_s*; ranks that ask leave their loops after *stop_step*.

    *caught* says which signals a process has handlers for.
    """

    def __init__(
        self,
        number: signal.Signals,
        workers: Workers,
        clock: Clock,
        grace_s: float,
        stop_step: int | None,
        caught: Callable[[int], Sequence[signal.Signals]] | None = None,
    ) -> None:
        self._caught = caught or caught_signals
        self._workers = workers
        self._clock = clock
        self._deadline_ns = clock.mono_ns() + round(grace_s * NS_PER_S)
        self._beats_before = workers.beat_counts()
        for worker in workers.all:
            worker.ring.request(Request.DRAIN, STEP_UNKNOWN if stop_step is None else stop_step)
        # After the request: our handler takes a signal before it for a notice of its own.
        self._forwarded = self._forward(number)

    def is_over(self) -> bool:
        """Say whether the workers that are left have nothing more to do, or no time for it."""
        if self._workers.all_ended or self._clock.mono_ns() >= self._deadline_ns:
            return True
        return all(
            self._has_stepped(worker.rank)
            for worker in self._workers.all
            if not self._cooperates(worker.rank)
        ) and not any(self._cooperates(worker.rank) for worker in self._workers.all)

    def _cooperates(self, rank: int) -> bool:
        flags = self._workers.of_rank(rank).ring.flags
        has_own_handler = rank in self._forwarded and not flags & Flag.HANDLED
        return has_own_handler or bool(flags & Flag.ASKED)

    def _has_stepped(self, rank: int) -> bool:
        """Say whether *rank* made a step since the drain began; one that never beats cannot."""
        before = self._beats_before[rank]
        return before == 0 or self._workers.beat_counts()[rank] > before

    def _forward(self, number: signal.Signals) -> frozenset[int]:
        """Pass the signal on to workers that handle it themselves; return their ranks."""
        ours = {
            signal.SIGTERM: Flag.TERM_IS_OURS,
            signal.SIGUSR1: Flag.USR1_IS_OURS,
        }.get(number)
        told = set()
        for worker in self._workers.all:
            is_ours = ours is not None and bool(worker.ring.flags & ours)
            if (
                not is_ours
                and number in self._caught(worker.pid)
                and self._workers.signal(worker.local_rank, number)
            ):
                told.add(worker.rank)
        return frozenset(told)


def caught_signals(pid: int, root: Path = Path("/")) -> Sequence[signal.Signals]:
    """Return the signals that the process *pid* has handlers for (``SigCgt`` of proc(5))."""
    try:
        text = (root / "proc" / str(pid) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            mask = int(value, 16)
            return [s for s in signal.Signals if mask >> (s - 1) & 1]
    return ()
