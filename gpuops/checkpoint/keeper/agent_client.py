"""The agent's client of its node's keeper."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops.checkpoint.agreement.replica_check import ReplicaReport, replica_report_to_json
from gpuops.checkpoint.agreement.write_once import WriteOnce
from gpuops.checkpoint.keeper.connection import DEADLINE_S, SLACK_S, KeeperConnection
from gpuops.checkpoint.keeper.messages import (
    ADDRESSES_MAX,
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
    """Return the agent's connection to the keeper at *socket_path*.

    Raises:
        KeeperError: There is no keeper, or it serves another agent.
    """
    connection = KeeperConnection(socket_path, deadline_s=deadline_s)
    try:
        connection.call(HelloReply, "hello", role="agent")
    except BaseException:  # boundary: the connection is closed, the error is raised again
        connection.close()
        raise
    return connection


class KeeperClient:
    """The agent's client of its keeper; *job* names the run in what is persisted.

    A keeper has one agent at a time; another one may replace a lost one within the lease.

    Thread-safe; calls are serialised. All calls raise `KeeperError` where the keeper is gone, does
    not answer within the deadline, or refuses.
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
        """Disconnect the workers of older generations, and admit only those of *generation*.

        No state of *excluded_step* is loaded. *job* must be the same on all nodes.
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
        """Have the keeper listen at *address* for the keepers of other nodes; return the port.

        *node* is this node's name in inventories; a peer without *token*, or of another *job*, is
        rejected. Repeated calls have no effect. *port*: where peers already connect to, because a
        keeper that was replaced listened there; 0: any.
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
        nodes: Sequence[str] = (),
        ranks: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Push every complete state of this node to *holders* from now on; none: to nobody.

        *keep*: which shards of other nodes may be pushed here. Replicas of other shards stay until
        the next commit. *bytes_per_s*: the rate limit of all pushes together. *nodes*: the
        addresses of the job's nodes, nearest first, which unauthenticated clients never keep out.
        *ranks*: the first rank of each holder and the one after its last; what these hold alike is
        not sent to it.
        """
        self._connection.call(
            Done,
            "replicate",
            holders=holders,
            keep=keep,
            bytes_per_s=bytes_per_s,
            nodes=list(dict.fromkeys(nodes))[:ADDRESSES_MAX],
            ranks=ranks,
        )

    def restore_from(
        self,
        state: StateId | None,
        epoch: int,
        sources: Mapping[Shard, Sequence[KeeperAddress]] | None = None,
        why: Sequence[str] = (),
        *,
        roots: Mapping[Shard, str] | None = None,
        loading_world: int | None = None,
    ) -> None:
        """Have all ranks resume from *state* (None: from scratch); new states are of *epoch*.

        With several nodes the ranks wait for this call; with one node it is not needed. *sources*:
        the holders of the shards that this node needs, in order of preference; what is missing or
        corrupt in this node's memory is fetched from them, then from the directory. *roots*: of the
        digests in the plan. *why*: why newer states were skipped. *loading_world*: the number of
        ranks that load it; of what another number saved, they fetch parts. Returns at once.
        """
        texts = [text[:WHY_CHARS_MAX] for text in why[:WHY_MAX]]
        n_sources = len(sources or {})
        with self._restore_lock:
            for page in holder_pages(sources or {}, roots or {}):
                self._connection.call(Done, "sources", **page)
            self._connection.call(
                Done,
                "choose",
                state=state,
                epoch=epoch,
                n_sources=n_sources,
                why=texts,
                loading_world=loading_world,
            )

    def take_over(self, epoch: int) -> None:
        """Let ranks that already run save states of *epoch*; after `begin_generation`.

        For a keeper that replaces one that died: its states are lost, and ranks that have loaded
        theirs do not need them. A rank that still asks what to load is refused.
        """
        self._connection.call(Done, "take_over", epoch=epoch)

    def status(self) -> KeeperStatus:
        """Return the progress of this node; cheap enough for ten times a second."""
        return self._connection.call(KeeperStatus, "status")

    def commit_persisted(self, state: StateId, world: int) -> None:
        """Write the shared directory's manifest of *state*: all nodes have written their shards.

        Returns at once; `KeeperProgress.persisted` and an event report the result.
        """
        self._connection.call(Done, "seal_persisted", state=state, world=world)

    def report_difference(self, report: ReplicaReport) -> None:
        """Have the keeper report ranks of several nodes, some of them here, that differ."""
        self._connection.call(Done, "differ", report=replica_report_to_json(report))

    def commit(
        self, state: StateId, *, persist: bool = False, once: WriteOnce | None = None
    ) -> bool:
        """Commit a state that is complete on all nodes; return whether it was new here.

        *persist*: also begin to persist this node's shards of it, and of what is equal on all nodes
        at this state, *once*, its part.
        """
        return self._connection.call(bool, "commit", state=state, persist=persist, once=once)

    def try_persist(self, state: StateId, once: WriteOnce | None = None) -> bool:
        """Commit *state*, and begin to write this node's shards; False: refused for now."""
        return self._is_taken(lambda: self.commit(state, persist=True, once=once))

    def try_commit_persisted(self, state: StateId, world: int) -> bool:
        """Write the manifest of a state whose shards are all written; False: refused for now."""
        return self._is_taken(lambda: self.commit_persisted(state, world))

    def _is_taken(self, ask: Callable[[], object]) -> bool:
        try:
            ask()
        except KeeperError as exc:
            if not self._connection.is_open:
                raise
            log.debug("the keeper refuses for now: %s", exc)
            return False
        return True

    def set_next_step(self, step: int) -> None:
        """Save nothing before *step*, the first step that all nodes can save together."""
        self._connection.call(Done, "aim", step=step)

    def give_up(self, state: StateId) -> None:
        """Give up a state that will not be complete on all nodes, so that others may be saved."""
        self._connection.call(Done, "give_up", state=state)

    def flush(
        self, deadline_s: float, on_wait: Callable[[float], object] | None = None
    ) -> FlushResult:
        """Persist the newest committed state if it is not yet; returns within *deadline_s*.

        *on_wait* is called once with the seconds that it waits at most for other nodes' shards.
        """
        end_s = time.monotonic() + deadline_s

        def call(within_s: float, *, tells_wait: bool) -> FlushResult:
            return self._connection.call(
                FlushResult,
                "flush",
                wait_s=within_s + SLACK_S,
                deadline_s=within_s,
                tells_wait=tells_wait,
            )

        try:
            result = call(deadline_s, tells_wait=on_wait is not None)
            if result.others_s and on_wait is not None:
                on_wait(result.others_s)
                return call(max(0.0, end_s - time.monotonic()), tells_wait=False)
        except KeeperError as exc:
            if not self._connection.is_open:
                raise
            return FlushResult(None, why=str(exc))
        return result

    def inventory(self) -> list[ShardCopy]:
        """Return the copies in memory, replicas included, with the roots of their digests.

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
        """Return counts by name, as `NodeMemory.stats` does."""
        return self._connection.call(dict, "stats")

    def events(self) -> list[Mapping[str, Any]]:
        """Return the events since the last call, the oldest first, each with a ``kind``."""
        found: list[Mapping[str, Any]] = []
        while len(found) < _EVENTS_MAX:
            page = self._connection.call(EventsPage, "events")
            found += page.events
            if page.is_all:
                break
        return found

    def hand_over(self, *, is_over: bool) -> tuple[int, bool]:
        """Leave the keeper to the ranks that are still connected.

        Return their number, and whether the keeper ends: there is none, and the run *is_over*. If
        there are, it ends soon after the last of them.
        """
        left = self._connection.call(HandOver, "leave", is_over=is_over)
        return left.ranks, left.is_ending

    def shut_down(self) -> None:
        """End the keeper; states that are only in memory are lost."""
        self._connection.call(Done, "end")

    def close(self) -> None:
        """Disconnect; the keeper waits for another agent until its lease expires."""
        self._connection.close()
        self._on_close()
