"""A run that was asked to end: not a failure, but on record."""

from collections.abc import Sequence

from gpuops.incident.evidence import clip, rank_entity, step_phrase
from gpuops.incident.identity import incident_id
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
    WorkerExit,
)

# Ctrl-C and a closed terminal come from the person at it; SIGTERM and the rest from a scheduler.
_BY_HAND = frozenset({"SIGINT", "SIGHUP", "SIGQUIT"})


def incident_from_cancel(
    signal_name: str,
    exits: Sequence[WorkerExit] = (),
    *,
    run_id: str,
    attempt: int,
    node: str,
    detected_us: int,
) -> Incident:
    """Return the closed incident of a run whose agent on *node* received *signal_name*.

    No one is a culprit and nothing was lost to a failure.
    """
    by_hand = signal_name in _BY_HAND
    who = "the user" if by_hand else "the scheduler or an administrator"
    asked = Evidence(
        role=Role.ROOT,
        text=f"the agent on {node} received {signal_name}",
        entity=Entity(EntityKind.NODE, node),
    )
    ranks = [_ended(worker) for worker in sorted(exits, key=lambda worker: worker.rank)]
    return Incident(
        id=incident_id(run_id, attempt),
        failure_class=FailureClass.CANCELLED,
        side=Side.USER if by_hand else Side.SCHEDULER,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.CLOSED,
        title=f"the run was cancelled: its agent on {node} received {signal_name}",
        first_us=detected_us,
        detected_us=detected_us,
        run_id=run_id,
        attempt=attempt,
        culprit_how=f"nobody is to blame; {signal_name} is sent by {who}",
        evidence=(asked, *ranks),
        actions=(ActionKind.STOP,),
        resolved_us=detected_us,
        resolution="cancelled: the workers were ended and the run was closed",
        authority=2,
    )


def _ended(worker: WorkerExit) -> Evidence:
    return Evidence(
        role=Role.TEARDOWN,
        text=f"rank {worker.rank} (pid {worker.pid}) {worker.describe()} {step_phrase(worker)}",
        entity=rank_entity(worker),
        lines=clip(worker.log_tail[-3:]),
        path=worker.log_path,
    )
