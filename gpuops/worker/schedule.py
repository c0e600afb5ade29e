"""The schedule: after which steps a state is saved.

All ranks must save the same steps, and none may wait for another to learn them. With a number of
steps, each rank computes them. With a time, rank 0 decides, and publishes at each save when the
next one is; the others read it at the step after, when it has long been published: a rank at that
step has completed its collectives together with rank 0. Where the answer is not there in time,
they save nothing until they have it, and then join the saves of the others.
"""

import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from statistics import median
from typing import Any, Protocol

from gpuops.checkpoint.types import CheckpointError
from gpuops.plan.failure_rate import FailureRate
from gpuops.plan.interval import INTERVAL_S_MAX, steps_between_saves
from gpuops.units import parse_seconds

_log = logging.getLogger(__name__)

STEPS_MAX = 1_000_000
WARMUP_STEPS = 5  # first steps are not measured: compilers may still run
RANK0_TIMEOUT_S = 5.0
DEFAULT_RESTORE_S = 30.0  # before one was measured: start of Python, torch and a process group
# Failures of nodes are recorded; those of the script, and kills, are not, and are much more
# frequent. So a state is saved at least as often as costs this share of the time, which is small.
OVERHEAD_SHARE = 1e-3
INTERVAL_S_MIN = 1.0
_N_MEASURED = 32
_serial = count()


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often to save: each ``steps`` steps, or ``seconds``; neither: by the cost."""

    steps: int = 0
    seconds: float | None = None

    @property
    def is_auto(self) -> bool:
        return not self.steps and self.seconds is None

    def __str__(self) -> str:
        """Return what was asked for, "" where the cost decides."""
        by_time = "" if self.seconds is None else f'"{self.seconds:g}s"'
        return str(self.steps) if self.steps else by_time


def parse_interval(every: object) -> SaveInterval:
    """Parse the user's *every*: a number of steps, ``"5s"``, ``"auto"``.

    Raises:
        CheckpointError: It is invalid.
    """
    if every == "auto":
        return SaveInterval()
    if isinstance(every, int) and not isinstance(every, bool) and 1 <= every <= STEPS_MAX:
        return SaveInterval(steps=every)
    if isinstance(every, str) and (seconds := parse_time(every, "every")):
        return SaveInterval(seconds=seconds)
    raise CheckpointError(
        f'every={every!r:.80}: a number of steps from 1, a time like "5s" or "2min", or "auto"'
    )


def parse_time(text: str, what: str) -> float:
    """Return the seconds of a time such as ``"10min"``.

    Raises:
        CheckpointError: It is not a time.
    """
    try:
        return parse_seconds(re.sub(r"min\s*$", "m", text))
    except ValueError as exc:
        raise CheckpointError(f"{what}={text!r:.80}: {exc}") from exc


def parse_duration(value: object, what: str) -> float:
    """Return the seconds of a number of them, or of a time such as ``"10min"``.

    Raises:
        CheckpointError: It is neither.
    """
    if isinstance(value, str):
        return parse_time(value, what)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise CheckpointError(f'{what}={value!r:.80}: seconds, or a time like "10min"')


class SaveCost:
    """The measured time of steps and saves; medians of the last ones.

    *failures*: the recorded failures; None: there are none.
    """

    def __init__(self, n_nodes: int, failures: FailureRate | None = None) -> None:
        self.failures = failures or FailureRate()
        self.n_nodes = n_nodes
        self._chosen_steps: int | None = None
        self._failures_per_hour = self.failures.per_hour(n_nodes)
        self._steps_s: deque[float] = deque(maxlen=_N_MEASURED)
        self._stalls_s: deque[float] = deque(maxlen=_N_MEASURED)
        self._last: tuple[int, float] | None = None
        self._was_saved = True
        self.restore_s = DEFAULT_RESTORE_S

    @property
    def step_s(self) -> float | None:
        return median(self._steps_s) if self._steps_s else None

    @property
    def stall_s(self) -> float | None:
        return median(self._stalls_s) if self._stalls_s else None

    def before_save(self, step: int, now_s: float) -> None:
        """Record that *step* was just completed, before anything is saved."""
        if self._last is not None and step > self._last[0]:
            self._steps_s.append((now_s - self._last[1]) / (step - self._last[0]))

    def after_save(self, step: int, now_s: float, stall_s: float | None) -> None:
        """Record that training continues after *step*; *stall_s* where a state was saved."""
        self._last = (step, now_s)
        self._was_saved = stall_s is not None
        if stall_s is not None:
            self._stalls_s.append(stall_s)

    def steps_until_next(self, interval: SaveInterval) -> int:
        step_s = max(self.step_s or 1e-6, 1e-6)
        if interval.steps:
            return interval.steps
        if interval.seconds is not None:
            return min(STEPS_MAX, max(1, round(interval.seconds / step_s)))
        if self.stall_s is None or not self._was_saved:  # what was skipped is made up for soon
            return WARMUP_STEPS
        affordable_s = max(self.stall_s / OVERHEAD_SHARE, INTERVAL_S_MIN)
        steps = steps_between_saves(
            self.stall_s,
            self.restore_s,
            self._failures_per_hour,
            step_s,
            interval_s_max=max(step_s, min(affordable_s, INTERVAL_S_MAX)),
        )
        self._chosen_steps = min(STEPS_MAX, steps)
        return self._chosen_steps

    def to_metadata(self) -> dict[str, Any]:
        """Return the last choice of ``every="auto"`` and its inputs; plain numbers, None: unknown.

        ``steps`` is None until a save was measured.
        """
        return {
            "steps": self._chosen_steps,
            "step_s": self.step_s,
            "stall_s": self.stall_s,
            "restore_s": self.restore_s,
            "n_nodes": self.n_nodes,
            "failures": self.failures.n_failures,
            "node_hours": self.failures.node_hours,
        }


class SaveSchedule(Protocol):
    """Decides which steps are saved, equally on all ranks.

    ``asks_keeper``: every step may be due, and the keeper decides.
    """

    asks_keeper: bool

    def is_due(self, step: int, now_s: float) -> bool:
        """Return whether *step*, just completed, is to be saved."""
        ...

    def on_handled(self, step: int, now_s: float) -> None:
        """Record that *step*, which was due, is saved, or was skipped."""
        ...


class StepSchedule:
    """Every so many steps; where a due step was not reported, the next one is due."""

    def __init__(self, steps: int, *, asks_keeper: bool = False) -> None:
        self._steps = steps
        self.asks_keeper = asks_keeper
        self._previous_step: int | None = None

    def is_due(self, step: int, now_s: float) -> bool:  # noqa: ARG002 the interface
        previous_step, self._previous_step = self._previous_step, step
        has_skipped_multiple = (
            previous_step is not None and step // self._steps > previous_step // self._steps
        )
        return has_skipped_multiple or step % self._steps == 0

    def on_handled(self, step: int, now_s: float) -> None:
        pass


class SingleRankSchedule:
    """By the clock, or the cost, of the only rank."""

    asks_keeper = False

    def __init__(self, interval: SaveInterval, cost: SaveCost, now_s: float) -> None:
        self._interval = interval
        self._cost = cost
        self._next_s = now_s + (interval.seconds or 0.0)
        self._next_step: int | None = None

    def is_due(self, step: int, now_s: float) -> bool:
        if self._interval.seconds is not None:
            return now_s >= self._next_s
        if self._next_step is None:
            self._next_step = step + WARMUP_STEPS - 1
        return step >= self._next_step

    def on_handled(self, step: int, now_s: float) -> None:
        if self._interval.seconds is not None:
            self._next_s = now_s + self._interval.seconds
        else:
            self._next_step = step + self._cost.steps_until_next(self._interval)


class RankZeroSchedule:
    """By the clock, or the cost, of rank 0, which publishes at each save when the next one is.

    *store* is that of the process group: it needs ``set``, ``wait``, ``check`` and ``get``. *run*
    names this start of the workers; an older one may have left its answers there. *timeout_s*: how
    long to wait for an answer, once.
    """

    asks_keeper = False

    def __init__(
        self,
        interval: SaveInterval,
        cost: SaveCost,
        store: Any,  # noqa: ANN401 torch's, or a test's
        *,
        is_rank_zero: bool,
        run: str,
        timeout_s: float = RANK0_TIMEOUT_S,
    ) -> None:
        self._interval = interval
        self._cost = cost
        self._store = store
        self._is_rank_zero = is_rank_zero
        self._timeout_s = timeout_s
        self._prefix = f"gpuops/checkpoint/{run}/{next(_serial)}"
        self._previous_step: int | None = None  # some step numbers are not reported
        self._next_step: int | None = None  # None: not known yet
        self._n_published = 0  # answers are numbered: other ranks do not know their steps
        self._may_wait = True
        self._has_warned = False

    def is_due(self, step: int, now_s: float) -> bool:  # noqa: ARG002 the interface
        if self._previous_step is None:
            self._previous_step, self._next_step = step - 1, step + WARMUP_STEPS - 1
        if self._next_step is None:
            self._next_step = self._next_after(self._previous_step)
        self._previous_step = max(self._previous_step, step)
        return self._next_step is not None and step >= self._next_step

    def on_handled(self, step: int, now_s: float) -> None:  # noqa: ARG002 the interface
        self._next_step, self._may_wait = None, True
        if self._is_rank_zero:
            self._next_step = step + self._cost.steps_until_next(self._interval)
            key = self._key()
            self._n_published += 1
            self._store.set(key, str(self._next_step))

    def _key(self) -> str:
        return f"{self._prefix}/{self._n_published}"

    def _next_after(self, previous_step: int) -> int | None:
        """Return the next save after step *previous_step*; None: rank 0 has not published it.

        A save up to *previous_step* was missed here, because the answer was late. Rank 0's answer
        at that save is there by now, or will be, so this rank joins the saves of the others again.
        It never guesses: a state that only some ranks save is never complete.
        """
        while (next_step := self._read_next()) is not None:
            self._n_published += 1
            if next_step > previous_step:
                return next_step
        return None

    def _read_next(self) -> int | None:
        """Return the current answer; waits for it the first time only."""
        key, may_wait, self._may_wait = self._key(), self._may_wait, False
        try:
            if may_wait:
                self._store.wait([key], timedelta(seconds=self._timeout_s))
            elif not self._store.check([key]):
                return None
            return int(self._store.get(key))
        except (RuntimeError, ValueError) as exc:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "rank 0 has not published within %g s when to save next (%.200s): this rank "
                    "saves again once it has",
                    self._timeout_s,
                    exc,
                )
            return None


def make_schedule(
    interval: SaveInterval,
    cost: SaveCost,
    *,
    world: int,
    make_store: Callable[[], tuple[Any, str] | None],
    rank: int,
    now_s: float,
) -> SaveSchedule:
    """Return how this job's ranks determine which steps to save.

    *make_store* returns the process group's store and the name of this start of the workers; None
    where there is no process group.
    """
    if interval.steps:
        return StepSchedule(interval.steps)
    if world == 1:
        return SingleRankSchedule(interval, cost, now_s)
    found = make_store()
    if found is None:
        return StepSchedule(1, asks_keeper=True)
    store, run = found
    return RankZeroSchedule(interval, cost, store, is_rank_zero=rank == 0, run=run)
