"""A fault, planned: what will be done to what, for how long, and how it is undone."""

from dataclasses import dataclass

from gpuops.drill.steps import SendSignal, Step
from gpuops.drill.victims import Victim
from gpuops.model import Entity


@dataclass(frozen=True, slots=True)
class Change:
    """One deed and its undoing, each where there is one."""

    do: Step | None
    undo: Step | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """Stop *victims* for a while and let them run for a while, again and again."""

    victims: tuple[Victim, ...]
    stopped_s: float
    running_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Everything that is known before anything is touched.

    ``breaks`` and ``undone`` are sentences for the person who is asked for consent. ``for_s`` is
    how long it is held; None: it is done once, and nothing in it is undone.
    """

    scenario: str
    breaks: str
    undone: str
    entities: tuple[Entity, ...] = ()
    changes: tuple[Change, ...] = ()
    pulse: Pulse | None = None
    for_s: float | None = None
    run_id: str | None = None
    generation: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault: deeds that failed, and undoings that did."""

    failed: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()


def freeze(victims: tuple[Victim, ...]) -> tuple[Change, ...]:
    """Return the changes that stop *victims*, and let them go on again."""
    return tuple(
        Change(SendSignal(victim, "SIGSTOP"), SendSignal(victim, "SIGCONT")) for victim in victims
    )


def strike(victims: tuple[Victim, ...], name: str = "SIGKILL") -> tuple[Change, ...]:
    """Return the changes that send the signal *name* to *victims*."""
    return tuple(Change(SendSignal(victim, name)) for victim in victims)
