"""This keeper among those of other nodes: what it hands out, takes in, pushes and fetches.

Used by the thread of the messages. Nothing here waits for a peer: pushes and fetches are jobs, and
the server has threads of its own.
"""

import ipaddress
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from gpuops.checkpoint.keeper.jobs import NICE_PUSH, EventQueue, JobKind, Jobs, lower_priority
from gpuops.checkpoint.memory.node_memory import (
    HeldShard,
    NodeMemory,
    ReplicaAllocator,
    duplicate_fd,
    open_read_only,
)
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.memory.state_record import SlotKey
from gpuops.checkpoint.peers.fetch import PeerShards
from gpuops.checkpoint.peers.push import HOLDERS_MAX, ReplicaPusher
from gpuops.checkpoint.peers.source import ReplicaSource
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.pacing import GapPace, SendPace
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.transfer.wire import JobCredentials
from gpuops.checkpoint.types import (
    CheckpointError,
    KeeperAddress,
    KeeperError,
    Shard,
    ShardCopy,
    ShardHolders,
    StateId,
)
from gpuops.host.clock import SystemClock
from gpuops.host.net.traffic import Traffic, interface_of

# What is held for others is bounded by the room in memory.
_BYTES_MAX = 2**63
_NO_SLOT = SlotKey(-1, -1)


@dataclass(frozen=True, slots=True)
class _RunningServer:
    """What `serve` was asked for, and what came of it."""

    requested: tuple[str, str, str, str]
    job: JobCredentials
    replicas: ReplicaStore
    server: TransferServer

    def close(self) -> None:
        self.server.close()
        self.replicas.close()


@dataclass(slots=True)
class BorrowedReplicas:
    """Replicas that this node's own ranks read; pinned until `close`."""

    held: dict[StateId, dict[Shard, HeldShard]] = field(default_factory=dict)
    pinned: list[PinnedCopy] = field(default_factory=list)

    def close(self) -> None:
        """Let them go; ranks that have opened one keep what they have."""
        for by_shard in self.held.values():
            for held in by_shard.values():
                held.memory.close()
        while self.pinned:
            self.pinned.pop().release()


