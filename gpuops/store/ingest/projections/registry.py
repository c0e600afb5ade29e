"""Which function projects which kind of event. Other kinds are stored as events only."""

from collections.abc import Callable

from gpuops.store.events import DRAINED, MEASURED, PAIR_TESTED, REPAIRED, RESUMED, UNCHANGED
from gpuops.store.ingest.envelope import EventEnvelope, ProjectedRow
from gpuops.store.ingest.merge import MergeRule
from gpuops.store.ingest.projections.burnin import (
    MEASUREMENTS,
    PAIR_TESTS,
    burnin_measured,
    sweep_tested,
)
from gpuops.store.ingest.projections.incidents import (
    ACTIONS,
    CULPRITS,
    EVIDENCE,
    INCIDENT_ATTEMPTS,
    INCIDENT_EVIDENCE,
    INCIDENTS,
    REVISIONS,
    STRIKES,
    incident_recorded,
    tool_failed,
)
from gpuops.store.ingest.projections.nodes import (
    ATTEMPTS,
    BOOTS,
    CHECK_RESULTS,
    CHECK_RUNS,
    CHECK_SAMPLES,
    CLUSTERS,
    COMPONENTS,
    NODE_STATES,
    NODES,
    REPAIRS,
    RUNS,
    check_ran,
    check_unchanged,
    common_rows,
    node_drained,
    node_repaired,
    node_resumed,
    node_seen,
)
from gpuops.store.ingest.projections.runs import (
    ATTEMPT_NODES,
    DECISIONS,
    EXCLUSIONS,
    PROGRESS,
    attempt_caught_up,
    attempt_ended,
    attempt_first_step,
    attempt_progress,
    attempt_started,
    decision_made,
    node_excluded,
    run_ended,
    run_started,
)

PROJECTIONS: dict[str, Callable[[EventEnvelope], list[ProjectedRow]]] = {
    "node.seen": node_seen,
    "run.started": run_started,
    "run.ended": run_ended,
    "attempt.started": attempt_started,
    "attempt.first_step": attempt_first_step,
    "attempt.caught_up": attempt_caught_up,
    "attempt.progress": attempt_progress,
    "attempt.ended": attempt_ended,
    "incident.recorded": incident_recorded,
    "decision.made": decision_made,
    "node.excluded": node_excluded,
    "check.ran": check_ran,
    UNCHANGED: check_unchanged,
    "tool.failed": tool_failed,
    DRAINED: node_drained,
    RESUMED: node_resumed,
    REPAIRED: node_repaired,
    MEASURED: burnin_measured,
    PAIR_TESTED: sweep_tested,
}

UNSTORED_KINDS = frozenset({UNCHANGED})
"""Kinds that only change derived rows: nothing happened, so they are no events of the store."""

# Parents before children; every writer uses this order, so that they cannot deadlock.
TABLE_ORDER: tuple[MergeRule, ...] = (
    CLUSTERS,
    NODES,
    BOOTS,
    COMPONENTS,
    RUNS,
    ATTEMPTS,
    ATTEMPT_NODES,
    PROGRESS,
    CHECK_RUNS,
    CHECK_RESULTS,
    CHECK_SAMPLES,
    INCIDENTS,
    REVISIONS,
    CULPRITS,
    STRIKES,
    INCIDENT_ATTEMPTS,
    EVIDENCE,
    INCIDENT_EVIDENCE,
    ACTIONS,
    REPAIRS,
    NODE_STATES,
    DECISIONS,
    EXCLUSIONS,
    MEASUREMENTS,
    PAIR_TESTS,
)


def project_event(envelope: EventEnvelope) -> list[ProjectedRow]:
    """Return the rows of *envelope* in the derived tables.

    Raises:
        SpoolLineError: The payload is invalid for its kind.
    """
    projection = PROJECTIONS.get(envelope.event.kind)
    rows = projection(envelope) if projection else []
    return rows if envelope.event.kind in UNSTORED_KINDS else [*common_rows(envelope), *rows]
