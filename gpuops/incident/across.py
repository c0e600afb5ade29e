"""The cause of a failure over all nodes: causal role first, then the order of arrival.

Clocks of different hosts are not compared. What is only a symptom (a peer is gone, a collective
timed out, workers were stopped for others) is never the cause while there is a root.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from gpuops.incident.cause import SAME_EXCEPTION_SHARE
from gpuops.incident.decision import CULPRITS_MAX, NodeReport, RankEnd, ReportKind
from gpuops.incident.standstill import Standstill, standstill
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side


class Standing(IntEnum):
    """The causal role of a report, the strongest claim to be the cause first.

    A preemption explains everything that ends. Evidence against a node itself beats a root without
    any. A lost node beats what its peers raised. A process that the kernel ended did not die of an
    exception elsewhere, but the other way round it happens. What hinders a start, a standstill and
    an early exit are causes only where nobody failed.
    """

    PREEMPTED = 0
    NODE_EVIDENCE = 1
    NODE_LOST = 2
    KILLED = 3
    ROOT = 4
    INFRASTRUCTURE = 5
    HANG = 6
    EARLY_EXIT = 7
    SYMPTOM = 8
    NOTHING = 9


_BY_KIND = {
    ReportKind.NODE_LOST: Standing.NODE_LOST,
    ReportKind.GATE_FAILED: Standing.NODE_EVIDENCE,
    ReportKind.DONE: Standing.NOTHING,
    ReportKind.STOPPED: Standing.NOTHING,
    ReportKind.START_FAILED: Standing.INFRASTRUCTURE,
    ReportKind.HANG: Standing.HANG,
}
_KILLED = frozenset(
    {
        FailureClass.SIGKILL_PROBABLE,
        FailureClass.CGROUP_OOM,
        FailureClass.KERNEL_OOM,
        FailureClass.SEGFAULT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The judgement over all reports.

    ``report`` is the one with the cause, worded for all nodes; None where there was no report.
    ``ends`` are the culprits' ends with their nodes. ``is_shared``: so many ranks raised the same
    exception that it is the program's, on whatever node.
    """

    standing: Standing
    report: NodeReport | None
    ends: tuple[tuple[str, RankEnd], ...] = ()
    is_shared: bool = False

    @property
    def first(self) -> RankEnd | None:
        """Return the end that stands for the failure."""
        return self.ends[0][1] if self.ends else None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that the failure fell on; none for one that is the program's."""
        if self.is_shared or self.report is None:
            return ()
        if self.ends:
            return tuple(sorted({node for node, _ in self.ends}))
        return () if self.standing >= Standing.HANG else (self.report.node,)

    @property
    def step(self) -> int | None:
        """Return the step it happened at."""
        if self.first is not None and self.first.step is not None:
            return self.first.step
        return self.report.last_step if self.report is not None else None


def find_root(reports: Sequence[NodeReport]) -> RootCause:
    """Return the cause that *reports* add up to; only their ``arrival`` orders them."""
    ordered = sorted(reports, key=_order)
    if not ordered:
        return RootCause(standing=Standing.NOTHING, report=None)
    best = ordered[0]
    standing = standing_of(best)
    if standing >= Standing.HANG:
        return _without_a_root(ordered, standing)
    ends = tuple((best.node, end) for end in best.ends if end.role is Role.ROOT)
    if standing is Standing.ROOT and (shared := _sharers(ends, ordered)):
        return _shared(best, shared, sum(len(report.ends) for report in ordered))
    if standing is Standing.NODE_LOST:
        ends = ()
    return RootCause(standing=standing, report=best, ends=ends)


def standing_of(report: NodeReport) -> Standing:
    """Return the causal role of *report*."""
    if report.failure_class is FailureClass.PREEMPTED:
        return Standing.PREEMPTED
    by_kind = _BY_KIND.get(report.kind)
    if report.blames_node and by_kind is not Standing.NODE_LOST:
        return Standing.NODE_EVIDENCE
    return _standing_of_a_failure(report) if by_kind is None else by_kind


def _standing_of_a_failure(report: NodeReport) -> Standing:
    has_root = any(end.role is Role.ROOT for end in report.ends)
    standings = (
        (Standing.INFRASTRUCTURE, report.is_infrastructure),
        (Standing.EARLY_EXIT, report.failure_class is FailureClass.USER_EARLY_EXIT),
        (Standing.SYMPTOM, report.confidence is Confidence.SYMPTOM_ONLY),
        (Standing.KILLED, report.failure_class in _KILLED),
        (Standing.ROOT, has_root or report.failure_class is not FailureClass.UNRESOLVED),
    )
    return next((standing for standing, holds in standings if holds), Standing.NOTHING)


