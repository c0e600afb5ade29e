"""The control record as one agent knows it."""

from dataclasses import dataclass

from gpuops.control.record import ControlRecord
from gpuops.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class View:
    """The record as this agent knows it, and what time it is on the board."""

    record: ControlRecord
    version: int
    board_s: float
    seen_ns: int

    def now_s(self, now_ns: int) -> float:
        """Return the board's time at this host's *now_ns*."""
        return self.board_s + (now_ns - self.seen_ns) / NS_PER_S
