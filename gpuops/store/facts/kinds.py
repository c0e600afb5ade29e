"""Which function reads which kind of event. A kind that is not here is kept as an event only."""

from collections.abc import Callable

from gpuops.store.facts.check import CHECK_RESULTS, CHECK_RUNS, COMPONENTS, check_ran
from gpuops.store.facts.decision import DECISIONS, EXCLUSIONS, decision_made, node_excluded
from gpuops.store.facts.envelope import Envelope, Fact
from gpuops.store.facts.incident import (
    ACTIONS,
    CULPRITS,
    EVIDENCE,
    INCIDENT_ATTEMPTS,
    INCIDENT_EVIDENCE,
    INCIDENTS,
    REVISIONS,
    STRIKES,
    incident_recorded,
)
from gpuops.store.facts.node import (
    NODE_STATES,
    REPAIRS,
    node_drained,
    node_repaired,
    node_resumed,
)
from gpuops.store.facts.places import ATTEMPTS, BOOTS, CLUSTERS, NODES, RUNS, common, node_seen
from gpuops.store.facts.run import (
    ATTEMPT_NODES,
    PROGRESS,
    attempt_caught_up,
    attempt_ended,
    attempt_first_step,
    attempt_progress,
    attempt_started,
    run_ended,
    run_started,
)
from gpuops.store.facts.tool import tool_failed
from gpuops.store.merge import Merge
from gpuops.store.node_events import DRAINED, REPAIRED, RESUMED

READERS: dict[str, Callable[[Envelope], list[Fact]]] = {
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
    "tool.failed": tool_failed,
    DRAINED: node_drained,
    RESUMED: node_resumed,
    REPAIRED: node_repaired,
}

# Parents before children; every writer writes tables in this order, so none waits in a circle.
TABLE_ORDER: tuple[Merge, ...] = (
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
)


def facts_of(envelope: Envelope) -> list[Fact]:
    """Return the rows of the derived tables that *envelope* adds to.

    Raises:
        LineError: The payload is not one of its kind.
    """
    reader = READERS.get(envelope.event.kind)
    return [*common(envelope), *(reader(envelope) if reader else ())]
