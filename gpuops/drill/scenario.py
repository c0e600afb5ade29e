"""What every injector is made of: what there is, what is wanted, and a plan from the two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.drill.fault import Fault
from gpuops.drill.published import Published, choose
from gpuops.drill.victims import Victim, agent_of
from gpuops.errors import DrillError, UsageError
from gpuops.model import Entity, EntityKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is: what the agents of a run publish, and the machine.

    ``uid`` is the user whose run may be broken. ``root`` is where ``/sys``, ``/proc`` and ``/dev``
    are.
    """

    states: Sequence[Published] = ()
    uid: int
    root: Path = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
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
    plan: Callable[[Scene, Wanted], Fault]


def aim(scene: Scene, wanted: Wanted, *, rank: int | None = None) -> tuple[Published, Victim]:
    """Return the state file and the agent that are meant.

    Raises:
        DrillError: None is, several are, or the process is not the agent that the file tells of.
    """
    state = choose(scene.states, node=wanted.node, rank=rank)
    if state.owner_uid != scene.uid:
        raise DrillError(
            f"the run in {state.folder} belongs to user {state.owner_uid}, not to {scene.uid}; "
            "break your own runs (root may name the owner with --owner)"
        )
    return state, agent_of(state, scene.uid)


def needed_rank(wanted: Wanted) -> int:
    """Return the rank that was named.

    Raises:
        UsageError: None was.
    """
    if wanted.rank is None:
        raise UsageError("which rank? name it with --rank")
    return wanted.rank


def node_entity(state: Published) -> tuple[Entity, ...]:
    """Return the node of *state* as what a fault is about."""
    return (Entity(EntityKind.NODE, state.node),)


def rank_entity(rank: int) -> tuple[Entity, ...]:
    """Return *rank* as what a fault is about."""
    return (Entity(EntityKind.RANK, str(rank)),)


def seconds(value_s: float) -> str:
    """Return ``"5 s"``."""
    return f"{value_s:g} s"
