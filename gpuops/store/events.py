"""Create events dated now, also those of hooks and people about a node.

Only events written by root count for a node's history (`gpuops.store.ingest.projections.nodes`).
"""

import os
from collections.abc import Callable

from gpuops.host.clock import Clock
from gpuops.model import Entity, Event, FailureClass, Json, Severity, uuid7


def new_event(  # noqa: PLR0913 all but one are keywords
    kind: str,
    *,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes] = os.urandom,
    severity: Severity = Severity.INFO,
    run_id: str | None = None,
    attempt: int | None = None,
    payload: Json | None = None,
) -> Event:
    """Return an event dated now, with a sortable unique id."""
    now_us = clock.now_us()
    return Event(
        id=uuid7(now_us, randomness(10)),
        kind=kind,
        t_us=now_us,
        node=node,
        severity=severity,
        run_id=run_id,
        attempt=attempt,
        payload=payload or {},
    )


def lost_events_event(
    what: str,
    error: str,
    count: int,
    *,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes] = os.urandom,
) -> Event:
    """Return the event that reports that *count* events are lost, and why.

    Args:
        what: The part that lost them (``spool``, ``recorder``).
        error: One sentence for people.
        count: How many.
        node: This node.
        clock: Dates it.
        randomness: Makes its id.
    """
    return new_event(
        "tool.failed",
        node=node,
        clock=clock,
        randomness=randomness,
        severity=Severity.WARNING,
        payload={"what": what, "error": error, "traceback": None, "dropped": count},
    )


UNCHANGED = "check.unchanged"
DRAINED = "node.drained"
RESUMED = "node.resumed"
REPAIRED = "node.repaired"
MEASURED = "burnin.measured"
PAIR_TESTED = "sweep.tested"
SWEEP_ENDED = "sweep.ended"
# The actor of what a person did with Slurm's own commands; after a blank the user, if known.
ADMINISTRATOR = "administrator"


def drained_event(  # noqa: PLR0913 all but two are keywords
    node: str,
    reason: str,
    *,
    clock: Clock,
    actor: str = "gpuops",
    check: str | None = None,
    failure_class: FailureClass | None = None,
    job_id: str | None = None,
    randomness: Callable[[int], bytes] = os.urandom,
) -> Event:
    """Return the event that *actor* drained *node* for *reason*, which *check* found."""
    return new_event(
        DRAINED,
        node=node,
        clock=clock,
        randomness=randomness,
        severity=Severity.ERROR,
        payload={
            "reason": reason,
            "actor": actor,
            "check": check,
            "failure_class": failure_class and failure_class.value,
            "job_id": job_id,
        },
    )


def resumed_event(
    node: str,
    reason: str,
    *,
    clock: Clock,
    actor: str = "gpuops",
    randomness: Callable[[int], bytes] = os.urandom,
) -> Event:
    """Return the event that *actor* took *node* back into service, and why."""
    return new_event(
        RESUMED,
        node=node,
        clock=clock,
        randomness=randomness,
        severity=Severity.WARNING,
        payload={"reason": reason, "actor": actor},
    )


def repaired_event(
    node: str,
    entity: Entity,
    *,
    by: str,
    what: str,
    clock: Clock,
    randomness: Callable[[int], bytes] = os.urandom,
) -> Event:
    """Return the event that *by* repaired *entity* of *node*, and *what* was done."""
    return new_event(
        REPAIRED,
        node=node,
        clock=clock,
        randomness=randomness,
        severity=Severity.WARNING,
        payload={"entity": entity.to_json(), "by": by, "what": what},
    )
