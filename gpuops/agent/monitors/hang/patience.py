"""When a limit may be too short for a healthy job: how much longer its silence is accepted; pure.

A start loads a checkpoint, skips data, downloads; an evaluation may not be labelled. A rank that is
found at work is no hang, and a verdict after which the run came no further was perhaps none.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpuops.agent.monitors.hang.judge import HangFinding
from gpuops.agent.monitors.hang.timeouts import FIRST_STEP, PHASE_FLOOR_S
from gpuops.agent.monitors.rank_state import RankDiagnosis, RankState

# A rank that works in a start or a labelled phase, or moves bytes, may take so long. A guess: an
# hour is longer than any load we know of, and a retry loop that never ends is found after it.
AT_WORK_S = 3600.0
# They are judged again after as long as they have been silent, and at least this.
RECHECK_S = 30.0
RAISE_FACTOR = 3.0
RAISES_MAX = 3


@dataclass(frozen=True, slots=True)
class SignsOfWork:
    """Why a silence is accepted for ``again_s`` more, by one rank's example.

    ``is_seen``: ranks were seen to work; else they only stand in one place.
    """

    rank: int
    again_s: float
    is_seen: bool


def signs_of_work(
    hang: HangFinding,
    blamed: Collection[int],
    diagnoses: Mapping[int, RankDiagnosis],
    factor: float,
) -> SignsOfWork | None:
    """Return why *hang* may be none, None where nothing speaks for the ranks.

    Where a step is due ranks are seen to work only as long as a phase may take, unless they move
    bytes: it may be an endless loop. Where some of the *blamed* do not move, several ranks in one
    function may evaluate in one long call. *factor* scales the limits.

    Where the run has never shown a step it may train unseen: any rank that may work excuses all,
    for good.
    """
    never = not hang.ever_stepped
    at_work = {
        rank: each
        for rank, each in diagnoses.items()
        if (each.may_work if never else each.is_moving)
    }
    is_seen = bool(at_work) and (never or all(rank in at_work for rank in blamed))
    if not is_seen and not _do_the_same(hang, diagnoses.values()):
        return None
    is_long = hang.limit_s >= factor * PHASE_FLOOR_S or any(v.moves_bytes for v in at_work.values())
    limit_s = factor * (AT_WORK_S if is_seen and is_long else PHASE_FLOOR_S)
    limit_s = math.inf if is_seen and never else limit_s
    if hang.silent_s >= limit_s:
        return None
    again_s = min(max(hang.silent_s, RECHECK_S), limit_s - hang.silent_s)
    return SignsOfWork(min(at_work or diagnoses), again_s, is_seen)


def _do_the_same(hang: HangFinding, diagnoses: Collection[RankDiagnosis]) -> bool:
    """Return whether several ranks are in one function of the program, and none waits for another.

    Those that do not move are in the same line. A rank that hangs alone is elsewhere than those it
    holds up.
    """
    if hang.lagging or len(diagnoses) < 2:
        return False
    if any(each.state is not RankState.IN_USER_CODE for each in diagnoses):
        return False
    still = {each.frames for each in diagnoses if not each.is_moving}
    if len(still) != 1:
        return False
    (frames,) = still
    place = frames[0].file, frames[0].function
    return all(place in {(f.file, f.function) for f in each.frames} for each in diagnoses)


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

    def got_further(self) -> None:
        """Note that a generation made steps: a hang in a start later is another one."""
        if self._place == (FIRST_STEP, 0):
            self._place = None

    def limit_s(self, hang: HangFinding) -> float:
        """Return the limit for *hang*, raised where restarts did not get the run further."""
        count = self._count if _place_of(hang) == self._place else 0
        return hang.limit_s * RAISE_FACTOR ** min(count, RAISES_MAX)


def _place_of(hang: HangFinding) -> tuple[str, int]:
    return hang.phase, hang.steps_made if hang.step is None else hang.step
