"""Whom a job that stands still waits for, by what all its nodes report."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.incident.decision import NodeReport, RankEnd, ReportKind
from gpuops.model import FailureClass, Role

# A worker in one of these states cannot go on, whatever its step; the clearer state first.
_STATES = (
    (FailureClass.HANG_D_STATE, "is stuck inside the kernel"),
    (FailureClass.HANG_STOPPED, "is stopped"),
    (FailureClass.HANG_GIL_HELD, "does not let go of Python's lock"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """What kind of standstill it is; *culprits* are those that the others wait for."""

    failure_class: FailureClass
    how: str
    culprits: tuple[tuple[str, RankEnd], ...] = ()


def standstill(reports: Sequence[NodeReport]) -> Standstill:
    """Return whom the job waits for; the laggard may be on a node that noticed no hang itself.

    A worker's state comes first, then the lowest step (of those, who is not in a collective), then
    who is not in a collective while others are.
    """
    hung = [(r.node, end) for r in reports if r.kind is ReportKind.HANG for end in r.ends]
    for failure_class, what in _STATES:
        found = [item for item in hung if item[1].failure_class is failure_class]
        if found:
            return _named(failure_class, found, f"it {what} and the others wait")
    return _behind(reports, hung) or _outside(hung) or _unnamed(reports)


def _behind(
    reports: Sequence[NodeReport], hung: Sequence[tuple[str, RankEnd]]
) -> Standstill | None:
    world = [(r.node, end) for r in reports for end in r.ends if end.role is not Role.NOISE]
    steps = [end.step for _, end in world if end.step is not None]
    if not steps or min(steps) == max(steps):
        return None
    last = [item for item in world if item[1].step == min(steps)]
    waiting = {end.rank for _, end in hung if end.failure_class is FailureClass.HANG_COLLECTIVE}
    named = [item for item in last if item[1].rank not in waiting] or last
    how = f"it had come to step {min(steps)} only, the others to {max(steps)}"
    return _named(FailureClass.HANG_NO_PROGRESS, named, how)


def _outside(hung: Sequence[tuple[str, RankEnd]]) -> Standstill | None:
    found = [item for item in hung if item[1].role is Role.ROOT]
    if not found:
        return None
    alone = len(found) == len(hung)
    how = "no rank makes a step" if alone else "it is in no collective, in which the others wait"
    return _named(FailureClass.HANG_NO_PROGRESS, found, how)


def _unnamed(reports: Sequence[NodeReport]) -> Standstill:
    """Return the first hang as its agent worded it: no rank is known to be to blame."""
    first = next(report for report in reports if report.kind is ReportKind.HANG)
    if first.failure_class.category == "hang" and first.culprits:
        return Standstill(failure_class=first.failure_class, how=first.how)
    how = "every rank waits in a collective and none is behind"
    return Standstill(failure_class=FailureClass.HANG_COLLECTIVE, how=how)


def _named(
    failure_class: FailureClass, ends: Sequence[tuple[str, RankEnd]], how: str
) -> Standstill:
    ordered = tuple(sorted(ends, key=lambda item: (item[1].rank, item[0])))
    return Standstill(failure_class=failure_class, how=how, culprits=ordered)
