"""Who of a node's ranks holds the others up, by what they do and how far they came; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuops.agent.monitors.hang.judge import HangFinding
from gpuops.agent.monitors.rank_state import RankDiagnosis, RankState
from gpuops.incident.evidence import format_ranks
from gpuops.model import Confidence, FailureClass, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCulprits:
    """What was found; no ``ranks`` where nobody here can be named."""

    ranks: tuple[int, ...]
    failure_class: FailureClass
    side: Side
    confidence: Confidence
    why: str


# Which state names its ranks before any other, and what it is then.
_PLAIN = (
    (
        RankState.D_STATE,
        FailureClass.HANG_D_STATE,
        Side.INFRA,
        Confidence.CONFIRMED,
    ),
    (
        RankState.STOPPED,
        FailureClass.HANG_STOPPED,
        Side.EXTERNAL,
        Confidence.CONFIRMED,
    ),
    (
        RankState.GIL_HELD,
        FailureClass.HANG_GIL_HELD,
        Side.AMBIGUOUS,
        Confidence.PROBABLE,
    ),
    (
        RankState.EXITED,
        FailureClass.USER_EARLY_EXIT,
        Side.AMBIGUOUS,
        Confidence.PROBABLE,
    ),
)


def class_of(state: RankState) -> FailureClass:
    """Return the class of one rank's part in a hang."""
    plain = {known: failure_class for known, failure_class, _, _ in _PLAIN}
    if state.waits_for_others:
        return FailureClass.HANG_COLLECTIVE
    return plain.get(state, FailureClass.HANG_NO_PROGRESS)


def blame(
    hang: HangFinding,
    verdicts: Mapping[int, RankDiagnosis],
    finished: Sequence[int] = (),
) -> HangCulprits:
    """Return who is to blame for *hang*.

    In this order: what the kernel says, a witness, steps and silence, places in code; ranks that
    had *finished* where the others still wait for somebody.
    """
    for state, failure_class, side, confidence in _PLAIN:
        ranks = tuple(sorted(r for r, verdict in verdicts.items() if verdict.state is state))
        if ranks:
            return HangCulprits(
                ranks=ranks,
                failure_class=failure_class,
                side=side,
                confidence=confidence,
                why=verdicts[ranks[0]].how,
            )
    return _by_progress(hang, verdicts) or _by_absence(finished)


def _by_progress(hang: HangFinding, verdicts: Mapping[int, RankDiagnosis]) -> HangCulprits | None:
    """Blame who is behind; else who is somewhere else than in a collective."""
    elsewhere = sorted(r for r, v in verdicts.items() if v.state is RankState.IN_USER_CODE)
    behind = [rank for rank in hang.lagging if rank in verdicts]
    # One that waits in a collective is behind because another never came to it.
    named = [rank for rank in behind if rank in elsewhere] or elsewhere or behind
    if not named:
        return None
    return HangCulprits(
        ranks=tuple(named),
        failure_class=FailureClass.HANG_NO_PROGRESS,
        side=Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE,
        why=verdicts[named[0]].how,
    )


def _by_absence(finished: Sequence[int]) -> HangCulprits:
    if finished:
        return HangCulprits(
            ranks=tuple(sorted(finished)),
            failure_class=FailureClass.USER_EARLY_EXIT,
            side=Side.AMBIGUOUS,
            confidence=Confidence.PROBABLE,
            why="had come to the end of its program",
        )
    return HangCulprits(
        ranks=(),
        failure_class=FailureClass.HANG_COLLECTIVE,
        side=Side.AMBIGUOUS,
        confidence=Confidence.SYMPTOM_ONLY,
        why="all wait for other ranks, and none of them is behind",
    )


def sentence(hang: HangFinding, found: HangCulprits) -> str:
    """Return one sentence: who, where they stand, for how long and against which limit."""
    ranks = found.ranks or tuple(sorted(hang.steps))
    step = next((hang.steps[r] for r in ranks if hang.steps.get(r) is not None), hang.step)
    where = "no step known" if step is None else f"last step {step}"
    silent_s = next((hang.silences_s[r] for r in ranks if r in hang.silences_s), hang.silent_s)
    who = f"rank{'s' if len(ranks) != 1 else ''} {format_ranks(ranks)}"
    if not found.ranks and len(ranks) > 1:
        who = f"none of the ranks {format_ranks(ranks)} is behind"
    return (
        f"{who} ({where}): {found.why}; silent for {silent_s:.0f} s,"
        f" the limit for this phase ({hang.phase}) is {hang.limit_s:.0f} s"
    )
