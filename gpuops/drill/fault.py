"""A fault, planned: what will be done to what, for how long, and how it is undone.

What every injector is made of: what there is, what is wanted, and a plan from the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.drill.find import Victim, find_agent
from gpuops.drill.run_state import AgentStateFile, choose_state
from gpuops.drill.steps import SendSignal, Step
from gpuops.errors import DrillError, UsageError
from gpuops.model import Entity, EntityKind


@dataclass(frozen=True, slots=True)
class UndoableStep:
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
    changes: tuple[UndoableStep, ...] = ()
    pulse: Pulse | None = None
    for_s: float | None = None
    run_id: str | None = None
    generation: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class InjectionResult:
    """What became of a fault: deeds that failed, and undoings that did."""

    failed: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()


def freeze(victims: tuple[Victim, ...]) -> tuple[UndoableStep, ...]:
    """Return the changes that stop *victims*, and let them go on again."""
    return tuple(
        UndoableStep(SendSignal(victim, "SIGSTOP"), SendSignal(victim, "SIGCONT"))
        for victim in victims
    )


def kill(victims: tuple[Victim, ...], name: str = "SIGKILL") -> tuple[UndoableStep, ...]:
    """Return the changes that send the signal *name* to *victims*."""
    return tuple(UndoableStep(SendSignal(victim, name)) for victim in victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillTarget:
    """What there is: what the agents of a run publish, and the machine.

    ``uid`` is the user whose run may be broken. ``root`` is where ``/sys``, ``/proc`` and ``/dev``
    are.
    """

    states: Sequence[AgentStateFile] = ()
    uid: int
    root: Path = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """What was asked for; each injector reads what it declares in its ``options``."""

    node: str | None = None
    rank: int | None = None
    for_s: float | None = None
    signal: str | None = None
    store: bool = False
    interface: str | None = None
    peers: tuple[str, ...] = ()
    delay_ms: float | None = None
    loss_percent: float | None = None
    rate_mbit: float | None = None
    directory: str | None = None
    size_bytes: int | None = None
    leave_bytes: int | None = None
    address: str | None = None
    xid: int | None = None
    count: int | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One injector. ``options`` are the fields of `Wanted` that it reads."""

    name: str
    summary: str
    options: tuple[str, ...]
    plan: Callable[[DrillTarget, DrillOptions], Fault]


def select_agent(
    target: DrillTarget, options: DrillOptions, *, rank: int | None = None
) -> tuple[AgentStateFile, Victim]:
    """Return the state file and the agent that are meant.

    Raises:
        DrillError: None is, several are, or the process is not the agent that the file tells of.
    """
    state = choose_state(target.states, node=options.node, rank=rank)
    if state.owner_uid != target.uid:
        raise DrillError(
            f"the run in {state.folder} belongs to user {state.owner_uid}, not to {target.uid}; "
            "break your own runs (root may name the owner with --owner)"
        )
    return state, find_agent(state, target.uid)


def required_rank(options: DrillOptions) -> int:
    """Return the rank that was named.

    Raises:
        UsageError: None was.
    """
    if options.rank is None:
        raise UsageError("which rank? name it with --rank")
    return options.rank


def node_entity(state: AgentStateFile) -> tuple[Entity, ...]:
    """Return the node of *state* as what a fault is about."""
    return (Entity(EntityKind.NODE, state.node),)


def rank_entity(rank: int) -> tuple[Entity, ...]:
    """Return *rank* as what a fault is about."""
    return (Entity(EntityKind.RANK, str(rank)),)


def format_seconds(value_s: float) -> str:
    """Return ``"5 s"``."""
    return f"{value_s:g} s"
