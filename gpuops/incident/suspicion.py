"""What a monitor suspects about one entity of a run, and what follows for a restart; pure.

A suspicion is to a run what a `gpuops.model.Finding` is to a node. Failure class, level and
confidence decide which of several is the cause, never the order of the monitors' reports.

A suspicion may be false, and a false one costs more than a slow node. A node that is only suspected
never ends a generation or the run: the next restart excludes it, if it can be spared.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuops.incident.budget import candidates, trainable_nodes
from gpuops.incident.correlate import causal_rank_of
from gpuops.incident.decision import (
    TEXT_CHARS_MAX,
    ClusterState,
    NodeReport,
    OnExhausted,
    RankEnd,
    ReportKind,
)
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side
from gpuops.units import NS_PER_S

# A GPU error explains a failure that follows within this time.
RECENT_S = 60.0
_SHOWN = 3


class SuspicionLevel(StrEnum):
    """The consequence of a suspicion, the most severe last."""

    NOTE = "note"  # nothing by itself; a confirmed one may explain a failure that follows
    SUSPECT = "suspect"  # the next restart excludes its node, if the node can be spared
    END = "end"  # ends the generation


_UNEXPLAINED_HANGS = frozenset({FailureClass.HANG_NO_PROGRESS, FailureClass.HANG_COLLECTIVE})
_LEVELS = tuple(SuspicionLevel)
_CONFIDENCES = tuple(Confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """What *source* (a monitor, a detector) suspects about *entity*, of this node or another.

    ``node``: the node to blame, which a restart should exclude, if any. ``value`` was compared with
    ``threshold``. ``also``: other entities that belong to it; ``ends``: what is known of the ranks.
    Times are of this host's monotonic clock; ``last_ns`` None: it still holds.
    """

    entity: Entity
    failure_class: FailureClass
    confidence: Confidence
    level: SuspicionLevel
    source: str
    why: str
    value: float | None = None
    threshold: str | None = None
    node: str | None = None
    side: Side = Side.AMBIGUOUS
    kind: ReportKind = ReportKind.VERDICT
    also: tuple[Entity, ...] = ()
    ends: tuple[RankEnd, ...] = ()
    since_ns: int = 0
    last_ns: int | None = None

    @property
    def culprits(self) -> tuple[Entity, ...]:
        """Return what is blamed; a node only if it is to be excluded."""
        parts = (item for item in (self.entity, *self.also) if item.kind is not EntityKind.NODE)
        node = () if self.node is None else (Entity(EntityKind.NODE, self.node),)
        return (*dict.fromkeys(parts), *node)

    def explains_failures(self, now_ns: int) -> bool:
        """Return whether it explains a hang, or a failure of workers, noticed at *now_ns*."""
        if self.confidence is not Confidence.CONFIRMED or self.kind is ReportKind.HANG:
            return False
        return self.last_ns is None or now_ns - self.last_ns <= RECENT_S * NS_PER_S


def reports_of(
    suspicions: Iterable[Suspicion], *, here: str, generation: int
) -> tuple[NodeReport, ...]:
    """Return the reports that end *generation*, one for each node, the one with the cause first.

    Suspicions that blame no node are reported by *here*, the node of their monitor. Of several
    kinds on one node only the strongest is reported: a hang follows from a GPU that failed.
    """
    ending = sorted((s for s in suspicions if s.level is SuspicionLevel.END), key=_strongest_first)
    by_node: dict[str, list[Suspicion]] = {}
    for suspicion in ending:
        by_node.setdefault(suspicion.node or here, []).append(suspicion)
    return tuple(_report(found, node, generation) for node, found in by_node.items())


def suspect_report(suspicion: Suspicion, generation: int) -> NodeReport:
    """Return *suspicion* as a report of the node that it blames."""
    assert suspicion.node is not None
    return _report([suspicion], suspicion.node, generation)


def explain(report: NodeReport, suspicions: Iterable[Suspicion], now_ns: int) -> NodeReport:
    """Return *report* of worker exits or a hang, with a suspicion from just before it as the cause.

    An exception of the program's own explains itself, and so does a worker that the kernel or the
    interpreter shows to be stuck. *now_ns*: when the workers failed, or fell silent.
    """
    found = [s for s in suspicions if s.explains_failures(now_ns) and s.node in {None, report.node}]
    is_hang = report.kind is ReportKind.HANG and report.failure_class in _UNEXPLAINED_HANGS
    if not (is_hang or report.kind is ReportKind.WORKERS_FAILED):
        return report
    if report.side is Side.USER or not found:
        return report
    cause = min(found, key=lambda s: (-_LEVELS.index(s.level), *_strongest_first(s)))
    return replace(
        report,
        kind=cause.kind if is_hang else report.kind,
        # The place of a hang that a GPU explains is no fault of the program.
        ends=tuple(replace(end, signature=None) for end in report.ends) if is_hang else report.ends,
        failure_class=cause.failure_class,
        side=cause.side,
        confidence=Confidence.PROBABLE,
        how=cause.why,
        culprits=(*cause.culprits, *report.culprits),
        blames_node=report.blames_node or cause.node is not None,
    )


def _strongest_first(suspicion: Suspicion) -> tuple[int, bool, int, int, str, Entity]:
    """Return a total order of suspicions that does not depend on their order of arrival."""
    return (
        causal_rank_of(_report([suspicion], "", 0)),
        suspicion.kind is ReportKind.HANG,
        _CONFIDENCES.index(suspicion.confidence),
        suspicion.since_ns,
        suspicion.failure_class.value,
        suspicion.entity,
    )


def _report(suspicions: Sequence[Suspicion], node: str, generation: int) -> NodeReport:
    """Return the first of *suspicions*, which is the cause, with the others of its kind."""
    cause = suspicions[0]
    alike = [s for s in suspicions if s.kind is cause.kind]
    more = f"; and {len(alike) - _SHOWN} more" if len(alike) > _SHOWN else ""
    return NodeReport(
        kind=cause.kind,
        node=node,
        generation=generation,
        failure_class=cause.failure_class,
        side=cause.side,
        confidence=cause.confidence,
        how="; ".join(s.why for s in alike[:_SHOWN]) + more,
        culprits=tuple(dict.fromkeys(item for s in alike for item in s.culprits)),
        blames_node=any(s.node is not None for s in alike),
        last_step=max((end.step for end in cause.ends if end.step is not None), default=None),
        ends=cause.ends,
    )


def suspects_to_exclude(cluster: ClusterState, excluded: Collection[str]) -> dict[str, str]:
    """Return the suspected nodes that the next generation excludes, with the reasons.

    Oldest suspicion first, each if a spare replaces it, or if the run may shrink
    (`OnExhausted.SHRINK`) and no other node leaves the run with it. None if more than half of the
    nodes are suspected: then the monitor is at fault.

    Args:
        cluster: The nodes, and the suspected ones.
        excluded: The nodes that are already excluded.
    """
    remaining = candidates(cluster, excluded)
    suspected = {node: why for node, why in cluster.suspected.items() if node in remaining}
    chosen: dict[str, str] = {}
    if 2 * len(suspected) > len(remaining):
        return chosen
    for node, why in suspected.items():
        if _can_be_spared(node, cluster, {*excluded, *chosen}):
            chosen[node] = f"suspected: {why}"[:TEXT_CHARS_MAX]
    return chosen


def _can_be_spared(node: str, cluster: ClusterState, excluded: Collection[str]) -> bool:
    n_now, n_without = (
        trainable_nodes(cluster, excluded),
        trainable_nodes(cluster, {*excluded, node}),
    )
    if n_without == 0:
        return False
    may_shrink = cluster.policy.on_exhausted is OnExhausted.SHRINK
    return n_without == n_now or (may_shrink and n_now - n_without == 1)
