"""Which ranks a hung job waits for, by the reports of all its nodes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gpuops.detect.recorder_dump import RANKS_MAX
from gpuops.detect.wait_graph import CollectiveHang, HangKind, diagnose, ranks_text
from gpuops.incident.decision import NodeReport, RankEnd, ReportKind
from gpuops.model import FailureClass, Role, Side

# A worker in one of these states makes no progress, whatever its step; the clearest state first.
_STATES = (
    (FailureClass.HANG_D_STATE, "is stuck inside the kernel"),
    (FailureClass.HANG_STOPPED, "is stopped"),
    (FailureClass.HANG_GIL_HELD, "holds Python's global interpreter lock"),
)


_WAITS = {
    FailureClass.HANG_COLLECTIVE,
    FailureClass.HANG_DEADLOCK,
    FailureClass.COLLECTIVE_MISMATCH,
}
_ODD_PLACES_MAX = 8
# What the ranks at fault do, by their collectives; with its class where the state does not say it.
_BY_COLLECTIVES = {
    HangKind.ABSENT: (FailureClass.HANG_NO_PROGRESS, ""),
    HangKind.STALLED: (FailureClass.HANG_COLLECTIVE, "does not complete a collective"),
    HangKind.DEADLOCK: (
        FailureClass.HANG_DEADLOCK,
        "waits in another collective than the ranks that wait for it",
    ),
    HangKind.MISMATCH: (
        FailureClass.COLLECTIVE_MISMATCH,
        "called another operation, shape or dtype than the other ranks",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDiagnosis:
    """The kind of hang; *culprits* are the ranks that the others wait for."""

    failure_class: FailureClass
    how: str
    culprits: tuple[tuple[str, RankEnd], ...] = ()

    @property
    def side(self) -> Side:
        """Return whose fault it is."""
        return side_of(self.failure_class)


def side_of(failure_class: FailureClass) -> Side:
    """Return whose fault a hang of *failure_class* is; collectives are the program's."""
    if failure_class in {FailureClass.HANG_DEADLOCK, FailureClass.COLLECTIVE_MISMATCH}:
        return Side.USER
    return Side.EXTERNAL if failure_class is FailureClass.HANG_STOPPED else Side.AMBIGUOUS


@dataclass(frozen=True, slots=True)
class RanksAtFault:
    """The ranks that hold up the others by the collectives; ``what`` each of them does."""

    ranks: frozenset[int]
    failure_class: FailureClass
    how: str
    what: str = ""


def ranks_at_fault(found: CollectiveHang, waiting: Collection[int]) -> RanksAtFault | None:
    """Return the ranks to blame by *found*, None where it names none.

    *waiting* stand in a collective by their stacks. One of those that has not called what others
    wait in receives from a third, or is in a call that is not recorded: it comes after those that
    stand elsewhere.
    """
    if not found.ranks:
        return None
    failure_class, what = _BY_COLLECTIVES[found.kind]
    ranks = frozenset(found.ranks)
    if found.kind is HangKind.ABSENT:
        failure_class = failure_class if ranks - set(waiting) else FailureClass.HANG_COLLECTIVE
        ranks = ranks - set(waiting) or ranks
    return RanksAtFault(ranks, failure_class, found.how, what)


def diagnose_hang(reports: Sequence[NodeReport]) -> HangDiagnosis:
    """Return whom the job waits for; it may be on a node that noticed no hang itself.

    A worker's state takes precedence, then the collectives that the ranks called, then the lowest
    step (of these, ranks outside a collective), then ranks outside a collective while others are in
    one. Where all ranks wait in what all have called, nobody is to blame, whatever its step.
    """
    hung = [(r.node, end) for r in reports if r.kind is ReportKind.HANG for end in r.ends]
    for failure_class, what in _STATES:
        found = [item for item in hung if item[1].failure_class is failure_class]
        if found:
            return _with_culprits(failure_class, found, f"it {what} and the others wait")
    collectives = _collectives_of(reports)
    return (
        _by_collectives(reports, collectives)
        or _all_called(hung, collectives)
        or _slowest_ranks(reports, hung)
        or _outside_collective(hung)
        or _without_culprit(reports, hung)
    )


