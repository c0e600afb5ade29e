"""What an agent asks of what keeps its checkpoints, and what that asks of a keeper."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.types import StateId
from gpuops.control.record import Roster
from gpuops.model import Json

KEEPER, DIRECTORY = "GPUOPS_KEEPER", "GPUOPS_CKPT_DIR"
Refusal = Callable[[int | None, Callable[[float], object]], str | None]
OFF = ""  # a worker must not take one of somebody else's environment either


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalFlush:
    """What a flush came to. ``state`` is what lies in ``directory`` now, None where nothing does.

    ``fitted``: the newest state that was committed is there; else ``why`` says what kept it.
    ``has_place`` False: no directory was ever named, by nobody. ``is_end``: the run had ended, and
    not because of a failure or a signal, whose incident would say it.
    """

    state: StateId | None = None
    newest: StateId | None = None
    fitted: bool = False
    has_place: bool = True
    is_end: bool = False
    seconds: float = 0.0
    within_s: float = 0.0
    directory: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedKeeper:
    """A keeper that answers. ``adopted``: the one of an agent that was killed.

    ``ended``: how one before it hung that was ended for that, "" where there was none.
    """

    client: KeeperClient
    socket: str
    pid: int | None = None
    adopted: bool = False
    ended: str = ""


class CheckpointService:
    """What the other parts of an agent ask; none of it raises. This one keeps nothing in memory."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory

    def env(self) -> Mapping[str, str]:
        """Return what the workers of the next generation find in their environment."""
        return {KEEPER: OFF, **place_of(self._directory)}

    def holding(self) -> Json | None:
        """Return what this node sends when it joins, None where it keeps nothing."""
        return None

    def begin(
        self,
        generation: int,
        n_nodes: int,
        excluded_step: int | None,
        roster: Roster | None = None,
    ) -> None:
        """Prepare for the workers of a generation, which start next; *roster* has their ranks."""

    def refusal(self, pause: Callable[[float], object]) -> str | None:  # noqa: ARG002 nobody is asked
        """Return why another job keeps this one from its directory, None where none does.

        Ask once `begin` has been called. *pause* is called while that one may still leave.
        """
        return None

    def said(self) -> Json | None:
        """Return what goes with a heartbeat, None where no script saves; never waits."""
        return None

    def settle(self, within_s: float) -> None:
        """Wait until what was saved last is committed, and persistent, on all nodes.

        For as long as there are other nodes; a node alone has nothing to wait for.
        """

    def look(self) -> None:
        """Take in what there is to hear; waits for less than a second."""

    def state(self) -> CheckpointState | None:
        """Return what is held, None where nothing is kept; from any thread, never waits."""
        return None

    def flush(self, within_s: float) -> FinalFlush | None:  # noqa: ARG002 nothing is written
        """Persist the newest state within *within_s*; None where there is nothing to persist."""
        return None

    def end(self, save_s: float) -> None:
        """End the keeper; what is newest is persisted before, within *save_s* (0: at once)."""

    def leave(self) -> None:
        """Let go of the keeper, which waits for the next agent of this job."""


def place_of(directory: str | None) -> dict[str, str]:
    """Return the environment that names where states persist."""
    return {} if directory is None else {DIRECTORY: directory}
