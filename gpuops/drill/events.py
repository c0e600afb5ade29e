"""Rehearsals as events, so that nobody takes one for an incident of its own making later."""

from collections.abc import Callable

from gpuops.drill.fault import Fault, InjectionResult
from gpuops.host.clock import Clock
from gpuops.model import Event, Json, Severity
from gpuops.store.events import new_event

INJECTED_KIND = "drill.injected"
ENDED_KIND = "drill.ended"


def fault_to_json(fault: Fault) -> Json:
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


def injected_event(
    fault: Fault, *, node: str, uid: int, clock: Clock, randomness: Callable[[int], bytes]
) -> Event:
    """Return the event that says that *fault* is about to be injected by user *uid*."""
    return _event(
        INJECTED_KIND, fault, node, clock, randomness, {**fault_to_json(fault), "uid": uid}
    )


def ended_event(
    fault: Fault,
    result: InjectionResult,
    *,
    node: str,
    clock: Clock,
    randomness: Callable[[int], bytes],
) -> Event:
    """Return the event that says what became of *fault*."""
    payload = {
        "scenario": fault.scenario,
        "failed": list(result.failed),
        "not_undone": list(result.not_undone),
    }
    return _event(ENDED_KIND, fault, node, clock, randomness, payload)


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
