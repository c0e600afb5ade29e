"""This keeper's exchange with the keepers of other nodes: serving, receiving, pushing, fetching.

Used by the thread of the messages. It never waits for a peer: pushes and fetches are jobs, and
the server has threads of its own.
"""

import ipaddress
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

from gpuops.checkpoint.keeper.jobs import NICE_PUSH, EventQueue, JobKind, Jobs, lower_priority
from gpuops.checkpoint.keeper.messages import Addresses, Name, Peers, Port, RankRanges, Shards
from gpuops.checkpoint.memory.node_memory import (
    MemoryShard,
    NodeMemory,
    ReplicaAllocator,
    duplicate_fd,
)
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.memory.state_record import SlotKey
from gpuops.checkpoint.peers.alike import ComposedImage, ComposedReplica, roots_of
from gpuops.checkpoint.peers.fetch import PeerShards
from gpuops.checkpoint.peers.push import HOLDERS_MAX, ReplicaPusher
from gpuops.checkpoint.peers.source import OwnStates, ReplicaSource, attach
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.pacing import GapPace, SendPace
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.transfer.wire import JobCredentials
from gpuops.checkpoint.types import (
    CheckpointError,
    KeeperError,
    Shard,
    ShardCopy,
    ShardHolders,
    StateId,
)
from gpuops.host.clock import SystemClock
from gpuops.host.net.traffic import Traffic, interface_of
from gpuops.wire.messages import Limit

# The memory for replicas is bounded by what is available.
_BYTES_MAX = 2**63
_NO_SLOT = SlotKey(-1, -1)


@dataclass(frozen=True, slots=True)
class _RunningServer:
    """The parameters of `serve`, and the running server."""

    requested: tuple[str, str, str, str] = field(repr=False)  # the token is one of them
    job: JobCredentials
    replicas: ReplicaStore
    server: TransferServer
    own: OwnStates

    def close(self) -> None:
        self.own.close()
        self.server.close()
        self.replicas.close()


@dataclass(slots=True)
class BorrowedReplicas:
    """Replicas that this node's own ranks read; pinned until `close`."""

    shards: dict[StateId, dict[Shard, MemoryShard]] = field(default_factory=dict)
    pinned: list[PinnedCopy] = field(default_factory=list)
    composed: list[tuple[ShardCopy, ComposedImage]] = field(default_factory=list)

    def compose(
        self, is_wanted: Callable[[StateId], bool], allocate: Callable[[int], SharedBuffer]
    ) -> None:
        """Make the images of which parts are elsewhere on this node, where they fit into memory.

        While that runs, the states of this node's ranks must be pinned.
        """
        for copy, image in self.composed:
            if is_wanted(copy.state):
                with suppress(CheckpointError):
                    memory = allocate(image.nbytes)
                    image.copy_to(memory.view)
                    entry = MemoryShard(copy, _NO_SLOT, memory)
                    self.shards.setdefault(copy.state, {})[copy.shard] = entry

    def close(self) -> None:
        """Unpin them; ranks that have opened one keep their mapping."""
        for by_shard in self.shards.values():
            for entry in by_shard.values():
                entry.memory.close()
        while self.pinned:
            self.pinned.pop().release()


