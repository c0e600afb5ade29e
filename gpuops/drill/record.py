"""Rehearsals as events, so that nobody takes one for an incident of its own making later."""

from collections.abc import Callable

from gpuops.drill.fault import Fault, Outcome
from gpuops.host.clock import Clock
from gpuops.model import Event, Json, Severity
from gpuops.store.new_event import new_event

INJECTED = "drill.injected"
ENDED = "drill.ended"


def to_json(fault: Fault) -> Json:
    """Return what is told of *fault*, in events and by the command."""
    return {
        "scenario": fault.scenario,
        "breaks": fault.breaks,
        "undone": fault.undone,
        "entities": [entity.to_json() for entity in fault.entities],
        "for_s": fault.for_s,
        "run": fault.run_id,
        "attempt": fault.generation,
        "seed": fault.seed,
    }


def injected(
    fault: Fault, *, node: str, uid: int, clock: Clock, randomness: Callable[[int], bytes]
) -> Event:
    """Return the event that says that *fault* is about to be injected by user *uid*."""
    return _event(INJECTED, fault, node, clock, randomness, {**to_json(fault), "uid": uid})


def ended(
    fault: Fault,
    outcome: Outcome,
    *,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes],
) -> Event:
    """Return the event that says what became of *fault*."""
    payload = {
        "scenario": fault.scenario,
        "failed": list(outcome.failed),
        "not_undone": list(outcome.not_undone),
    }
    return _event(ENDED, fault, node, clock, randomness, payload)


def _event(
    kind: str,
    fault: Fault,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes],
    payload: Json,
) -> Event:
    return new_event(
        kind,
        node=node,
        clock=clock,
        randomness=randomness,
        severity=Severity.WARNING,
        run_id=fault.run_id,
        attempt=fault.generation,
        payload=payload,
    )