class PeerService:
    """The other side of a keeper: towards the keepers of other nodes."""

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
        self._held_for_peers: frozenset[Shard] = frozenset()
        self._has_surplus = False
        self._adopted: set[Shard] = set()
        self._epoch = 0

    def serve(self, address: str, *, node: str, token: str, job: str, port: int = 0) -> int:
        """Be there for other keepers of *job*, as *node*; return the port.

        To ask again for the same changes nothing. *port*: where others look for this node already;
        one that is taken by somebody else is not waited for.

        Raises:
            KeeperError: *address* is none, or cannot be listened on.
        """
        requested = (address, node, token, job)
        if self._running is not None:
            if self._running.requested == requested:
                return self._running.server.port
            self._stop_server()
        try:
            ipaddress.ip_address(address)
        except ValueError as exc:
            raise KeeperError(f"{address[:100]!r} is no address of this node") from exc
        self._memory.node = node
        job_pass = JobCredentials(job, token, epoch=self._epoch)
        replicas = ReplicaStore(node, self._allocator.allocate, bytes_max=_BYTES_MAX)
        replicas.keep_only(self._held_for_peers)
        source = ReplicaSource(self._memory, replicas, self._jobs, self._on_own_damage)
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
        self._running = _RunningServer(requested, job_pass, replicas, server)
        self.pusher.job = job_pass
        interface = interface_of(address)
        self.pusher.pace.watch(Traffic(interface).sent_bytes if interface else None)
        return server.port

    def replicate(
        self, holders: Sequence[KeeperAddress], keep: Sequence[Shard], bytes_per_s: float | None
    ) -> None:
        """Push what is saved to *holders*; take in the shards *keep* of others.

        What is held of other shards stays until a state is committed: it may be all that there is.

        Raises:
            KeeperError: This keeper is not among peers, or there are too many holders.
        """
        running = self._running
        if running is None and (holders or keep):
            raise KeeperError("this keeper does not serve other nodes yet")
        if len(holders) > HOLDERS_MAX:
            raise KeeperError(f"{len(holders)} holders of one node: at most {HOLDERS_MAX}")
        self._held_for_peers = frozenset(keep)
        if running is not None:
            present = {copy.shard for copy in running.replicas.copies()}
            self._has_surplus = not present <= self._held_for_peers
            running.replicas.keep_only(self._held_for_peers | present)
        self.pusher.pace.set_rate(bytes_per_s)
        self.pusher.set_holders(holders)

    def fetch_state(
        self,
        state: StateId,
        holders: Mapping[Shard, ShardHolders],
        make: Callable[[int], SharedBuffer],
    ) -> PeerShards:
        """Return what peers hold of *state*, and begin to fetch what is not here.

        Raises:
            KeeperError: This keeper is not among peers.
        """
        if self._running is None:
            raise KeeperError("this keeper does not serve other nodes yet")

        def told(kind: str, fields: Mapping[str, object]) -> None:
            self._jobs.post(lambda: self._events.add(kind, **fields))

        found = PeerShards(state, holders, self._running.job, make, told)
        here = {*self._memory.held_shards(state), *self._replicas_of(state)}
        for shard in sorted(set(holders) - here):
            self._jobs.start(JobKind.FETCH, partial(found.get, shard), lambda _memory, _error: None)
        return found

    def borrow(self, state: StateId | None) -> BorrowedReplicas:
        """Return the replicas of *state* (None: of all) that are here, for this node's ranks."""
        borrowed = BorrowedReplicas()
        replicas = self._running.replicas if self._running else None
        for copy in self.copies():
            is_wanted = state is None or copy.state == state
            pinned_copy = replicas.open(copy.state, copy.shard) if replicas and is_wanted else None
            if pinned_copy is None:
                continue
            borrowed.pinned.append(pinned_copy)
            memory = SharedBuffer.attach(open_read_only(pinned_copy.fd), writable=False)
            held = HeldShard(replace(copy, digest=pinned_copy.digest), _NO_SLOT, memory)
            borrowed.held.setdefault(copy.state, {})[copy.shard] = held
        return borrowed

    def adopt(self, found: PeerShards) -> None:
        """Let what this node's ranks go on from count as a copy, until a state is committed.

        Before that, the nodes that it was fetched from may be lost as well.
        """
        running, own_shards = self._running, set(self._own_shards())
        if running is None:
            return
        for fetched, memory in found.fetched():
            if fetched.shard not in own_shards:
                continue  # of a world that was: all nodes have all of it for a moment
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
        """Give the memory of what was adopted back; say whether there was any."""
        adopted, self._adopted = self._adopted, set()
        if self._running is None or not adopted:
            return False
        present = {copy.shard for copy in self._running.replicas.copies()}
        self._running.replicas.keep_only(self._held_for_peers | (present - adopted))
        return True

    def copies(self) -> list[ShardCopy]:
        """Return the replicas that are held here."""
        return self._running.replicas.copies() if self._running else []

    # What happens.

    def begin_generation(self) -> None:
        """End all pushes: until it is said what the job goes on from, none is of use."""
        self.pusher.stop()

    def on_restore_decided(self, state: StateId | None, epoch: int) -> None:
        """Turn away who is of an epoch before *epoch*; hold on to *state*."""
        self._epoch = max(self._epoch, epoch)
        if self._running is not None:
            self._running.job.advance(epoch)
            self._running.replicas.begin_epoch(epoch)
            if state is not None:
                self._running.replicas.commit(state)

    def on_committed(self, state: StateId) -> None:
        """Note a commit: it is what all holders are to hold, and all that they need to hold."""
        if self._running is None:
            return
        self._running.replicas.commit(state)
        if self._has_surplus and state.epoch >= self._epoch:
            self._has_surplus = False
            self._adopted.clear()
            self._running.replicas.keep_only(self._held_for_peers)

    def tick(self) -> None:
        """Do what became possible, or due, meanwhile."""
        self._unpopulated_bytes = self._memory.unpopulated_bytes()
        self.pusher.push_next()
        for copy, number in self._running.replicas.take_damaged() if self._running else ():
            self._events.add(
                "corrupt",
                state=copy.state,
                rank=copy.shard.rank,
                tier=copy.tier.value,
                why=f"piece {number} of the replica that is held here",
            )

    def counts(self) -> dict[str, object]:
        """Return what was counted so far, by name."""
        running = self._running
        return {
            **self.pusher.counts(),
            "peer_port": running.server.port if running else None,
            "held_for_others_bytes": running.replicas.held_bytes if running else 0,
            "keeps": sorted(shard for shard in self._held_for_peers)[:64],
        }

    def close(self) -> None:
        """Leave the peers, and give back what is held for them."""
        self.pusher.stop()
        if self._running is not None:
            self._running.close()
            self._running = None

    # Behind it.

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
            why=f"piece {number} of it is not what was sealed",
        )
        # No commit may rest on it; a committed one has its other copies.
        self._memory.buffer_table.give_up(state)


def _first_that_starts(makes: Sequence[Callable[[], TransferServer]]) -> TransferServer:
    """Return what the first of *makes* returns that can be made."""
    for make in makes[:-1]:
        with suppress(CheckpointError):
            return _at_low_priority(make)
    return _at_low_priority(makes[-1])


def _at_low_priority(make: Callable[[], TransferServer]) -> TransferServer:
    """Return what *make* returns; its threads give way to the training."""
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
