"""The interface between an agent and its checkpoints, and the results that it returns."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.types import StateId
from gpuops.control.record import Roster
from gpuops.control.threads import HOLD_S
from gpuops.model import Json
from gpuops.units import format_seconds

KEEPER, DIRECTORY = "GPUOPS_KEEPER", "GPUOPS_CKPT_DIR"
# Set where the keeper has a state: workers map it while they import torch.
HAS_STATE = "GPUOPS_HAS_STATE"
Refusal = Callable[[int | None, Callable[[float], object]], str | None]
AWAIT_POLL_S = 0.1
OFF = ""  # set even so: a worker must not use a keeper from an inherited environment


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalFlush:
    """The result of a flush. ``state`` is the newest in ``directory`` now, None where none is.

    ``fitted``: the newest committed state is persistent; otherwise ``why`` gives the reason.
    ``has_place`` False: no directory was configured. ``is_end``: the run has ended without a
    failure or a signal, so that no incident reports this.
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

    def to_json(self) -> Json:
        """Return the payload of ``checkpoint.flushed``."""
        return {
            "fitted": self.fitted,
            "has_place": self.has_place,
            "step": None if self.state is None else self.state.step,
            "newest_step": None if self.newest is None else self.newest.step,
            "seconds": self.seconds,
            "within_s": self.within_s,
            "directory": self.directory,
            "why": self.why,
        }

    def to_text(self) -> str:
        """Return it as one sentence."""
        place = "" if self.directory is None else f" in {self.directory}"
        time = f"{format_seconds(self.seconds)} of {format_seconds(self.within_s)}"
        step = "" if self.state is None else f" of step {self.state.step}"
        if self.fitted:
            return f"the checkpoint{step} persisted{place} ({time})"
        newest = "" if self.newest is None else f" of step {self.newest.step}"
        if not self.has_place:
            return f"the checkpoint{newest} was in memory only: name a directory with --ckpt-dir"
        left = f"that{step}" if step else "nothing of this run"
        why = self.why or "there was no time left"
        return (
            f"the newest checkpoint{newest} did not persist ({time}): {why}; {left} is there{place}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedKeeper:
    """A keeper that answers. ``adopted``: it was started by an agent that has been killed.

    ``ended``: how a previous keeper hung, which was therefore ended; "" where none did.
    """

    client: KeeperClient
    socket: str
    pid: int | None = None
    adopted: bool = False
    ended: str = ""


class CheckpointService:
    """What the agent calls; no method raises. This base class keeps nothing in memory."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory

    def env(self) -> Mapping[str, str]:
        """Return the environment variables for the workers of the next generation."""
        return {KEEPER: OFF, **directory_env(self._directory)}

    def inventory(self) -> Json | None:
        """Return the inventory that this node sends when it joins, None without a keeper."""
        return None

    def begin(
        self, generation: int, n_nodes: int, excluded_step: int | None, roster: Roster | None = None
    ) -> None:
        """Prepare for the workers of a generation, which start next; *roster* has their ranks."""

    def refusal(self, pause: Callable[[float], object]) -> str | None:  # noqa: ARG002 no directory
        """Return why another job holds the lock of the directory, None where none does.

        To be called after `begin`. *pause* is called while that job may still release it.
        """
        return None

    def node_status(self) -> Json | None:
        """Return this node's status for a heartbeat, None where no script saves; never waits."""
        return None

    def exchange_s(self) -> float:
        """Return the seconds between two such heartbeats; never waits."""
        return HOLD_S

    def settle(self, within_s: float) -> None:
        """Wait until the last saved state is committed and persistent on all nodes.

        Returns at once in a run of one node.
        """

    def poll(self) -> None:
        """Poll the keeper; takes less than a second."""

    def state(self) -> CheckpointState | None:
        """Return the state of the checkpoints, None without a keeper; any thread, never waits."""
        return None

    def flush(self, within_s: float) -> FinalFlush | None:  # noqa: ARG002 nothing is written
        """Persist the newest state within *within_s*; None where there is nothing to persist."""
        return None

    def end(self, save_s: float) -> None:
        """Persist the newest state within *save_s* (0: skip this), then end the keeper."""

    def leave(self) -> None:
        """Release the keeper, which waits for the next agent of this job."""


def directory_env(directory: str | None) -> dict[str, str]:
    """Return the environment variable with the persistent directory, if there is one."""
    return {} if directory is None else {DIRECTORY: directory}


def awaited(act: Callable[[], object], waiting: Callable[[], None]) -> None:
    """Run *act*, which is bounded in time, in a thread; call *waiting* until it has finished.

    An exception of *waiting* ends the wait, not *act*: the keeper continues on its own.
    """
    acting = threading.Thread(target=act, name="gpuops-last-save", daemon=True)
    acting.start()
    acting.join(AWAIT_POLL_S)
    while acting.is_alive():
        waiting()
        acting.join(AWAIT_POLL_S)
