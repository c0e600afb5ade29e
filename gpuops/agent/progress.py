"""What the beats of one attempt's ranks add up to. Pure: beats in, facts out.

Times are this host's monotonic nanoseconds, as in the rings. The steps of a data-parallel job
agree across ranks; where they do not, the furthest rank counts, because "how far did the job get"
is what is asked.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from gpuops.wire import STEP_UNKNOWN, Beat, Phase, StepSource

MINUTE_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step that any rank completed."""

    mono_ns: int
    step: int | None
    source: StepSource


@dataclass(frozen=True, slots=True)
class Minute:
    """The steps of one rank within one minute; step times in microseconds."""

    start_mono_ns: int
    step_last: int | None
    beats: int
    step_time_p50_us: int | None
    step_time_max_us: int | None


@dataclass(slots=True)
class RankProgress:
    """How far one rank came; ``finished_ns`` is when its program came to its end."""

    beats: int = 0
    last_step: int | None = None
    last_mono_ns: int | None = None
    finished_ns: int | None = None


@dataclass(slots=True)
class Progress:
    """One attempt. *highest_before* is the highest step of all earlier attempts, None at first."""

    highest_before: int | None = None
    first: FirstStep | None = None
    caught_up: FirstStep | None = None
    steps_first: int | None = None
    steps_last: int | None = None
    last_mono_ns: int | None = None
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    _minute: list[Beat] = field(default_factory=list)
    _minute_before_ns: int | None = None

    def feed(self, rank: int, beats: Iterable[Beat]) -> None:
        """Take the next beats of *rank* in."""
        for beat in beats:
            if beat.phase is Phase.STEPPING:
                self._feed_one(rank, beat)
            elif beat.phase is Phase.FINISHED:
                self.ranks.setdefault(rank, RankProgress()).finished_ns = beat.mono_ns

    def _feed_one(self, rank: int, beat: Beat) -> None:
        step = None if beat.step == STEP_UNKNOWN else beat.step
        of_rank = self.ranks.setdefault(rank, RankProgress())
        of_rank.beats, of_rank.last_mono_ns = beat.seq, beat.mono_ns
        of_rank.last_step = step if step is not None else of_rank.last_step
        if self.first is None or beat.mono_ns < self.first.mono_ns:
            self.first = FirstStep(beat.mono_ns, step, beat.source)
        self.last_mono_ns = max(self.last_mono_ns or 0, beat.mono_ns)
        if step is not None:
            self.steps_first = step if self.steps_first is None else min(self.steps_first, step)
            self.steps_last = max(self.steps_last or 0, step)
            if self._is_past_the_old(step, beat.mono_ns):
                self.caught_up = FirstStep(beat.mono_ns, step, beat.source)
        if rank == min(self.ranks):
            self._minute.append(beat)

    def _is_past_the_old(self, step: int, mono_ns: int) -> bool:
        if self.highest_before is None or step <= self.highest_before:
            return False
        return self.caught_up is None or mono_ns < self.caught_up.mono_ns

    @property
    def beats(self) -> int:
        """Return the optimizer calls of the rank that made most."""
        return max((rank.beats for rank in self.ranks.values()), default=0)

    @property
    def highest(self) -> int | None:
        """Return the highest step of this and all earlier attempts."""
        known = [step for step in (self.highest_before, self.steps_last) if step is not None]
        return max(known, default=None)

    def take_minute(self, now_mono_ns: int, *, at_once: bool = False) -> Minute | None:
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


def _summary(beats: list[Beat], before_ns: int | None) -> Minute:
    # A script that says its steps beats twice in each: by its word, and by its optimizer.
    news = [b for a, b in pairwise(beats) if b.step == STEP_UNKNOWN or b.step != a.step]
    times = [beat.mono_ns for beat in (beats[0], *news)]
    if before_ns is not None:
        times.insert(0, before_ns)
    gaps_us = [(b - a) // 1000 for a, b in pairwise(times)]
    step = beats[-1].step
    return Minute(
        start_mono_ns=beats[0].mono_ns,
        step_last=None if step == STEP_UNKNOWN else step,
        beats=len(beats),
        step_time_p50_us=round(median(gaps_us)) if gaps_us else None,
        step_time_max_us=max(gaps_us, default=None),
    )
