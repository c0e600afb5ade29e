"""A drain on one node: the workers finish their step, save if they can, and stop.

A script that asks `gpuops.should_stop` or handles the signal itself has until the deadline. Of any
other the `gpuops.Checkpointer` saves the state of the stop step, on all ranks alike. Where there is
none, or that step comes too late, a rank has nothing more to gain once it has completed a step.
"""

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpuops.agent.elastic.workers import Workers
from gpuops.agent.monitors.progress import SPREAD_S
from gpuops.control.client import ControlClient
from gpuops.control.membership import request_drain
from gpuops.control.record import ENTRY_ERRORS, unpack
from gpuops.control.store import ControlStoreError, Entry
from gpuops.control.threads import HOLD_S
from gpuops.host.clock import Clock
from gpuops.incident import fields
from gpuops.units import NS_PER_S
from gpuops.wire.ring import STEP_UNKNOWN, AgentRequest, WorkerFlag

log = logging.getLogger(__name__)

# The steps in a heartbeat are at most that old: it was held, and the next one is under way.
HEARTBEAT_AGE_S = 2 * HOLD_S
# A state that is saved later has too little of the grace left to persist.
SAVE_SHARE = 0.5
_HANDLES = {
    signal.SIGTERM: WorkerFlag.HANDLES_SIGTERM,
    signal.SIGUSR1: WorkerFlag.HANDLES_SIGUSR1,
}


class Draining:
    """One drain, of at most *grace_s*; ranks that ask leave their loops after *stop_step*.

    *reach_s*: how long they take to it, 0 where that is not known. *caught* says which signals a
    process has handlers for.
    """

    def __init__(  # noqa: PLR0913 what it is told of the drain, each by name
        self,
        number: signal.Signals,
        workers: Workers,
        clock: Clock,
        *,
        grace_s: float,
        stop_step: int | None,
        reach_s: float = 0.0,
        caught: Callable[[int], Sequence[signal.Signals]] | None = None,
    ) -> None:
        self._caught = caught or caught_signals
        self._workers = workers
        self._clock = clock
        began_ns, save_s = clock.mono_ns(), grace_s * SAVE_SHARE
        self._deadline_ns = began_ns + round(grace_s * NS_PER_S)
        self._save_until_ns = began_ns + round(save_s * NS_PER_S if reach_s <= save_s else 0)
        self._is_stop_reachable = reach_s <= grace_s
        self._beats_before = workers.beat_counts()
        for worker in workers.all:
            worker.ring.request(
                AgentRequest.DRAIN, STEP_UNKNOWN if stop_step is None else stop_step
            )
        self._ours = _HANDLES.get(number, WorkerFlag(0))
        # After the request: our handler takes a signal before it for a notice of its own.
        self._forwarded = self._forward(number)

    def is_over(self) -> bool:
        """Say whether the workers that are left have nothing more to do, or no time for it."""
        if self._workers.all_ended or self._clock.mono_ns() >= self._deadline_ns:
            return True
        return all(self._is_done(worker.rank) for worker in self._workers.all)

    def ended_unasked(self) -> bool:
        """Return whether the workers, all of which have ended, ended by themselves.

        None was told to stop, nor has a handler of its own, which may have heard the signal. A
        worker of which that is not known counts as asked.
        """
        return not self._forwarded and all(
            worker.ring.flags & self._ours and not worker.ring.flags & WorkerFlag.STOP_RETURNED
            for worker in self._workers.all
        )

    def _is_done(self, rank: int) -> bool:
        """Say whether *rank* would do nothing more that is worth waiting for."""
        flags = self._workers.of_rank(rank).ring.flags
        if self._ends_by_itself(rank, flags):
            return False
        if flags & WorkerFlag.SAVED_AT_STOP:
            return True
        if flags & WorkerFlag.SAVES_AT_STOP and self._clock.mono_ns() < self._save_until_ns:
            return False
        return self._has_stepped(rank)

    def _ends_by_itself(self, rank: int, flags: WorkerFlag) -> bool:
        has_own_handler = rank in self._forwarded and not flags & WorkerFlag.HANDLER_RAN
        asks = flags & WorkerFlag.STOP_POLLED and self._is_stop_reachable
        knows = flags & (WorkerFlag.STOP_RETURNED | WorkerFlag.PROGRAM_ENDED)
        return has_own_handler or bool(asks or knows)

    def _has_stepped(self, rank: int) -> bool:
        """Say whether *rank* made a step since the drain began; one that never beats cannot."""
        before = self._beats_before[rank]
        return before == 0 or self._workers.beat_counts()[rank] > before

    def _forward(self, number: signal.Signals) -> frozenset[int]:
        """Pass the signal on to workers that handle it themselves; return their ranks."""
        forwarded = set()
        for worker in self._workers.all:
            if (
                not worker.ring.flags & self._ours
                and number in self._caught(worker.pid)
                and self._workers.signal(worker.local_rank, number)
            ):
                forwarded.add(worker.rank)
        return frozenset(forwarded)


def drain_from_afar(
    control: ControlClient,
    signal_name: str,
    *,
    was_there: bool = False,
    stop_step: int | None = None,
) -> bool:
    """Take a run whose workers are on other nodes to DRAIN; say whether this call did that.

    The first step that is agreed on holds for all ranks, so it must be a step here, too. An agent
    that *was_there*, whose workers have ended, knows *stop_step* itself: in the last save that is
    every agent, and each would list the heartbeats of all.
    """
    if was_there:
        return request_drain(control, signal_name, stop_step)
    try:
        beats = control.store.list(control.keys.heartbeat())
    except ControlStoreError as exc:
        log.debug("the drain is not in the control store yet: %s", exc)
        return False
    return request_drain(control, signal_name, common_step(beats, control.record.generation))


def common_step(beats: Mapping[str, Entry], generation: int) -> int | None:
    """Return a step that no rank of *generation* has begun when it learns of it.

    From the steps of the slowest ranks in the agents' heartbeats; another rank may be a step ahead.
    None where no heartbeat has a step, as before the second step.
    """
    steps, rates = [], []
    for entry in beats.values():
        try:
            progress = unpack(entry.value)
            step, rate = fields.number(progress.get("step")), progress.get("rate")
            if step is None or rate is None or progress.get("generation") != generation:
                continue
            rates.append(fields.seconds(rate))
            steps.append(step)
        except ENTRY_ERRORS:
            continue
    if not steps:
        return None
    return max(steps) + 2 + max(1, math.ceil((SPREAD_S + HEARTBEAT_AGE_S) * max(rates)))


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
