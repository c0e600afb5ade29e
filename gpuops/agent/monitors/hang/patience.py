"""When a limit may be too short for a healthy job: how much longer its silence is accepted; pure.

A start loads a checkpoint, skips data, downloads; an evaluation may not be labelled. A rank that is
found at work is no hang, and a verdict after which the run came no further was perhaps none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from gpuops.agent.monitors.hang.judge import HangFinding
from gpuops.agent.monitors.hang.timeouts import PHASE_FLOOR_S
from gpuops.agent.monitors.rank_state import RankDiagnosis

# A rank that works in a start or a labelled phase, or moves bytes, may take so long. A guess: an
# hour is longer than any load we know of, and a retry loop that never ends is found after it.
AT_WORK_S = 3600.0
RAISE_FACTOR = 3.0
RAISES_MAX = 3


def at_work_limit_s(hang: HangFinding, at_work: Iterable[RankDiagnosis], factor: float) -> float:
    """Return how long ranks may be silent while those *at_work* are found working.

    Where a step is due only as long as a phase, unless bytes move: it may be an endless loop.
    """
    is_long = hang.limit_s >= factor * PHASE_FLOOR_S or any(each.moves_bytes for each in at_work)
    return factor * (AT_WORK_S if is_long else PHASE_FLOOR_S)


@dataclass(slots=True)
class VerdictHistory:
    """The last hang that ended a generation, and how often in a row the run came no further."""

    _place: tuple[str, int] | None = None
    _count: int = 0

    def add(self, hang: HangFinding) -> None:
        """Note that *hang* ends the generation."""
        place = _place_of(hang)
        self._count = self._count + 1 if place == self._place else 1
        self._place = place

    def limit_s(self, hang: HangFinding) -> float:
        """Return the limit for *hang*, raised where restarts did not get the run further."""
        count = self._count if _place_of(hang) == self._place else 0
        return hang.limit_s * RAISE_FACTOR ** min(count, RAISES_MAX)


def _place_of(hang: HangFinding) -> tuple[str, int]:
    return hang.phase, hang.steps_made if hang.step is None else hang.step
