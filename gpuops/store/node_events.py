"""What hooks and people do to a node, as events: drained, resumed, repaired.

Only root's count for a node's history (`gpuops.store.facts.node`).
"""

import os
from collections.abc import Callable

from gpuops.host.clock import Clock
from gpuops.model import Entity, Event, FailureClass, Severity
from gpuops.store.new_event import new_event

DRAINED = "node.drained"
RESUMED = "node.resumed"
REPAIRED = "node.repaired"


def drained(  # noqa: PLR0913 all but two are keywords
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


def resumed(
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


def repaired(
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