def _order(report: NodeReport) -> tuple[int, int, str, str]:
    return standing_of(report), report.arrival, report.node, report.kind.value


def _sharers(
    ends: Sequence[tuple[str, RankEnd]], reports: Sequence[NodeReport]
) -> list[tuple[str, RankEnd]]:
    """Return every rank with the signature of the first of *ends*, if they are nearly all."""
    wanted = ends[0][1].signature if ends else None
    if wanted is None:
        return []
    world = [(report.node, end) for report in reports for end in report.ends]
    alike = [item for item in world if item[1].signature == wanted]
    enough = len(alike) >= 2 and len(alike) >= SAME_EXCEPTION_SHARE * len(world)
    roots = [item for item in alike if item[1].role is not Role.TEARDOWN]
    return sorted(roots, key=lambda item: item[1].rank) if enough else []


def _shared(best: NodeReport, ends: Sequence[tuple[str, RankEnd]], world: int) -> RootCause:
    report = replace(
        best,
        side=Side.USER,
        confidence=Confidence.CONFIRMED,
        how=f"{len(ends)} of {world} ranks raised the same exception: it is the program's",
        culprits=_ranks(ends),
    )
    return RootCause(standing=Standing.ROOT, report=report, ends=tuple(ends), is_shared=True)


def _without_a_root(ordered: Sequence[NodeReport], standing: Standing) -> RootCause:
    """Return what explains a standstill or symptoms; a rank that had ended early does."""
    best = ordered[0]
    hangs = [report for report in ordered if report.kind is ReportKind.HANG]
    found = standstill(ordered) if hangs else None
    done = [(r.node, end) for r in ordered for end in r.ends if end.role is Role.NOISE]
    nodes = {node for node, _ in done} | {r.node for r in ordered if r.kind is ReportKind.DONE}
    if nodes and standing <= Standing.SYMPTOM and (found is None or not found.culprits):
        told_by = best if best.node in nodes else next(r for r in ordered if r.node in nodes)
        return _early_exit(told_by, done, nodes)
    if found is not None:
        return _hung(best, found)
    if standing is Standing.SYMPTOM:
        how = _suspects(ordered)
        return RootCause(standing=standing, report=replace(best, how=how, culprits=()))
    return RootCause(standing=standing, report=best)


def _early_exit(
    told_by: NodeReport, ends: Sequence[tuple[str, RankEnd]], nodes: Iterable[str]
) -> RootCause:
    """Return the early exit as the cause, in the report of a node that it happened on."""
    is_done = told_by.kind is ReportKind.DONE
    report = replace(
        told_by,
        # What was success when it was filed is a failure now that others needed those ranks.
        kind=ReportKind.WORKERS_FAILED if is_done else told_by.kind,
        failure_class=FailureClass.USER_EARLY_EXIT,
        side=Side.USER,
        confidence=Confidence.PROBABLE,
        how=f"{_who(ends) or 'all ranks'} on {_few(sorted(nodes))} had ended with code 0"
        " while others still needed them",
        culprits=_ranks(ends),
    )
    return RootCause(standing=Standing.EARLY_EXIT, report=report, ends=tuple(ends))


def _hung(best: NodeReport, found: Standstill) -> RootCause:
    report = replace(
        best,
        failure_class=found.failure_class,
        side=Side.EXTERNAL if found.failure_class is FailureClass.HANG_STOPPED else Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE if found.culprits else Confidence.SYMPTOM_ONLY,
        how=found.how,
        culprits=_ranks(found.culprits) or best.culprits,
    )
    return RootCause(standing=Standing.HANG, report=report, ends=found.culprits)


def _suspects(ordered: Sequence[NodeReport]) -> str:
    """Word who is to be looked at first where there are only symptoms: who was behind."""
    ends = [(r.node, end) for r in ordered for end in r.ends]
    steps = [end.step for _, end in ends if end.step is not None]
    how = "nobody failed first on any node: the cause left no trace"
    if not steps or min(steps) == max(steps):
        return how
    behind = [(node, end) for node, end in ends if end.step == min(steps)]
    nodes = _few(sorted({node for node, _ in behind}))
    return f"{how}; {_who(behind)} on {nodes} had come to step {min(steps)} only"


def _ranks(ends: Iterable[tuple[str, RankEnd]]) -> tuple[Entity, ...]:
    ranks = sorted({end.rank for _, end in ends})
    return tuple(Entity(EntityKind.RANK, str(rank)) for rank in ranks[:CULPRITS_MAX])


def _who(ends: Sequence[tuple[str, RankEnd]]) -> str:
    ranks = sorted({end.rank for _, end in ends})
    if not ranks:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_few([str(rank) for rank in ranks])}"


def _few(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
