"""Ranks whose copies of the training state differ where they must be equal, as an incident."""

from dataclasses import dataclass

from gpuops.incident.lifecycle import replicas_incident_id
from gpuops.model import (
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

NAMED_RANKS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMismatch:
    """What was found, *description* in a sentence; ``ranks``: all that must be equal, ``0-2, 5``.

    ``suspects`` may be wrong: outvoted ``by_majority``, else nobody knows which of them.
    ``is_local``: all of them are on the node that reports; ``nodes`` has that of each, where it is
    known. ``last_equal_step``: of the last state that was compared before and equal.
    """

    description: str
    step: int
    epoch: int
    ranks: str
    suspects: tuple[int, ...]
    by_majority: bool
    is_local: bool
    last_equal_step: int | None = None
    tensors: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def incident_from_replicas(
    mismatch: ReplicaMismatch, *, run_id: str, node: str, at_us: int
) -> Incident:
    """Return the open incident of *mismatch*, as *node* reports it.

    The cause may be a device, memory, or a program that is not deterministic: nothing follows from
    it by itself, and it ends no attempt. A node is named where a fault of hardware must be on it;
    where it may be on one of several, the evidence has them.
    """
    here = Entity(EntityKind.NODE, node)
    ranks = tuple(Entity(EntityKind.RANK, str(rank)) for rank in mismatch.suspects)
    nodes = tuple(dict.fromkeys(mismatch.nodes)) or ((node,) if mismatch.is_local else ())
    is_certain = mismatch.by_majority or len(nodes) == 1
    how = "outvoted by the other replicas" if mismatch.by_majority else "one of them may be wrong"
    return Incident(
        id=replicas_incident_id(run_id, mismatch.ranks, mismatch.epoch, mismatch.step),
        failure_class=FailureClass.REPLICAS_DIFFER,
        side=Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE if mismatch.by_majority else Confidence.UNKNOWN,
        state=IncidentState.OPEN,
        title=scrub(mismatch.description),
        first_us=at_us,
        detected_us=at_us,
        run_id=run_id,
        culprits=(*ranks, *(Entity(EntityKind.NODE, name) for name in nodes if is_certain)),
        culprit_how=how if ranks else None,
        evidence=(
            Evidence(role=Role.ROOT, text=scrub(mismatch.description), entity=here),
            *(() if is_certain else _location_evidence(mismatch)),
            Evidence(role=Role.SYMPTOM, text=_checkpoints_text(mismatch), entity=here),
        ),
        authority=2,
    )


def _location_evidence(mismatch: ReplicaMismatch) -> tuple[Evidence, ...]:
    """Return where each suspect is, where any of them may be wrong."""
    return tuple(
        Evidence(
            role=Role.SYMPTOM,
            text=f"rank {rank} is on {scrub(node)}",
            entity=Entity(EntityKind.NODE, node),
        )
        for rank, node in zip(mismatch.suspects, mismatch.nodes, strict=False)
    )


def _checkpoints_text(mismatch: ReplicaMismatch) -> str:
    """Say which checkpoints have it, so that nobody takes the newest for a good one."""
    owners = "all of these ranks"
    if mismatch.by_majority:
        suspects = ", ".join(map(str, mismatch.suspects))
        owners = (
            f"rank {suspects}"
            if len(mismatch.suspects) == 1
            else f"ranks {suspects or mismatch.ranks}"
        )
    good = "none before was compared"
    if mismatch.last_equal_step is not None:
        good = f"that of step {mismatch.last_equal_step} was equal on all of them"
    return (
        f"checkpoints from step {mismatch.step} on have it: the copies of {owners} are "
        f"suspect; {good}"
    )
