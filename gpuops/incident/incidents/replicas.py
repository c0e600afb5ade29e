"""Incidents of ranks whose replicas of the training state differ."""

from dataclasses import dataclass

from gpuops.incident.lifecycle import about_replicas
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
    run_incident_id,
)
from gpuops.scrub import scrub

NAMED_RANKS_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMismatch:
    """The difference, *description* in a sentence; ``ranks``: all that must be equal, ``0-2, 5``.

    ``suspects`` may be corrupt: outvoted ``by_majority``, else it is unknown which of them.
    ``is_local``: all of them are on the reporting node; ``nodes`` has the node of each, if known.
    ``last_equal_step``: of the last state before that was compared and equal.
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

    The cause may be a device, memory, or a program that is not deterministic: it has no consequence
    by itself, and ends no attempt. A node is a culprit if a hardware fault must be on it; if it may
    be on one of several, the evidence names them.
    """
    here = Entity(EntityKind.NODE, node)
    ranks = tuple(Entity(EntityKind.RANK, str(rank)) for rank in mismatch.suspects)
    nodes = tuple(dict.fromkeys(mismatch.nodes)) or ((node,) if mismatch.is_local else ())
    is_certain = mismatch.by_majority or len(nodes) == 1
    how = "outvoted by the other replicas" if mismatch.by_majority else "one of them may be wrong"
    about = about_replicas(mismatch.ranks, mismatch.epoch, mismatch.step)
    return Incident(
        id=run_incident_id(run_id, about),
        about=about,
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
    """Return the node of each suspect."""
    return tuple(
        Evidence(
            role=Role.SYMPTOM,
            text=f"rank {rank} is on {scrub(node)}",
            entity=Entity(EntityKind.NODE, node),
        )
        for rank, node in zip(mismatch.suspects, mismatch.nodes, strict=False)
    )


def _checkpoints_text(mismatch: ReplicaMismatch) -> str:
    """Return which checkpoints are affected, so that the newest is not mistaken for a good one."""
    owners = "all of these ranks"
    if mismatch.by_majority:
        suspects = ", ".join(map(str, mismatch.suspects))
        owners = (
            f"rank {suspects}"
            if len(mismatch.suspects) == 1
            else f"ranks {suspects or mismatch.ranks}"
        )
    good = "no earlier one was compared"
    if mismatch.last_equal_step is not None:
        good = f"that of step {mismatch.last_equal_step} was equal on all of them"
    return (
        f"checkpoints from step {mismatch.step} on are affected: the copies of {owners} are "
        f"suspect; {good}"
    )
