"""Incidents of a failed rendezvous, and of agents that lost their control store."""

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
    """Return the closed incident of an attempt that did not begin, as *node* saw it.

    *reason* says what was waited for and for how long, or what the control store answered; it does
    not reveal the culprit (a node that never started, a wrong address, a network).
    """
    return replace(
        _agent_incident(reason, run_id, attempt, node, at_us),
        failure_class=FailureClass.RENDEZVOUS,
        title="the rendezvous of the run's agents failed",
        actions=(ActionKind.STOP,),
        resolution="not recovered: the run ended before a worker was started",
    )


def incident_from_lost_store(
    reason: str, *, run_id: str, attempt: int, node: str, at_us: int
) -> Incident:
    """Return the closed incident of a run that lost its control store in *attempt*, from *node*.

    Every agent of the run records the same; it does not reveal whether its host, its process or the
    network failed.
    """
    return replace(
        _agent_incident(reason, run_id, attempt, node, at_us),
        failure_class=FailureClass.STORE_LOST,
        side=Side.INFRA,
        title="the run lost the control store of its agents",
        actions=(ActionKind.REQUEUE,),
        resolution="not recovered: the run requests a requeue",
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
