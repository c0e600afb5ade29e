"""Events of now, for whoever records them."""

import os
from collections.abc import Callable

from gpuops.host.clock import Clock
from gpuops.model import Event, Json, Severity, uuid7


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
    """Return an event of now, with a sortable id of its own."""
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


def dropped_event(
    what: str,
    error: str,
    count: int,
    *,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes] = os.urandom,
) -> Event:
    """Return the event that says that *count* events are lost, and why: nothing is lost in silence.

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
