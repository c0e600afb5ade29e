"""Start the keeper of an agent, and read what a directory of checkpoints has."""

from pathlib import Path

from gpuops.agent.checkpoint.api import StartedKeeper
from gpuops.agent.checkpoint.messages import STORED_MAX, StoredStates
from gpuops.checkpoint.keeper.agent_client import KeeperClient, open_agent_connection
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.types import CheckpointError, KeeperError

# Of what the keeper knows by heart; a restart of the workers waits for it.
ANSWER_S = 10.0
READY_S = 12.0


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
        client=KeeperClient(connection, job, on_close=process.is_running),  # which reaps it
        socket=str(process.socket_path),
        pid=process.pid,
        adopted=process.is_adopted,
        ended=process.killed_why,
    )
