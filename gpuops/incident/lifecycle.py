"""State changes of an incident, and its id.

open -> mitigated (the job steps again) -> closed (its cost is known). A closed incident is final:
a change returns it unchanged.
"""

from collections.abc import Mapping
from dataclasses import replace

from gpuops.model import ActionKind, Incident, IncidentState, run_incident_id


def incident_id(run_id: str, attempt: int) -> str:
    """Return the id of the incident that ended *attempt*: the same on every node."""
    return run_incident_id(run_id, str(attempt))


def about_gate(attempt: int, node: str) -> str:
    """Return what the incident is about that kept *node* out of *attempt*."""
    return f"{attempt}/{node}"


def about_suspect(node: str) -> str:
    """Return what the incident of *node* as a suspect is about; a run has one."""
    return f"doubt {node}"


def about_note(entity_id: str) -> str:
    """Return what the incident is about of what is suspected of a rank, but of no node."""
    return f"slow {entity_id}"


def about_replicas(ranks: str, epoch: int, step: int) -> str:
    """Return what the incident is about of *ranks* whose replicas differ from a state on."""
    return f"replicas {ranks}/{epoch}.{step}"


def about_damage(epoch: int, step: int) -> str:
    """Return what the incident is about of a saved state that is damaged on disk."""
    return f"damage {epoch}.{step}"


def with_action(incident: Incident, action: ActionKind) -> Incident:
    """Return *incident* with *action* taken; the same action is listed once."""
    if incident.state is IncidentState.CLOSED or action in incident.actions:
        return incident
    return replace(incident, actions=(*incident.actions, action), rev=incident.rev + 1)


def mitigate(incident: Incident, *, at_us: int, lost_s: Mapping[str, float]) -> Incident:
    """Return *incident* as mitigated at *at_us*: the job has made its first step again.

    *lost_s*: the seconds known so far, by phase.
    """
    if incident.state is not IncidentState.OPEN:
        return incident
    return replace(
        incident,
        state=IncidentState.MITIGATED,
        lost_s={**incident.lost_s, **lost_s},
        resolved_us=at_us,
        resolution="the job makes progress again",
        rev=incident.rev + 1,
    )


def close(
    incident: Incident, *, at_us: int, lost_s: Mapping[str, float], resolution: str
) -> Incident:
    """Return *incident* as closed with its total cost.

    If it was mitigated before, it keeps that time as the time of its resolution.
    """
    if incident.state is IncidentState.CLOSED:
        return incident
    return replace(
        incident,
        state=IncidentState.CLOSED,
        lost_s={**incident.lost_s, **lost_s},
        resolved_us=incident.resolved_us or at_us,
        resolution=resolution,
        rev=incident.rev + 1,
    )
