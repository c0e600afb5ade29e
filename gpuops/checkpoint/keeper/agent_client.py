"""The agent's line to the keeper of its node."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops.checkpoint.agreement.replica_check import ReplicaReport, replica_report_to_json
from gpuops.checkpoint.keeper.connection import DEADLINE_S, SLACK_S, KeeperConnection
from gpuops.checkpoint.keeper.messages import (
    WHY_MAX,
    Done,
    EventsPage,
    FlushResult,
    HandOver,
    HelloReply,
    InventoryPage,
    KeeperStatus,
    holder_pages,
)
from gpuops.checkpoint.types import (
    WHY_CHARS_MAX,
    KeeperAddress,
    KeeperError,
    Shard,
    ShardCopy,
    StateId,
)

log = logging.getLogger(__name__)

_EVENTS_MAX = 2000
_COPIES_MAX = 100_000


def open_agent_connection(socket_path: Path, *, deadline_s: float = DEADLINE_S) -> KeeperConnection:
    """Return the connection of the one agent of the keeper at *socket_path*.

    Raises:
        KeeperError: There is no keeper, or it has an agent.
    """
    connection = KeeperConnection(socket_path, deadline_s=deadline_s)
    try:
        connection.call(HelloReply, "hello", role="agent")
    except BaseException:  # boundary: the connection is closed, the error goes on
        connection.close()
        raise
    return connection


class KeeperClient:
    """The agent's side of its keeper; *job* names the run in what is persisted.

    A keeper has one agent at a time; a lost one may be followed by another within the lease.

    Safe from several threads, which take turns. All calls raise `KeeperError` where the keeper is
    gone, does not answer within the deadline, or refuses.
    """

    def __init__(
        self,
        connection: KeeperConnection,
        job: str = "",
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._connection = connection
        self._job = job
        self._on_close = on_close
        self._restore_lock = threading.Lock()

    @classmethod
    def connect(cls, socket_path: Path, *, deadline_s: float = DEADLINE_S) -> "KeeperClient":
        """Return the client of the keeper at *socket_path*; see `open_agent_connection`."""
        return cls(open_agent_connection(socket_path, deadline_s=deadline_s))

    def begin_generation(
        self, generation: int, n_nodes: int, excluded_step: int | None, *, job: str = ""
    ) -> None:
        """Cut off the workers before, and let only those of *generation* in.

        *excluded_step* is offered to none of them. *job* has to be the same on all nodes.
        """
        self._connection.call(
            Done,
            "begin_generation",
            generation=generation,
            n_nodes=n_nodes,
            excluded_step=excluded_step,
            job=job or self._job,
        )

    def serve_peers(self, address: str, *, node: str, token: str, job: str, port: int = 0) -> int:
        """Have the keeper listen at *address* for those of other nodes; return the port.

        *node* becomes the holder's name in inventories; whoever does not know *token*, or is of
        another *job*, is turned away. Once an agent's life; to ask again changes nothing. *port*:
        where they look for it already, because the keeper before this one listened there; 0: any.
        """
        return self._connection.call(
            int, "serve_peers", address=address, node=node, token=token, job=job, port=port
        )

    def replicate(
        self,
        holders: Sequence[KeeperAddress],
        keep: Sequence[Shard] = (),
        *,
        bytes_per_s: float | None = None,
    ) -> None:
        """Push every state that is whole here to *holders* from now on; none: to nobody.

        *keep*: which shards of other nodes may be pushed here. What is held of others stays until a
        state is committed after this. *bytes_per_s*: no faster, all pushes together.
        """
        self._connection.call(
            Done, "replicate", holders=holders, keep=keep, bytes_per_s=bytes_per_s
        )

    def restore_from(
        self,
        state: StateId | None,
        epoch: int,
        sources: Mapping[Shard, Sequence[KeeperAddress]] | None = None,
        why: Sequence[str] = (),
        *,
        roots: Mapping[Shard, str] | None = None,
    ) -> None:
        """Have all ranks go on from *state* (None: from the start); new states are of *epoch*.

        With several nodes the ranks wait for this; with one it is not needed. *sources*: who holds
        the shards that this node needs, in the order in which they are to be asked; what is not
        right in this node's memory is fetched there, the directory is last. *roots*: of the digests
        that were agreed upon. *why*: what spoke against newer states. Returns at once.
        """
        texts = [text[:WHY_CHARS_MAX] for text in why[:WHY_MAX]]
        n_sources = len(sources or {})
        with self._restore_lock:
            for page in holder_pages(sources or {}, roots or {}):
                self._connection.call(Done, "sources", **page)
            self._connection.call(
                Done, "choose", state=state, epoch=epoch, n_sources=n_sources, why=texts
            )

    def take_over(self, epoch: int) -> None:
        """Let ranks that run already save states of *epoch*; after `begin_generation`.

        For a keeper in place of one that died: what that held is gone, and to ranks that have
        loaded theirs it is of no matter. A rank that still asks what to load is refused.
        """
        self._connection.call(Done, "take_over", epoch=epoch)

    def status(self) -> KeeperStatus:
        """Return how far this node is; cheap enough for once a second."""
        return self._connection.call(KeeperStatus, "status")

    def seal_persisted(self, state: StateId, world: int) -> None:
        """Make *state* appear in the shared directory: all nodes have written their parts.

        Returns at once; `Progress.persisted` and an event say what came of it.
        """
        self._connection.call(Done, "seal_persisted", state=state, world=world)

    def report_difference(self, report: ReplicaReport) -> None:
        """Have the keeper tell of ranks of several nodes, some of them here, that differ."""
        self._connection.call(Done, "differ", report=replica_report_to_json(report))

    def commit(self, state: StateId, *, persist: bool = False) -> bool:
        """Commit a state that is whole on all nodes; return whether it was new here.

        *persist*: and begin to persist this node's shards of it.
        """
        return self._connection.call(bool, "commit", state=state, persist=persist)

    def try_persist(self, state: StateId) -> bool:
        """Commit *state*, and begin to write this node's shards; False: not just now."""
        return self._is_taken(lambda: self.commit(state, persist=True))

    def try_seal(self, state: StateId, world: int) -> bool:
        """Write the manifest of a state whose shards are all written; False: not just now."""
        return self._is_taken(lambda: self.seal_persisted(state, world))

    def _is_taken(self, ask: Callable[[], object]) -> bool:
        try:
            ask()
        except KeeperError as exc:
            if not self._connection.is_open:
                raise
            log.debug("the keeper of the checkpoints refuses just now: %s", exc)
            return False
        return True

    def set_next_step(self, step: int) -> None:
        """Save nothing before *step*, the first that all nodes can save together."""
        self._connection.call(Done, "aim", step=step)

    def give_up(self, state: StateId) -> None:
        """Let go of a state that will not be whole on all nodes, so that others may be saved."""
        self._connection.call(Done, "give_up", state=state)

    def flush(self, deadline_s: float) -> FlushResult:
        """Persist the newest committed state, where it is not; returns within *deadline_s*."""
        wait_s = deadline_s + SLACK_S
        try:
            return self._connection.call(FlushResult, "flush", wait_s=wait_s, deadline_s=deadline_s)
        except KeeperError as exc:
            if not self._connection.is_open:
                raise
            return FlushResult(None, why=str(exc))

    def inventory(self) -> list[ShardCopy]:
        """Return the copies in memory, also those held for others, with the roots of their digests.

        The newest state is first.
        """
        found: list[ShardCopy] = []
        while len(found) < _COPIES_MAX:
            page = self._connection.call(InventoryPage, "inventory", after=len(found))
            found += page.copies
            if page.is_all or not page.copies:
                break
        return found

    def stats(self) -> Mapping[str, Any]:
        """Return counts by name, as `Keeper.stats` does."""
        return self._connection.call(dict, "stats")

    def events(self) -> list[Mapping[str, Any]]:
        """Return what happened since the last call, the oldest first, each with a ``kind``."""
        found: list[Mapping[str, Any]] = []
        while len(found) < _EVENTS_MAX:
            page = self._connection.call(EventsPage, "events")
            found += page.events
            if page.is_all:
                break
        return found

    def hand_over(self, *, is_over: bool) -> tuple[int, bool]:
        """Let the last rank look after the keeper, where any is at work still.

        Return how many are, and whether the keeper ends: none is, and it *is_over*.
        """
        left = self._connection.call(HandOver, "leave", is_over=is_over)
        return left.ranks, left.is_ending

    def shut_down(self) -> None:
        """End the keeper; what only memory holds is gone."""
        self._connection.call(Done, "end")

    def close(self) -> None:
        """Hang up; the keeper waits for another agent, for as long as its lease."""
        self._connection.close()
        self._on_close()
