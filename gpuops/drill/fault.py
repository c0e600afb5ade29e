"""A planned fault: its steps, how long it lasts, and how it is undone.

Each injector makes a `Fault` from a `DrillTarget` and `DrillOptions`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuops.drill.find import AgentStateFile, Victim, choose_state, find_agent
from gpuops.drill.steps import SendSignal, Step
from gpuops.errors import DrillError, UsageError
from gpuops.model import Entity, EntityKind


@dataclass(frozen=True, slots=True)
class UndoableStep:
    """A step and the step that undoes it; either may be missing."""

    do: Step | None
    undo: Step | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """Stop and continue *victims* periodically."""

    victims: tuple[Victim, ...]
    stopped_s: float
    running_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planned fault: everything that is known before anything is changed.

    ``breaks`` and ``undone`` are sentences for the person who is asked for consent. ``for_s`` is
    how long it is held; None: it is done once and not undone. The decorator
    `scenario` sets the name.
    """

    breaks: str
    undone: str
    scenario: str = ""
    entities: tuple[Entity, ...] = ()
    changes: tuple[UndoableStep, ...] = ()
    pulse: Pulse | None = None
    for_s: float | None = None
    run_id: str | None = None
    generation: int | None = None
    seed: int | None = None

    def about(self, state: AgentStateFile, rank: int | None = None) -> "Fault":
        """Return this fault with *rank*, or the node, of the run of *state* as its entity."""
        node = Entity(EntityKind.NODE, state.node)
        return replace(
            self,
            entities=(node if rank is None else Entity(EntityKind.RANK, str(rank)),),
            run_id=state.run_id,
            generation=state.generation,
        )


@dataclass(frozen=True, slots=True)
class InjectionResult:
    """The steps that failed, and the undo steps that failed."""

    failed: tuple[str, ...] = ()
    not_undone: tuple[str, ...] = ()


def freeze(victims: tuple[Victim, ...]) -> tuple[UndoableStep, ...]:
    """Return the changes that stop *victims*, and continue them afterwards."""
    return tuple(
        UndoableStep(SendSignal(victim, "SIGSTOP"), SendSignal(victim, "SIGCONT"))
        for victim in victims
    )


def kill(victims: tuple[Victim, ...], name: str = "SIGKILL") -> tuple[UndoableStep, ...]:
    """Return the changes that send the signal *name* to *victims*."""
    return tuple(UndoableStep(SendSignal(victim, name)) for victim in victims)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillTarget:
    """The state files of a run's agents, and the machine to break.

    ``uid`` is the user whose run may be broken. ``root`` is where ``/sys``, ``/proc`` and ``/dev``
    are.
    """

    states: Sequence[AgentStateFile] = ()
    uid: int
    root: Path = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillOptions:
    """The options of the command; each injector reads those that it declares in ``options``."""

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


Plan = Callable[[DrillTarget, DrillOptions], Fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One injector. ``options`` are the fields of `DrillOptions` that it reads."""

    name: str
    summary: str
    options: tuple[str, ...]
    plan: Plan


def scenario(name: str, summary: str, *options: str) -> Callable[[Plan], Scenario]:
    """Return the decorator that makes a function the injector *name*, which reads *options*."""

    def of(plan: Plan) -> Scenario:
        def named(target: DrillTarget, chosen: DrillOptions) -> Fault:
            return replace(plan(target, chosen), scenario=name)

        return Scenario(name=name, summary=summary, options=options, plan=named)

    return of


def select_agent(
    target: DrillTarget, options: DrillOptions, *, rank: int | None = None
) -> tuple[AgentStateFile, Victim]:
    """Return the state file and the agent that *options* select.

    Raises:
        DrillError: None matches, several do, or the process is not the agent of the state file.
    """
    state = choose_state(target.states, node=options.node, rank=rank)
    if state.owner_uid != target.uid:
        raise DrillError(
            f"the run in {state.folder} belongs to user {state.owner_uid}, not to {target.uid}; "
            "break your own runs (root may name the owner with --owner)"
        )
    return state, find_agent(state, target.uid)


def required_rank(options: DrillOptions) -> int:
    """Return the rank in *options*.

    Raises:
        UsageError: There is none.
    """
    if options.rank is None:
        raise UsageError("which rank? name it with --rank")
    return options.rank


def format_seconds(value_s: float) -> str:
    """Return ``"5 s"``."""
    return f"{value_s:g} s"
