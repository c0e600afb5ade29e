"""Which rank is slower than those that do the same work, for long enough to be no accident. Pure.

Each step a rank's own time (without waiting) is divided by the median of the others of its group;
the median of these ratios over a window must exceed a limit, and by far more than they spread, in
`HOLD` evaluations one after another. Ranks of different groups are never compared: pipeline stages
differ by design.

Groups of a typical spread up to 1 % a step have a limit of 3 % and one above 5 % one of 10 %, over
three times as many steps. Window, limits and the factor of 4 are judgement, tuned on the public
traces of Lin et al. (Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI
2025): AR names exactly its slow worker, SE (uneven sequences) and ST nobody. That a verdict must
last is what Minder (NSDI 2025) found worth 15 points of precision.
"""

import math
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

GROUP_MIN = 3
WINDOW, LONG_WINDOW = 10, 30
HOLD = 5
# Before so many steps nobody is named; where steps differ much, before the second number.
STEPS_MIN, NOISY_STEPS_MIN = WINDOW + HOLD - 1, LONG_WINDOW + HOLD - 1
# The spread of a group a step, and from which ratio on a rank of it is slow.
QUIET, QUIET_LIMIT = 0.01, 0.03
LIMIT = 0.05
NOISY, NOISY_LIMIT = 0.05, 0.10
SIGMAS = 4.0
_FLOOR = 0.01
_MAD_TO_SIGMA = 1.4826
_MEDIAN_TO_MEAN = 1.2533  # the standard error of a median by that of a mean

Rank = TypeVar("Rank", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank(Generic[Rank]):
    """A rank that takes ``ratio`` times as long as the median of its ``n_peers``.

    ``since``: the evaluation from which on it was above the limit without a break; ``score``: by
    how many standard deviations it is.
    """

    rank: Rank
    ratio: float
    score: float
    n_peers: int
    since: int


@dataclass(slots=True)
class _Track:
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=LONG_WINDOW))
    evaluations: int = 0
    above: int = 0
    below: int = 0
    since: int | None = None
    is_slow: bool = False


class SlowRankDetector(Generic[Rank]):
    """Takes the own times of one step after another, and names the ranks that are slow at present.

    *group_of* tells who does the same work. A rank of a group of fewer than `GROUP_MIN` is never
    named: of two nobody can say which is slow. A rank is slow until `HOLD` evaluations found it
    below half of the limit.
    """

    def __init__(self, group_of: Mapping[Rank, Hashable]) -> None:
        self._group_of = group_of
        self._tracks: dict[Rank, _Track] = {}
        self._number = 0

    def feed(self, own_s: Mapping[Rank, float]) -> tuple[SlowRank[Rank], ...]:
        """Return who is slow after a step in which each rank took *own_s* of seconds of its own.

        What is not finite or not above zero was not measured, and counts for nobody.
        """
        self._number += 1
        groups: dict[Hashable, dict[Rank, float]] = {}
        for rank, seconds in own_s.items():
            if math.isfinite(seconds) and seconds > 0:
                groups.setdefault(self._group_of[rank], {})[rank] = seconds
        return tuple(found for group in groups.values() for found in self._judge(group))

    def is_compared(self, rank: Rank) -> bool:
        """Return whether *rank* was compared often enough to be named if it were slow."""
        return rank in self._tracks and self._tracks[rank].evaluations >= HOLD

    def _judge(self, group: Mapping[Rank, float]) -> Iterable[SlowRank[Rank]]:
        if len(group) < GROUP_MIN:
            return
        logs = {rank: math.log(seconds) for rank, seconds in group.items()}
        for rank, other in _medians_of_others(logs).items():
            self._tracks.setdefault(rank, _Track()).ratios.append(logs[rank] - other)
        tracks = {rank: self._tracks[rank] for rank in group}
        noise = statistics.median(_spread([*t.ratios][-WINDOW:]) for t in tracks.values())
        window, limit = _window_and_limit(noise)
        ready = {
            rank: [*t.ratios][-window:] for rank, t in tracks.items() if len(t.ratios) >= window
        }
        medians = {rank: statistics.median(ratios) for rank, ratios in ready.items()}
        between = _spread(medians.values()) if len(medians) > GROUP_MIN else 0.0
        for rank, median in medians.items():
            error = _MEDIAN_TO_MEAN * _spread(ready[rank]) / math.sqrt(window)
            score = median / max(error, between, _FLOOR)
            track = tracks[rank]
            self._update(track, median, score, limit)
            if track.is_slow:
                assert track.since is not None
                yield SlowRank(
                    rank=rank,
                    ratio=math.exp(median),
                    score=score,
                    n_peers=len(group) - 1,
                    since=track.since,
                )

    def _update(self, track: _Track, median: float, score: float, limit: float) -> None:
        track.evaluations += 1
        if median > math.log1p(limit) and score > SIGMAS:
            track.since = self._number if track.above == 0 and not track.is_slow else track.since
            track.above, track.below = track.above + 1, 0
        else:
            track.above = 0
            track.below = track.below + 1 if median < math.log1p(limit / 2) else 0
        if track.above >= HOLD:
            track.is_slow = True
        elif track.below >= HOLD:
            track.is_slow = False


def _window_and_limit(noise: float) -> tuple[int, float]:
    if noise > NOISY:
        return LONG_WINDOW, NOISY_LIMIT
    return WINDOW, QUIET_LIMIT if noise <= QUIET else LIMIT


def _medians_of_others(values: Mapping[Rank, float]) -> dict[Rank, float]:
    """Return for each rank the median of the values of all others."""
    ordered = sorted(values, key=values.__getitem__)
    rest = [values[rank] for rank in ordered]
    n_others = len(rest) - 1
    low, high = (n_others - 1) // 2, n_others // 2
    # Without the value at a place, those after it are one place further on.
    return {
        rank: (rest[low + (place <= low)] + rest[high + (place <= high)]) / 2
        for place, rank in enumerate(ordered)
    }


def _spread(values: Iterable[float]) -> float:
    """Return the robust standard deviation of *values*."""
    found = [*values]
    middle = statistics.median(found)
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in found)