class PeerService:
    """A keeper's side towards the keepers of other nodes."""

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        events: EventQueue,
        clock_s: Callable[[], float],
        own_shards: Callable[[], Collection[Shard]],
    ) -> None:
        self.pusher = ReplicaPusher(
            memory,
            jobs,
            events,
            GapPace(SystemClock()),
            own_shards,
            clock_s,
            on_damage=self._on_own_damage,
        )
        self._memory, self._jobs, self._events, self._own_shards = memory, jobs, events, own_shards
        self._unpopulated_bytes = 0
        self._allocator = ReplicaAllocator(memory.available, lambda: self._unpopulated_bytes)
        memory.unpopulated_elsewhere = self._allocator.unpopulated_bytes
        self._running: _RunningServer | None = None
        self._stored_for_peers: frozenset[Shard] = frozenset()
        self._nodes: tuple[str, ...] = ()
        self._has_surplus = False
        self._adopted: set[Shard] = set()
        self._epoch = 0

    def serve(self, address: Name, *, node: Name, token: str, job: Name, port: Port = 0) -> int:
        """Serve the keepers of *job* on other nodes, as *node*; return the port.

        Repeated calls with equal arguments have no effect. *port*: where other nodes already
        connect to; if it is in use, another one is taken at once.

        Raises:
            KeeperError: *address* is invalid, or cannot be listened on.
        """
        requested = (address, node, token, job)
        if self._running is not None:
            if self._running.requested == requested:
                return self._running.server.port
            self._stop_server()
        try:
            ipaddress.ip_address(address)
        except ValueError as exc:
            raise KeeperError(f"{address[:100]!r} is not an address of this node") from exc
        self._memory.node = node
        job_pass = JobCredentials(job, token, epoch=self._epoch)
        replicas = ReplicaStore(
            node,
            self._allocator.allocate,
            bytes_max=_BYTES_MAX,
            pin_own=lambda state: own.pin_expected(state),  # noqa: PLW0108 made below
        )
        own = OwnStates(self._memory, self._jobs, replicas, self._own_shards)
        replicas.keep_only(self._stored_for_peers)
        source = ReplicaSource(own, replicas, self._jobs, self._on_own_damage)
        try:
            server = _first_that_starts(
                [
                    partial(
                        TransferServer,
                        (address, number),
                        job_pass,
                        source,
                        replicas,
                        SendPace(None, SystemClock()),
                    )
                    for number in dict.fromkeys((port, 0))
                ]
            )
        except CheckpointError as exc:
            raise KeeperError(str(exc)) from exc
        server.set_peers(self._nodes)
        self._running = _RunningServer(requested, job_pass, replicas, server, own)
        self.pusher.job = job_pass
        interface = interface_of(address)
        self.pusher.pace.watch(Traffic(interface).sent_bytes if interface else None)
        return server.port

    def replicate(
        self,
        holders: Peers,
        keep: Shards,
        bytes_per_s: Annotated[float | None, Limit(1e15, low=1)] = None,
        nodes: Addresses = (),
        ranks: RankRanges = (),
    ) -> None:
        """Push saved states to *holders*; accept the shards *keep* of other nodes.

        Replicas of other shards stay until the next commit: there may be no other copies. *nodes*:
        the addresses of the job's nodes, for which the server keeps places. *ranks*: the first rank
        of each holder and the one after its last, () where they are not known.

        Raises:
            KeeperError: This keeper serves no peers yet, or there are too many holders or ranks.
        """
        running = self._running
        if running is None and (holders or keep):
            raise KeeperError("this keeper does not serve other nodes yet")
        if len(holders) > HOLDERS_MAX:
            raise KeeperError(f"{len(holders)} holders of one node: at most {HOLDERS_MAX}")
        if ranks and len(ranks) != len(holders):
            raise KeeperError(f"{len(ranks)} ranges of ranks for {len(holders)} holders")
        self._stored_for_peers = frozenset(keep)
        self._nodes = (*nodes, *(holder.host for holder in holders))
        if running is not None:
            running.server.set_peers(self._nodes)
            present = {copy.shard for copy in self.copies()}
            self._has_surplus = not present <= self._stored_for_peers
            running.replicas.keep_only(self._stored_for_peers | present)
        self.pusher.pace.set_rate(bytes_per_s)
        ranges = [range(*each) for each in ranks] or [range(0)] * len(holders)
        self.pusher.set_holders(dict(zip(holders, ranges, strict=True)))

    def fetch_state(
        self,
        state: StateId,
        holders: Mapping[Shard, ShardHolders],
        make: Callable[[int], SharedBuffer],
        loading_world: int | None,
    ) -> PeerShards:
        """Return the copies of *state* on peers, and begin to fetch what is missing here.

        Of shards of another number of ranks than *loading_world* only the parts that the ranks
        request are fetched.

        Raises:
            KeeperError: This keeper serves no peers yet.
        """
        if self._running is None:
            raise KeeperError("this keeper does not serve other nodes yet")

        def report(kind: str, fields: Mapping[str, object]) -> None:
            self._jobs.post(lambda: self._events.add(kind, **fields))

        found = PeerShards(state, holders, self._running.job, make, report)
        here = {*self._memory.complete_shards(state), *self._replicas_of(state)}
        whole = {shard for shard in holders if loading_world in (None, shard.world)}
        for shard in sorted(whole - here):
            self._jobs.start(JobKind.FETCH, partial(found.get, shard), lambda _memory, _error: None)
        return found

    def borrow(self, state: StateId | None) -> BorrowedReplicas:
        """Return the local replicas of *state* (None: of all) for this node's ranks."""
        borrowed = BorrowedReplicas()
        replicas = self._running.replicas if self._running else None
        composed: list[tuple[ShardCopy, ComposedReplica]] = []
        for copy in self.copies():
            is_wanted = state is None or copy.state == state
            found = replicas.open_any(copy.state, copy.shard) if replicas and is_wanted else None
            if found is None:
                continue
            borrowed.pinned.append(found.pinned)
            if found.rest is not None:
                composed.append((copy, found))
            else:
                entry = attach(copy, found.pinned)
                borrowed.shards.setdefault(copy.state, {})[copy.shard] = entry
        for copy, replica in composed:
            fetched = borrowed.shards.get(copy.state, {})
            image = replica.image({**fetched, **self._memory.complete_shards(copy.state)})
            borrowed.composed += [(copy, image)] if image is not None else []
        return borrowed

    def adopt(self, found: PeerShards) -> None:
        """Keep the restored state as a replica until a state is committed.

        Before that, the nodes that it was fetched from may be lost as well.
        """
        running, own_shards = self._running, set(self._own_shards())
        if running is None:
            return
        for fetched, memory in found.fetched():
            if fetched.shard not in own_shards:
                continue  # of an earlier world: for a moment all nodes have all of it
            with suppress(CheckpointError):
                kept = SharedBuffer.attach(
                    duplicate_fd(memory, writable=True), nbytes=memory.nbytes
                )
                copy = replace(fetched, holder=self._memory.node)
                if running.replicas.adopt(copy, kept, kept.nbytes):
                    self._adopted.add(copy.shard)
                    self._has_surplus = True
                else:
                    kept.close()

    def release_adopted(self) -> bool:
        """Release the adopted replicas; return whether there were any."""
        adopted, self._adopted = self._adopted, set()
        if self._running is None or not adopted:
            return False
        present = {copy.shard for copy in self.copies()}
        self._running.replicas.keep_only(self._stored_for_peers | (present - adopted))
        return True

    def copies(self) -> list[ShardCopy]:
        """Return the complete replicas: of some, a part must still be elsewhere on this node."""
        if self._running is None:
            return []
        whole = self._running.replicas.copies()

        def roots(state: StateId) -> Mapping[Shard, str]:
            fetched = {copy.shard: copy.digest.root for copy in whole if copy.state == state}
            return fetched | roots_of(self._memory.complete_shards(state))

        return self._running.replicas.copies(roots)

    # Events.

    def begin_generation(self) -> None:
        """Cancel all pushes: before the state to resume from is decided, none is useful."""
        self.pusher.stop()

    def on_restore_decided(self, state: StateId | None, epoch: int) -> None:
        """Refuse peers of epochs before *epoch*; keep *state*."""
        self._epoch = max(self._epoch, epoch)
        if self._running is not None:
            self._running.job.advance(epoch)
            self._running.replicas.begin_epoch(epoch)
            if state is not None:
                self._running.replicas.commit(state)

    def on_committed(self, state: StateId) -> None:
        """Record a commit: holders must have this state, and need no older one."""
        if self._running is None:
            return
        self._running.replicas.commit(state)
        if self._has_surplus and state.epoch >= self._epoch:
            self._has_surplus = False
            self._adopted.clear()
            self._running.replicas.keep_only(self._stored_for_peers)

    def tick(self) -> None:
        self._unpopulated_bytes = self._memory.unpopulated_bytes()
        self.pusher.push_next()
        for copy, number in self._running.replicas.take_damaged() if self._running else ():
            self._events.add(
                "corrupt",
                state=copy.state,
                rank=copy.shard.rank,
                tier=copy.tier.value,
                why=f"piece {number} of the replica on this node",
            )

    def counts(self) -> dict[str, object]:
        running = self._running
        return {
            **self.pusher.counts(),
            "peer_port": running.server.port if running else None,
            "held_for_others_bytes": running.replicas.held_bytes if running else 0,
            "keeps": sorted(shard for shard in self._stored_for_peers)[:64],
        }

    def close(self) -> None:
        """Disconnect from the peers, and release their replicas."""
        self.pusher.stop()
        if self._running is not None:
            self._running.close()
            self._running = None

    # Internals.

    def _stop_server(self) -> None:
        running, self._running = self._running, None
        self.pusher.stop()
        self.pusher.job = None
        if running is not None:
            # Its threads may wait for ours.
            self._jobs.start(JobKind.FETCH, running.close, lambda _none, _error: None)

    def _replicas_of(self, state: StateId) -> dict[Shard, ShardCopy]:
        return {copy.shard: copy for copy in self.copies() if copy.state == state}

    def _on_own_damage(self, state: StateId, shard: Shard, number: int) -> None:
        self._events.add(
            "corrupt",
            state=state,
            rank=shard.rank,
            tier="memory",
            why=f"piece {number} of it is corrupt",
        )
        # No commit may rely on it; a committed one has its other copies.
        self._memory.buffer_table.give_up(state)


def _first_that_starts(makes: Sequence[Callable[[], TransferServer]]) -> TransferServer:
    """Return the result of the first of *makes* that does not raise."""
    for make in makes[:-1]:
        with suppress(CheckpointError):
            return _at_low_priority(make)
    return _at_low_priority(makes[-1])


def _at_low_priority(make: Callable[[], TransferServer]) -> TransferServer:
    """Return the result of *make*; threads that it starts have a lowered priority."""
    found: list[TransferServer] = []
    failed: list[CheckpointError] = []

    def do() -> None:
        lower_priority(NICE_PUSH)
        try:
            found.append(make())
        except CheckpointError as exc:
            failed.append(exc)

    thread = threading.Thread(target=do, name="gpuops-serve")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
