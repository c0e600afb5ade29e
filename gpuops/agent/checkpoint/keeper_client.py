"""The keeper of an agent: its process, and the connection to it."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpuops.agent.checkpoint.api import FinalFlush, StartedKeeper
from gpuops.agent.checkpoint.messages import STORED_MAX, StoredStates
from gpuops.checkpoint.keeper.agent_client import AgentKeeperClient, open_agent_connection
from gpuops.checkpoint.keeper.connection import KeeperConnection, KeeperGoneError
from gpuops.checkpoint.keeper.process import KeeperProcess, start_or_adopt
from gpuops.checkpoint.storage.factory import open_store
from gpuops.checkpoint.types import CheckpointError, KeeperError, StateId

log = logging.getLogger(__name__)

# Of what the keeper knows by heart; a restart of the workers waits for it.
ANSWER_S = 10.0
READY_S = 12.0
# What a keeper says where nobody has named a directory: there is nothing to wait for.
NOWHERE = "no directory for checkpoints is set"


class KeeperClient(AgentKeeperClient):
    """The keeper of an agent; *job* names the run in what is persisted."""

    def __init__(self, connection: KeeperConnection, process: KeeperProcess, job: str) -> None:
        super().__init__(connection)
        self._process = process
        self._job = job
        self._directory: str | None = None

    def begin_generation(
        self, generation: int, n_nodes: int, excluded_step: int | None, *, job: str = ""
    ) -> None:
        super().begin_generation(generation, n_nodes, excluded_step, job=job or self._job)

    def events(self) -> list[Mapping[str, Any]]:
        found = super().events()
        for item in found:
            if item.get("kind") == "persisted" and isinstance(item.get("directory"), str):
                self._directory = item["directory"]
        return found

    def flush_newest(self, deadline_s: float) -> FinalFlush:
        """Persist the newest committed state within *deadline_s*; ``state`` is that, or None."""
        done = self.flush(deadline_s)
        return FinalFlush(
            state=done.state,
            fitted=done.state is not None,
            has_place=done.why != NOWHERE,
            directory=self._directory,
            why=done.why or None,
        )

    def try_persist(self, state: StateId) -> bool:
        """Commit *state*, and begin to write this node's shards; False: not just now."""
        return _is_taken(lambda: self.commit(state, persist=True))

    def try_seal(self, state: StateId, world: int) -> bool:
        """Write the manifest of a state whose shards are all written; False: not just now."""
        return _is_taken(lambda: self.seal_persisted(state, world))

    def close(self) -> None:
        super().close()
        self._process.is_running()  # reaps it where it has ended


def survey(directory: str) -> StoredStates:
    """Return which states *directory* has whole, the newest first.

    Raises:
        CheckpointError: It cannot be read, or all that it has is damaged.
    """
    found = open_store(directory).scan()
    if found.damaged and not found.states:
        first = found.damaged[0]
        raise CheckpointError(f"{first.name} {first.condition}: {first.why}")
    newest = sorted(((one.state, one.manifest.world) for one in found.states), reverse=True)
    epochs = [state.epoch for state, _world in newest]
    return StoredStates(tuple(newest[:STORED_MAX]), max(epochs, default=-1))


def _is_taken(ask: Callable[[], object]) -> bool:
    """Say whether the keeper takes what it is asked; one that is gone raises."""
    try:
        ask()
    except KeeperGoneError:
        raise
    except KeeperError as exc:
        log.debug("the keeper of the checkpoints refuses just now: %s", exc)
        return False
    return True


def start_keeper(
    folder: Path, *, lease_s: float, node: str, job: str, answer_s: float = ANSWER_S
) -> StartedKeeper:
    """Return the keeper in *folder*, started where none is there; it answers within *answer_s*.

    One that hangs is ended: nobody could have its memory, and no other could begin.

    Raises:
        KeeperError: It could not be started.
    """
    process = start_or_adopt(folder, lease_s=lease_s, node=node, ready_s=READY_S)
    try:
        connection = open_agent_connection(process.socket_path, deadline_s=answer_s)
    except KeeperError:
        process.kill()
        raise
    return StartedKeeper(
        client=KeeperClient(connection, process, job),
        socket=str(process.socket_path),
        pid=process.pid,
        adopted=process.is_adopted,
        ended=process.killed_why,
    )
