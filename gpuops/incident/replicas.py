"""Ranks whose copies of the training state differ where they must be equal, as an incident."""

from dataclasses import dataclass

from gpuops.incident.identity import replicas_incident_id
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

NAMED_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingReplicas:
    """What was found, *words* in a sentence; ``ranks`` are all that must be equal: ``0-2, 5``.

    ``suspects`` may be wrong: outvoted ``by_majority``, else nobody knows which of them.
    ``is_here``: all of them are on the node that tells; ``nodes`` has that of each, where it is
    known. ``alike_step``: of the last state that was compared before and equal.
    """

    words: str
    step: int
    epoch: int
    ranks: str
    suspects: tuple[int, ...]
    by_majority: bool
    is_here: bool
    alike_step: int | None = None
    tensors: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def incident_from_replicas(
    found: DifferingReplicas, *, run_id: str, node: str, at_us: int
) -> Incident:
    """Return the open incident of *found*, as *node* tells it.

    The cause may be a device, memory, or a program that is not deterministic: nothing follows from
    it by itself, and it ends no attempt. A node is named where a fault of hardware must be on it;
    where it may be on one of several, the evidence has them.
    """
    here = Entity(EntityKind.NODE, node)
    ranks = tuple(Entity(EntityKind.RANK, str(rank)) for rank in found.suspects)
    nodes = tuple(dict.fromkeys(found.nodes)) or ((node,) if found.is_here else ())
    is_certain = found.by_majority or len(nodes) == 1
    how = "outvoted by the other replicas" if found.by_majority else "one of them may be wrong"
    return Incident(
        id=replicas_incident_id(run_id, found.ranks, found.epoch, found.step),
        failure_class=FailureClass.REPLICAS_DIFFER,
        side=Side.AMBIGUOUS,
        confidence=Confidence.PROBABLE if found.by_majority else Confidence.UNKNOWN,
        state=IncidentState.OPEN,
        title=scrub(found.words),
        first_us=at_us,
        detected_us=at_us,
        run_id=run_id,
        culprits=(*ranks, *(Entity(EntityKind.NODE, name) for name in nodes if is_certain)),
        culprit_how=how if ranks else None,
        evidence=(
            Evidence(role=Role.ROOT, text=scrub(found.words), entity=here),
            *(() if is_certain else _places(found)),
            Evidence(role=Role.SYMPTOM, text=_of_states(found), entity=here),
        ),
        authority=2,
    )


def _places(found: DifferingReplicas) -> tuple[Evidence, ...]:
    """Return where each suspect is, where any of them may be wrong."""
    return tuple(
        Evidence(
            role=Role.SYMPTOM,
            text=f"rank {rank} is on {scrub(node)}",
            entity=Entity(EntityKind.NODE, node),
        )
        for rank, node in zip(found.suspects, found.nodes, strict=False)
    )


def _of_states(found: DifferingReplicas) -> str:
    """Say which checkpoints have it, so that nobody takes the newest for a good one."""
    whose = "all of these ranks"
    if found.by_majority:
        named = ", ".join(map(str, found.suspects))
        whose = f"rank {named}" if len(found.suspects) == 1 else f"ranks {named or found.ranks}"
    good = "none before was compared"
    if found.alike_step is not None:
        good = f"that of step {found.alike_step} was equal on all of them"
    return (
        f"checkpoints from step {found.step} on have it: the copies of {whose} are suspect; {good}"
    )
