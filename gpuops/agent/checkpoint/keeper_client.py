"""The real keeper behind what the agent asks: its process, and the line to it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops.agent.checkpoint.api import FinalFlush, StartedKeeper
from gpuops.agent.checkpoint.keeper_protocols import KeeperPeer, KeeperProgressReader
from gpuops.agent.checkpoint.messages import STORED_MAX, StoredStates
from gpuops.checkpoint.agreement.replica_check import ReplicaReport
from gpuops.checkpoint.keeper.agent_client import AgentKeeperClient
from gpuops.checkpoint.keeper.connection import KeeperGoneError
from gpuops.checkpoint.keeper.process import KeeperProcess, start_or_adopt
from gpuops.checkpoint.storage.factory import open_store
from gpuops.checkpoint.transfer.parallel import KeeperAddress
from gpuops.checkpoint.types import CheckpointError, KeeperError, Shard, ShardCopy, StateId

log = logging.getLogger(__name__)

# Of what the keeper knows by heart; a restart of the workers waits for it.
ANSWER_S = 10.0
READY_S = 12.0
# What a keeper says where nobody has named a directory: there is nothing to wait for.
NOWHERE = "no directory for checkpoints is set"


class KeeperClient:
    """A keeper's process and the line to it; *job* names the run in what is persisted."""

    def __init__(self, link: AgentKeeperClient, process: KeeperProcess, job: str) -> None:
        self._link = link
        self._process = process
        self._job = job
        self._directory: str | None = None

    def begin_generation(self, generation: int, n_nodes: int, excluded_step: int | None) -> None:
        self._link.begin_generation(generation, n_nodes, excluded_step, job=self._job)

    def stats(self) -> Mapping[str, Any]:
        return self._link.stats()

    def events(self) -> Sequence[Mapping[str, Any]]:
        found = self._link.events()
        for item in found:
            if item.get("kind") == "persisted" and isinstance(item.get("directory"), str):
                self._directory = item["directory"]
        return found

    def flush(self, deadline_s: float) -> FinalFlush:
        done = self._link.flush(deadline_s)
        return FinalFlush(
            state=done.state,
            fitted=done.state is not None,
            has_place=done.why != NOWHERE,
            directory=self._directory,
            why=done.why or None,
        )

    def serve_peers(self, address: str, *, node: str, token: str, job: str, port: int = 0) -> int:
        return self._link.serve_peers(address, node=node, token=token, job=job, port=port)

    def inventory(self) -> Sequence[ShardCopy]:
        return self._link.inventory()

    def replicate(self, holders: Sequence[KeeperPeer], keep: Sequence[Shard]) -> None:
        self._link.replicate([KeeperAddress(*holder) for holder in holders], keep)

    def choose(
        self,
        state: StateId | None,
        epoch: int,
        sources: Mapping[Shard, Sequence[KeeperPeer]],
        why: Sequence[str],
        *,
        roots: Mapping[Shard, str],
    ) -> None:
        peers = {s: [KeeperAddress(*one) for one in of_shard] for s, of_shard in sources.items()}
        self._link.restore_from(state, epoch, peers, why, roots=roots)

    def take_over(self, epoch: int) -> None:
        self._link.take_over(epoch)

    def progress(self) -> KeeperProgressReader:
        found = self._link.progress()
        return KeeperProgressReader(
            whole=found.whole,
            replicated=found.replicated,
            refused=found.refused,
            parts=found.parts,
            newest=found.newest,
            persisted=found.persisted,
            in_flight=found.in_flight,
            asked=None if found.decided is None else found.decided.step,
            last=found.last,
            is_due=found.is_due,
            ballots=found.group_digests,
        )

    def aim(self, step: int) -> None:
        self._link.set_next_step(step)

    def commit(self, state: StateId) -> None:
        self._link.commit(state)

    def persist(self, state: StateId) -> bool:
        return _is_taken(lambda: self._link.commit(state, persist=True))

    def give_up(self, state: StateId) -> None:
        self._link.give_up(state)

    def differ(self, told: ReplicaReport) -> None:
        self._link.report_difference(told)

    def seal_persisted(self, state: StateId, world: int) -> bool:
        return _is_taken(lambda: self._link.seal_persisted(state, world))

    def end(self) -> None:
        self._link.shut_down()

    def close(self) -> None:
        self._link.close()
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
        link = AgentKeeperClient.connect(process.socket_path, deadline_s=answer_s)
    except KeeperError:
        process.kill()
        raise
    return StartedKeeper(
        tie=KeeperClient(link, process, job),
        socket=str(process.socket_path),
        pid=process.pid,
        adopted=process.is_adopted,
        ended=process.killed_why,
    )
