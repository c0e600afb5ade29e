"""Agents that did not come together, and agents that lost what held them together."""

from dataclasses import replace

from gpuops.incident.lifecycle import incident_id
from gpuops.model import (
    ActionKind,
    Confidence,
    Entity,
    EntityKind,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Side,
)
from gpuops.scrub import scrub


def incident_from_rendezvous(
    reason: str, *, run_id: str, attempt: int, node: str, at_us: int
) -> Incident:
    """Return the closed incident of the attempt that was to begin and did not, as *node* saw it.

    *reason* says what was waited for and for how long, or what the control store answered; the
    culprit (a node that never started, a wrong address, a network) does not follow from it.
    """
    return replace(
        _agent_incident(reason, run_id, attempt, node, at_us),
        failure_class=FailureClass.RENDEZVOUS,
        title="the agents of the run did not come together",
        actions=(ActionKind.STOP,),
        resolution="not recovered: the run ended before a worker was started",
    )


def incident_from_lost_store(
    reason: str, *, run_id: str, attempt: int, node: str, at_us: int
) -> Incident:
    """Return the closed incident of a run that lost its control store in *attempt*, from *node*.

    Every agent of the run has the same account; whether its host, its process or
    the network failed does not follow from it.
    """
    return replace(
        _agent_incident(reason, run_id, attempt, node, at_us),
        failure_class=FailureClass.STORE_LOST,
        side=Side.INFRA,
        title="the run lost the store on which its agents agree",
        actions=(ActionKind.REQUEUE,),
        resolution="not recovered: the run asks to be requeued",
    )


def _agent_incident(reason: str, run_id: str, attempt: int, node: str, at_us: int) -> Incident:
    entity = Entity(EntityKind.NODE, node)
    root = Evidence(role=Role.ROOT, text=scrub(f"the agent on {node}: {reason}"), entity=entity)
    return Incident(
        id=incident_id(run_id, attempt),
        failure_class=FailureClass.UNRESOLVED,
        side=Side.AMBIGUOUS,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.CLOSED,
        title="",
        first_us=at_us,
        detected_us=at_us,
        run_id=run_id,
        attempt=attempt,
        evidence=(root,),
        resolved_us=at_us,
        authority=2,
    )
