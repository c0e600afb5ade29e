"""Progress of one attempt from the heartbeats of its ranks: steps, speed, saves.

Times are this host's monotonic nanoseconds, as in the rings. The steps of a data-parallel job
agree across ranks; where they do not, the greatest one counts as the progress of the job.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from gpuops.wire.ring import STEP_UNKNOWN, Beat, StepSource, WorkerPhase

# A request reaches every rank of the run in at most about this time.
SPREAD_S = 1.5
_KEPT = 32
MINUTE_NS = 60 * 10**9


class StepTracker:
    """One generation's last steps, and the newest step after which a checkpoint was completed.

    A checkpoint is reported by the keeper that holds it, or by the script with
    ``gpuops.phase("checkpoint")``. The loaded one is reported by the keeper, or follows from the
    first step after ``gpuops.phase("restore")``.
    """

    def __init__(self) -> None:
        self.checkpoint_step: int | None = None
        self._loaded: int | None = None
        self._has_restored: set[int] = set()
        self._has_saved = False
        self._steps_ns: dict[int, list[int]] = {}
        self._highest: int | None = None
        self._saving: dict[int, int | None] = {}
        self._step_of: dict[int, int] = {}

    def begin(self) -> None:
        """Forget the workers of the last generation, but not their checkpoint."""
        self._steps_ns.clear()
        self._saving.clear()
        self._step_of.clear()
        self._has_restored.clear()
        self._has_saved = False
        self._loaded = self._highest = None

    @property
    def base_step(self) -> int | None:
        """Return the step of the checkpoint from which the progress of these workers counts.

        The newest that they saved or loaded, else the newest that is known.
        """
        if self._loaded is None or self._has_saved:
            return self.checkpoint_step
        return self._loaded

    def saved(self, step: int, *, is_new: bool) -> None:
        """Record the keeper's report that its newest state is that of *step*.

        It may be lower than the last known one: steps are repeated. *is_new*: these workers saved
        it.
        """
        self.checkpoint_step = step
        self._has_saved = self._has_saved or is_new

    def loaded(self, step: int) -> None:
        """Record the keeper's report that these workers resume from the state of *step*."""
        self._loaded = step

    def feed(self, by_rank: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the next heartbeats."""
        for rank, beats in by_rank.items():
            for beat in beats:
                self._feed_one(rank, beat)

    def _feed_one(self, rank: int, beat: Beat) -> None:
        # A script that reports its steps beats twice in each: by its report and by its optimizer.
        is_same = beat.step != STEP_UNKNOWN and beat.step == self._step_of.get(rank)
        if beat.step != STEP_UNKNOWN:
            self._step_of[rank] = beat.step
            self._highest = max(self._highest or 0, beat.step)
        if beat.phase is WorkerPhase.STEPPING and not is_same:
            times = self._steps_ns.setdefault(rank, [])
            times.append(beat.mono_ns)
            del times[:-_KEPT]
        if beat.phase is WorkerPhase.CHECKPOINT:
            self._saving[rank] = self._step_of.get(rank)
        elif rank in self._saving:
            saved = self._saving.pop(rank)
            if saved is not None and beat.phase is not WorkerPhase.RAISED:
                self.checkpoint_step = max(self.checkpoint_step or 0, saved)
                self._has_saved = True
        if beat.phase is WorkerPhase.RESTORE:
            self._has_restored.add(rank)
        elif beat.phase is WorkerPhase.STEPPING and rank in self._has_restored:
            self._has_restored.clear()
            if self._loaded is None and beat.step > 1:
                self._loaded = beat.step - 1

    def step_s(self) -> float | None:
        """Return the time of a step in the median, None before the second."""
        # Also called by the control thread, while `feed` may run.
        by_rank = [list(times) for times in list(self._steps_ns.values())]
        gaps = [(b - a) / 1e9 for times in by_rank for a, b in pairwise(times)]
        return median(gaps) if gaps else None

    def common_step(self) -> int | None:
        """Return a step that no rank has begun when it receives a request; None where unknown."""
        step_s = self.step_s()
        if self._highest is None or step_s is None:
            return None
        return self._highest + 1 + math.ceil(SPREAD_S / max(step_s, 1e-4))

    def seconds_to(self, step: int | None) -> float:
        """Return how long the ranks take until they have completed *step*; 0 where unknown."""
        step_s = self.step_s()
        if step is None or self._highest is None or step_s is None:
            return 0.0
        return max(0, step - self._highest) * step_s


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step that any rank completed."""

    mono_ns: int
    step: int | None
    source: StepSource


@dataclass(frozen=True, slots=True)
class MinuteProgress:
    """The steps of one rank within one minute; step times in microseconds."""

    start_mono_ns: int
    step_last: int | None
    beats: int
    step_time_p50_us: int | None
    step_time_max_us: int | None


@dataclass(slots=True)
class RankProgress:
    """The progress of one rank; ``finished_ns`` is when its program ended."""

    beats: int = 0
    last_step: int | None = None
    counted: int | None = None  # calls of the optimizer, where its steps are unknown
    last_mono_ns: int | None = None
    finished_ns: int | None = None
    _rose: tuple[int, int] | None = None  # the step and the optimizer calls when it last rose
    _calls_before: int = 0

    def loads(self, beat: Beat) -> bool:
        """Return whether *beat* comes after a load: its step has risen by more than was stepped.

        Some scripts step once before they load, to create the optimizer's state. A job that
        catches up (torchft) jumps too, by fewer steps than it has made.
        """
        if beat.source is not StepSource.OPTIMIZER_STATE:
            return False
        if self._rose is None:
            self._rose, self._calls_before = (beat.step, beat.optimizer_calls), beat.optimizer_calls
            return False
        step, calls = self._rose
        if beat.step <= step:
            return False
        self._rose = beat.step, beat.optimizer_calls
        jumped = beat.step - step - (beat.optimizer_calls - calls)
        return jumped > calls - self._calls_before


@dataclass(slots=True)
class AttemptProgress:
    """One attempt. *highest_before* is the highest step of all earlier attempts, None at first."""

    highest_before: int | None = None
    first: FirstStep | None = None
    caught_up: FirstStep | None = None
    steps_first: int | None = None
    steps_last: int | None = None
    last_mono_ns: int | None = None
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    _loaded: int = 0  # the first step after a load within this attempt
    _minute: list[Beat] = field(default_factory=list)
    _minute_before_ns: int | None = None

    def feed(self, rank: int, beats: Iterable[Beat]) -> None:
        """Take in the next heartbeats of *rank*."""
        for beat in beats:
            if beat.phase is WorkerPhase.STEPPING:
                self._feed_one(rank, beat)
            elif beat.phase is WorkerPhase.FINISHED:
                self.ranks.setdefault(rank, RankProgress()).finished_ns = beat.mono_ns

    def _feed_one(self, rank: int, beat: Beat) -> None:
        step = None if beat.step == STEP_UNKNOWN else beat.step
        of_rank = self.ranks.setdefault(rank, RankProgress())
        of_rank.beats, of_rank.last_mono_ns = beat.seq, beat.mono_ns
        of_rank.last_step = step if step is not None else of_rank.last_step
        of_rank.counted = beat.counted
        if step is not None and of_rank.loads(beat) and step > self._loaded:
            self._loaded, self.first, self.steps_first = step, None, None
        counts = step is None or step >= self._loaded
        if counts and (self.first is None or beat.mono_ns < self.first.mono_ns):
            self.first = FirstStep(beat.mono_ns, step, beat.source)
        self.last_mono_ns = max(self.last_mono_ns or 0, beat.mono_ns)
        if step is not None and counts:
            self.steps_first = step if self.steps_first is None else min(self.steps_first, step)
            self.steps_last = max(self.steps_last or 0, step)
            if self._is_past_highest(step, beat.mono_ns):
                self.caught_up = FirstStep(beat.mono_ns, step, beat.source)
        if rank == min(self.ranks):
            self._minute.append(beat)

    def _is_past_highest(self, step: int, mono_ns: int) -> bool:
        if self.highest_before is None or step <= self.highest_before:
            return False
        return self.caught_up is None or mono_ns < self.caught_up.mono_ns

    @property
    def may_load(self) -> bool:
        """Return whether the first step may have been made before a load.

        It is the very first one although there were others before.
        """
        first = self.first
        is_new_state = self.highest_before is not None and first is not None and first.step == 1
        return is_new_state and self.steps_last == 1

    @property
    def beats(self) -> int:
        """Return the greatest number of heartbeats of a rank, or of steps that it counted."""
        return max((rank.counted or rank.beats for rank in self.ranks.values()), default=0)

    @property
    def highest(self) -> int | None:
        """Return the highest step of this and all earlier attempts."""
        known = [step for step in (self.highest_before, self.steps_last) if step is not None]
        return max(known, default=None)

    def take_minute(self, now_mono_ns: int, *, at_once: bool = False) -> MinuteProgress | None:
        """Return the steps since the last call once a minute has passed, else None."""
        if not self._minute:
            return None
        start_ns = self._minute[0].mono_ns
        if not at_once and now_mono_ns - start_ns < MINUTE_NS:
            return None
        minute = _summary(self._minute, self._minute_before_ns)
        self._minute_before_ns = self._minute[-1].mono_ns
        self._minute.clear()
        return minute


def _summary(beats: list[Beat], before_ns: int | None) -> MinuteProgress:
    # A script that reports its steps beats twice in each: by its report and by its optimizer.
    new = [b for a, b in pairwise(beats) if b.step == STEP_UNKNOWN or b.step != a.step]
    times = [beat.mono_ns for beat in (beats[0], *new)]
    if before_ns is not None:
        times.insert(0, before_ns)
    gaps_us = [(b - a) // 1000 for a, b in pairwise(times)]
    step = beats[-1].step
    return MinuteProgress(
        start_mono_ns=beats[0].mono_ns,
        step_last=None if step == STEP_UNKNOWN else step,
        beats=len(beats),
        step_time_p50_us=round(median(gaps_us)) if gaps_us else None,
        step_time_max_us=max(gaps_us, default=None),
    )
