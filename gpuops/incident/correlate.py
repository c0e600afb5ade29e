"""The cause of a failure over all nodes: causal role first, then the order of arrival.

Clocks of different hosts are not compared. A symptom (a peer is gone, a collective timed out,
workers were stopped for others) is never the cause while there is a root.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from gpuops.incident.cause import SAME_EXCEPTION_SHARE
from gpuops.incident.decision import CULPRITS_MAX, NodeReport, RankEnd, ReportKind
from gpuops.incident.incidents.hang import HangDiagnosis, diagnose_hang
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side


class CausalRank(IntEnum):
    """The causal role of a report, the strongest claim to be the cause first.

    A preemption explains all exits. Evidence against a node beats a root without evidence. A lost
    node beats the exceptions of its peers. A process that the kernel killed did not die of an
    exception elsewhere, but the reverse happens. A failed start, a hang and an early exit are
    causes only if nothing else failed.
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
    ReportKind.NODE_LOST: CausalRank.NODE_LOST,
    ReportKind.GATE_FAILED: CausalRank.NODE_EVIDENCE,
    ReportKind.DONE: CausalRank.NOTHING,
    ReportKind.STOPPED: CausalRank.NOTHING,
    ReportKind.START_FAILED: CausalRank.INFRASTRUCTURE,
    ReportKind.HANG: CausalRank.HANG,
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
    """The cause over all reports.

    ``report`` is the one with the cause, worded for all nodes; None without reports. ``ends`` are
    the culprits' ends with their nodes. ``is_shared``: it is the program's fault, not a node's: so
    many ranks raised the same exception, or their collectives do not match.
    """

    causal_rank: CausalRank
    report: NodeReport | None
    ends: tuple[tuple[str, RankEnd], ...] = ()
    is_shared: bool = False

    @property
    def first(self) -> RankEnd | None:
        """Return the end that represents the failure."""
        return self.ends[0][1] if self.ends else None

    @property
    def is_program_hang(self) -> bool:
        """Return whether the order or kind of the program's collectives explains a hang."""
        return self.is_shared and self.causal_rank is CausalRank.HANG

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes where the failure was; none for one of the program."""
        if self.is_shared or self.report is None:
            return ()
        if self.ends:
            return tuple(sorted({node for node, _ in self.ends}))
        return () if self.causal_rank >= CausalRank.HANG else (self.report.node,)

    @property
    def step(self) -> int | None:
        """Return the step it happened at."""
        if self.first is not None and self.first.step is not None:
            return self.first.step
        return self.report.last_step if self.report is not None else None


def find_root(reports: Sequence[NodeReport]) -> RootCause:
    """Return the cause of *reports*; only their ``arrival`` orders them."""
    ordered = sorted(reports, key=_order)
    if not ordered:
        return RootCause(causal_rank=CausalRank.NOTHING, report=None)
    strongest = ordered[0]
    causal_rank = causal_rank_of(strongest)
    if causal_rank >= CausalRank.HANG:
        return _without_root(ordered, causal_rank)
    ends = tuple((strongest.node, end) for end in strongest.ends if end.role is Role.ROOT)
    if causal_rank is CausalRank.ROOT and (shared := _ranks_with_same_exception(ends, ordered)):
        return _shared_cause(strongest, shared, sum(len(report.ends) for report in ordered))
    if causal_rank is CausalRank.NODE_LOST:
        ends = ()
    return RootCause(causal_rank=causal_rank, report=strongest, ends=ends)


def causal_rank_of(report: NodeReport) -> CausalRank:
    """Return the causal role of *report*."""
    if report.failure_class is FailureClass.PREEMPTED:
        return CausalRank.PREEMPTED
    by_kind = _BY_KIND.get(report.kind)
    if report.blames_node and by_kind is not CausalRank.NODE_LOST:
        return CausalRank.NODE_EVIDENCE
    return _failure_rank(report) if by_kind is None else by_kind


def _failure_rank(report: NodeReport) -> CausalRank:
    has_root = any(end.role is Role.ROOT for end in report.ends)
    ranks = (
        (CausalRank.INFRASTRUCTURE, report.is_infrastructure),
        (CausalRank.EARLY_EXIT, report.failure_class is FailureClass.USER_EARLY_EXIT),
        (CausalRank.SYMPTOM, report.confidence is Confidence.SYMPTOM_ONLY),
        (CausalRank.KILLED, report.failure_class in _KILLED),
        (CausalRank.ROOT, has_root or report.failure_class is not FailureClass.UNRESOLVED),
    )
    return next((rank for rank, holds in ranks if holds), CausalRank.NOTHING)


def _order(report: NodeReport) -> tuple[int, int, str, str]:
    return causal_rank_of(report), report.arrival, report.node, report.kind.value


def _ranks_with_same_exception(
    ends: Sequence[tuple[str, RankEnd]], reports: Sequence[NodeReport]
) -> list[tuple[str, RankEnd]]:
    """Return every rank with the signature of the first of *ends*, if they are nearly all."""
    signature = ends[0][1].signature if ends else None
    if signature is None:
        return []
    world = [(report.node, end) for report in reports for end in report.ends]
    matching = [item for item in world if item[1].signature == signature]
    enough = len(matching) >= 2 and len(matching) >= SAME_EXCEPTION_SHARE * len(world)
    roots = [item for item in matching if item[1].role is not Role.TEARDOWN]
    return sorted(roots, key=lambda item: item[1].rank) if enough else []


def _shared_cause(
    report_: NodeReport, ends: Sequence[tuple[str, RankEnd]], world: int
) -> RootCause:
    report = replace(
        report_,
        side=Side.USER,
        confidence=Confidence.CONFIRMED,
        how=f"{len(ends)} of {world} ranks raised the same exception: it is the program's",
        culprits=_ranks(ends),
    )
    return RootCause(causal_rank=CausalRank.ROOT, report=report, ends=tuple(ends), is_shared=True)


def _without_root(ordered: Sequence[NodeReport], causal_rank: CausalRank) -> RootCause:
    """Return what explains a hang or symptoms: a rank that had ended early, if there is one."""
    strongest = ordered[0]
    hangs = [report for report in ordered if report.kind is ReportKind.HANG]
    hang = diagnose_hang(ordered) if hangs else None
    done = [(r.node, end) for r in ordered for end in r.ends if end.role is Role.NOISE]
    nodes = {node for node, _ in done} | {r.node for r in ordered if r.kind is ReportKind.DONE}
    if nodes and causal_rank <= CausalRank.SYMPTOM and (hang is None or not hang.culprits):
        report_source = (
            strongest if strongest.node in nodes else next(r for r in ordered if r.node in nodes)
        )
        return _early_exit(report_source, done, nodes)
    if hang is not None:
        return _hang_cause(ordered, hang)
    if causal_rank is CausalRank.SYMPTOM:
        how = _behind_text(ordered)
        return RootCause(causal_rank=causal_rank, report=replace(strongest, how=how, culprits=()))
    return RootCause(causal_rank=causal_rank, report=strongest)


def _early_exit(
    source: NodeReport, ends: Sequence[tuple[str, RankEnd]], nodes: Iterable[str]
) -> RootCause:
    """Return the early exit as the cause, in the report of a node that it happened on."""
    is_done = source.kind is ReportKind.DONE
    report = replace(
        source,
        # Reported as success, it is a failure now: others needed those ranks.
        kind=ReportKind.WORKERS_FAILED if is_done else source.kind,
        failure_class=FailureClass.USER_EARLY_EXIT,
        side=Side.USER,
        confidence=Confidence.PROBABLE,
        how=f"{_ranks_text(ends) or 'all ranks'} on "
        f"{limited_list(sorted(nodes))} had ended with code 0"
        " while others still needed them",
        culprits=_ranks(ends),
    )
    return RootCause(causal_rank=CausalRank.EARLY_EXIT, report=report, ends=tuple(ends))


def _hang_cause(ordered: Sequence[NodeReport], hang: HangDiagnosis) -> RootCause:
    """Return *hang* as the report of the first culprit's node, which may have noticed nothing."""
    node = hang.culprits[0][0] if hang.culprits else ordered[0].node
    source = next(report for report in ordered if report.node == node)
    at_fault = {end.rank: end for name, end in hang.culprits if name == node}
    others = (
        replace(end, role=Role.SYMPTOM) if end.role is Role.ROOT and at_fault else end
        for end in source.ends
        if end.rank not in at_fault
    )
    roots = (replace(end, role=Role.ROOT) for end in at_fault.values())
    report = replace(
        source,
        kind=ReportKind.HANG,
        failure_class=hang.failure_class,
        side=hang.side,
        confidence=Confidence.PROBABLE if hang.culprits else Confidence.SYMPTOM_ONLY,
        how=hang.how,
        culprits=_ranks(hang.culprits) or source.culprits,
        ends=(*roots, *others),
    )
    return RootCause(
        causal_rank=CausalRank.HANG,
        report=report,
        ends=hang.culprits,
        is_shared=hang.side is Side.USER,
    )


def _behind_text(ordered: Sequence[NodeReport]) -> str:
    """Return text on whom to examine first if there are only symptoms: the ranks behind."""
    ends = [(r.node, end) for r in ordered for end in r.ends]
    steps = [end.step for _, end in ends if end.step is not None]
    how = "no rank failed first on any node: the cause left no trace"
    if not steps or min(steps) == max(steps):
        return how
    behind = [(node, end) for node, end in ends if end.step == min(steps)]
    nodes = limited_list(sorted({node for node, _ in behind}))
    return f"{how}; {_ranks_text(behind)} on {nodes} had reached only step {min(steps)}"


def _ranks(ends: Iterable[tuple[str, RankEnd]]) -> tuple[Entity, ...]:
    ranks = sorted({end.rank for _, end in ends})
    return tuple(Entity(EntityKind.RANK, str(rank)) for rank in ranks[:CULPRITS_MAX])


def _ranks_text(ends: Sequence[tuple[str, RankEnd]]) -> str:
    ranks = sorted({end.rank for _, end in ends})
    if not ranks:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {limited_list([str(rank) for rank in ranks])}"


def limited_list(names: Sequence[str], limit: int = 8) -> str:
    """Return ``"a, b and 3 more"``."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
