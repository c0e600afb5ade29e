"""What memory and disk of this machine take, right before and right after what is measured.

A shared machine drifts: between two minutes, copying the same pages may take twice as long. So each
figure is compared with limits of the same minute, and only rounds in which these agree are counted.
"""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TypeVar

T = TypeVar("T")
QUIET_RATIO_MAX = 1.25
TRIES = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of a copy, a hash, and a write past the page cache with fsync, of the same bytes."""

    memcpy_s: float
    hash_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The limits right before and right after one measurement."""

    before: Limits
    after: Limits

    @property
    def mean(self) -> Limits:
        """Return the mean of both."""
        pairs = zip(astuple(self.before), astuple(self.after), strict=True)
        return Limits(*((before + after) / 2 for before, after in pairs))

    @property
    def is_quiet(self) -> bool:
        """Return whether each limit was the same before and after, within `QUIET_RATIO_MAX`."""
        pairs = zip(astuple(self.before), astuple(self.after), strict=True)
        return all(max(pair) <= QUIET_RATIO_MAX * min(pair) for pair in pairs)


def measure_between(
    measure: Callable[[], T], limits: Callable[[], Limits]
) -> tuple[T, Surroundings]:
    """Return what *measure* returns, and *limits* around it; up to `TRIES` times, until quiet."""
    before = limits()
    for _ in range(TRIES):
        measured = measure()
        around = Surroundings(before, before := limits())
        if around.is_quiet:
            break
    return measured, around


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that *function* takes."""
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s
