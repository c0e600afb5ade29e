"""Time as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time to date events, monotonic time to order them on one host."""

    def now_us(self) -> int:
        """Return microseconds since the epoch, UTC."""
        ...

    def mono_ns(self) -> int:
        """Return nanoseconds of this host's monotonic clock (the one of the heartbeat rings)."""
        ...


class SystemClock:
    """This machine's clocks."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def mono_ns(self) -> int:
        return time.monotonic_ns()


class FakeClock:
    """A clock that moves only by `advance`, for tests and simulations."""

    def __init__(self, now_us: int = 1_700_000_000_000_000, mono_ns: int = 1_000_000_000) -> None:
        self._now_us = now_us
        self._mono_ns = mono_ns

    def advance(self, seconds: float) -> None:
        """Move both clocks on by *seconds*."""
        self._now_us += round(seconds * 1e6)
        self._mono_ns += round(seconds * 1e9)

    def now_us(self) -> int:
        return self._now_us

    def mono_ns(self) -> int:
        return self._mono_ns