def _collectives_of(reports: Sequence[NodeReport]) -> CollectiveHang:
    ends = sorted((e for r in reports for e in r.ends), key=lambda end: end.rank)
    n_ranks = max((end.rank + 1 for end in ends), default=0)
    dumps = [end.collectives for end in ends if end.collectives is not None]
    return diagnose(dumps, min(n_ranks, RANKS_MAX))


def _by_collectives(reports: Sequence[NodeReport], found: CollectiveHang) -> HangDiagnosis | None:
    ends = [(r.node, end) for r in reports for end in r.ends]
    waiting = {end.rank for _, end in ends if end.failure_class in _WAITS}
    fault = ranks_at_fault(found, waiting)
    if fault is None:
        return None
    culprits = [
        (node, replace(end, summary=f"rank {end.rank} {fault.what}" if fault.what else end.summary))
        for node, end in ends
        if end.rank in fault.ranks
    ]
    unknown = ranks_text(found.without_dump)
    how = f"{fault.how}; no collectives are known of rank {unknown}" if unknown else fault.how
    return _with_culprits(fault.failure_class, culprits, how)


def _all_called(hung: Sequence[tuple[str, RankEnd]], found: CollectiveHang) -> HangDiagnosis | None:
    is_known = found.kind is HangKind.ALL_IN and not found.without_dump
    if not is_known or any(end.failure_class not in _WAITS for _, end in hung):
        return None
    how = f"{found.how}: the network, or a GPU"
    return HangDiagnosis(failure_class=FailureClass.HANG_COLLECTIVE, how=how)


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


def _without_culprit(
    reports: Sequence[NodeReport], hung: Sequence[tuple[str, RankEnd]]
) -> HangDiagnosis:
    """Return the first hang as its agent described it: no culprit is known."""
    first = next(report for report in reports if report.kind is ReportKind.HANG)
    if first.failure_class.category == "hang" and first.culprits:
        return HangDiagnosis(failure_class=first.failure_class, how=first.how)
    if first.failure_class is FailureClass.HANG_NO_PROGRESS:
        return HangDiagnosis(failure_class=first.failure_class, how=first.how)
    how = "; ".join(["every rank waits in a collective and none is behind", *_odd_places(hung)])
    return HangDiagnosis(failure_class=FailureClass.HANG_COLLECTIVE, how=how)


def _odd_places(hung: Sequence[tuple[str, RankEnd]]) -> list[str]:
    """Return where few ranks wait in the program while most wait in another place of it.

    That blames nobody: one rank may send from another line than that in which others receive.
    """
    ranks_at: dict[str, list[int]] = {}
    for _, end in hung:
        if end.place is not None:
            ranks_at.setdefault(end.place, []).append(end.rank)
    most = max(map(len, ranks_at.values()), default=0)
    odd = {place: ranks for place, ranks in ranks_at.items() if len(ranks) < most}
    n_odd = sum(map(len, odd.values()))
    if len(odd) + 1 != len(ranks_at) or not 0 < n_odd <= min(_ODD_PLACES_MAX, most - 1):
        return []
    (usual,) = ranks_at.keys() - odd.keys()
    texts = [f"rank {ranks_text(ranks)} waits in {place}" for place, ranks in sorted(odd.items())]
    return [*texts, f"the other {most} in {usual}"]


def _with_culprits(
    failure_class: FailureClass, ends: Sequence[tuple[str, RankEnd]], how: str
) -> HangDiagnosis:
    ordered = tuple(sorted(ends, key=lambda item: (item[1].rank, item[0])))
    return HangDiagnosis(failure_class=failure_class, how=how, culprits=ordered)
