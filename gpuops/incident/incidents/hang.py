"""Which ranks a hung job waits for, by the reports of all its nodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.incident.decision import NodeReport, RankEnd, ReportKind
from gpuops.model import FailureClass, Role

# A worker in one of these states makes no progress, whatever its step; the clearest state first.
_STATES = (
    (FailureClass.HANG_D_STATE, "is stuck inside the kernel"),
    (FailureClass.HANG_STOPPED, "is stopped"),
    (FailureClass.HANG_GIL_HELD, "holds Python's global interpreter lock"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDiagnosis:
    """The kind of hang; *culprits* are the ranks that the others wait for."""

    failure_class: FailureClass
    how: str
    culprits: tuple[tuple[str, RankEnd], ...] = ()


def diagnose_hang(reports: Sequence[NodeReport]) -> HangDiagnosis:
    """Return whom the job waits for; it may be on a node that noticed no hang itself.

    A worker's state takes precedence, then the lowest step (of these, ranks outside a collective),
    then ranks outside a collective while others are in one.
    """
    hung = [(r.node, end) for r in reports if r.kind is ReportKind.HANG for end in r.ends]
    for failure_class, what in _STATES:
        found = [item for item in hung if item[1].failure_class is failure_class]
        if found:
            return _with_culprits(failure_class, found, f"it {what} and the others wait")
    return _slowest_ranks(reports, hung) or _outside_collective(hung) or _without_culprit(reports)


def _slowest_ranks(
    reports: Sequence[NodeReport], hung: Sequence[tuple[str, RankEnd]]
) -> HangDiagnosis | None:
    world = [(r.node, end) for r in reports for end in r.ends if end.role is not Role.NOISE]
    steps = [end.step for _, end in world if end.step is not None]
    if not steps or min(steps) == max(steps):
        return None
    slowest = [item for item in world if item[1].step == min(steps)]
    waiting = {end.rank for _, end in hung if end.failure_class is FailureClass.HANG_COLLECTIVE}
    culprits = [item for item in slowest if item[1].rank not in waiting] or slowest
    how = f"it had reached only step {min(steps)}, the others step {max(steps)}"
    return _with_culprits(FailureClass.HANG_NO_PROGRESS, culprits, how)


def _outside_collective(hung: Sequence[tuple[str, RankEnd]]) -> HangDiagnosis | None:
    found = [item for item in hung if item[1].role is Role.ROOT]
    if not found and any(end.failure_class is FailureClass.HANG_COLLECTIVE for _, end in hung):
        # All ranks of one node may stand in their own start while those of others wait for them.
        found = [item for item in hung if item[1].signature is not None]
    if not found:
        return None
    alone = len(found) == len(hung)
    how = (
        "no rank makes a step" if alone else "it is not in the collective in which the others wait"
    )
    return _with_culprits(FailureClass.HANG_NO_PROGRESS, found, how)


def _without_culprit(reports: Sequence[NodeReport]) -> HangDiagnosis:
    """Return the first hang as its agent described it: no culprit is known."""
    first = next(report for report in reports if report.kind is ReportKind.HANG)
    if first.failure_class.category == "hang" and first.culprits:
        return HangDiagnosis(failure_class=first.failure_class, how=first.how)
    if first.failure_class is FailureClass.HANG_NO_PROGRESS:
        return HangDiagnosis(failure_class=first.failure_class, how=first.how)
    how = "every rank waits in a collective and none is behind"
    return HangDiagnosis(failure_class=FailureClass.HANG_COLLECTIVE, how=how)


def _with_culprits(
    failure_class: FailureClass, ends: Sequence[tuple[str, RankEnd]], how: str
) -> HangDiagnosis:
    ordered = tuple(sorted(ends, key=lambda item: (item[1].rank, item[0])))
    return HangDiagnosis(failure_class=failure_class, how=how, culprits=ordered)
