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

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import NICE_PUSH, Jobs, lower_priority
from gpuops.checkpoint.messages import shard_to_json, state_to_json
from gpuops.checkpoint.node_memory import Held, NodeMemory, handle, handle_of
from gpuops.checkpoint.peer_shards import Holders, PeerShards
from gpuops.checkpoint.peer_shelf import Shelf
from gpuops.checkpoint.replica_room import ReplicaRoom
from gpuops.checkpoint.replicas import ReplicaStore
from gpuops.checkpoint.replication import HOLDERS_MAX, Replication
from gpuops.checkpoint.slots import SlotKey
from gpuops.checkpoint.states import CheckpointError, Copy, KeeperError, Shard, StateId
from gpuops.checkpoint.transfer_auth import JobPass
from gpuops.checkpoint.transfer_gaps import GapPace
from gpuops.checkpoint.transfer_pace import Pace
from gpuops.checkpoint.transfer_server import TransferServer
from gpuops.checkpoint.transfer_team import Peer
from gpuops.checkpoint.transfer_turns import PinnedCopy
from gpuops.host.clock import SystemClock
from gpuops.host.traffic import Traffic, interface_of

# What is held for others is bounded by the room in memory.
_BYTES_MAX = 2**63
_NO_SLOT = SlotKey(-1, -1)


@dataclass(frozen=True, slots=True)
class _Service:
    """What `serve` was asked for, and what came of it."""

    asked: tuple[str, str, str, str]
    job: JobPass
    replicas: ReplicaStore
    server: TransferServer

    def close(self) -> None:
        self.server.close()
        self.replicas.close()


@dataclass(slots=True)
class Lent:
    """Replicas that this node's own ranks read; pinned until `close`."""

    held: dict[StateId, dict[Shard, Held]] = field(default_factory=dict)
    pinned: list[PinnedCopy] = field(default_factory=list)

    def close(self) -> None:
        """Let them go; ranks that have opened one keep what they have."""
        for by_shard in self.held.values():
            for held in by_shard.values():
                held.memory.close()
        while self.pinned:
            self.pinned.pop().release()


class Peers:
    """The other side of a keeper: towards the keepers of other nodes."""

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        events: Events,
        clock_s: Callable[[], float],
        mine: Callable[[], Collection[Shard]],
    ) -> None:
        self.replication = Replication(
            memory,
            jobs,
            events,
            GapPace(SystemClock()),
            mine,
            clock_s,
            damaged=self._own_is_damaged,
        )
        self._memory, self._jobs, self._events, self._mine = memory, jobs, events, mine
        self._promised_bytes = 0
        self._room = ReplicaRoom(memory.available, lambda: self._promised_bytes)
        memory.promised_elsewhere = self._room.missing_bytes
        self._service: _Service | None = None
        self._keep: frozenset[Shard] = frozenset()
        self._holds_more = False
        self._adopted: set[Shard] = set()
        self._epoch = 0

    def serve(self, address: str, *, node: str, token: str, job: str, port: int = 0) -> int:
        """Be there for other keepers of *job*, as *node*; return the port.

        To ask again for the same changes nothing. *port*: where others look for this node already;
        one that is taken by somebody else is not waited for.

        Raises:
            KeeperError: *address* is none, or cannot be listened on.
        """
        asked = (address, node, token, job)
        if self._service is not None:
            if self._service.asked == asked:
                return self._service.server.port
            self._end_service()
        try:
            ipaddress.ip_address(address)
        except ValueError as exc:
            raise KeeperError(f"{address[:100]!r} is no address of this node") from exc
        self._memory.node = node
        job_pass = JobPass(job, token, epoch=self._epoch)
        replicas = ReplicaStore(node, self._room.make, bytes_max=_BYTES_MAX)
        replicas.keep_only(self._keep)
        shelf = Shelf(self._memory, replicas, self._jobs, self._own_is_damaged)
        try:
            server = _first_of(
                [
                    partial(
                        TransferServer,
                        (address, number),
                        job_pass,
                        shelf,
                        replicas,
                        Pace(None, SystemClock()),
                    )
                    for number in dict.fromkeys((port, 0))
                ]
            )
        except CheckpointError as exc:
            raise KeeperError(str(exc)) from exc
        self._service = _Service(asked, job_pass, replicas, server)
        self.replication.job = job_pass
        interface = interface_of(address)
        self.replication.pace.watch(Traffic(interface).sent_bytes if interface else None)
        return server.port

    def replicate(
        self, holders: Sequence[Peer], keep: Sequence[Shard], bytes_per_s: float | None
    ) -> None:
        """Push what is saved to *holders*; take in the shards *keep* of others.

        What is held of other shards stays until a state is committed: it may be all that there is.

        Raises:
            KeeperError: This keeper is not among peers, or there are too many holders.
        """
        service = self._service
        if service is None and (holders or keep):
            raise KeeperError("this keeper does not serve other nodes yet")
        if len(holders) > HOLDERS_MAX:
            raise KeeperError(f"{len(holders)} holders of one node: at most {HOLDERS_MAX}")
        self._keep = frozenset(keep)
        if service is not None:
            there = {copy.shard for copy in service.replicas.copies()}
            self._holds_more = not there <= self._keep
            service.replicas.keep_only(self._keep | there)
        self.replication.pace.set_rate(bytes_per_s)
        self.replication.to(holders)

    def shards_of(
        self, state: StateId, holders: Mapping[Shard, Holders], make: Callable[[int], SlotMemory]
    ) -> PeerShards:
        """Return what peers hold of *state*, and begin to fetch what is not here.

        Raises:
            KeeperError: This keeper is not among peers.
        """
        if self._service is None:
            raise KeeperError("this keeper does not serve other nodes yet")

        def told(kind: str, fields: Mapping[str, object]) -> None:
            self._jobs.post(lambda: self._events.add(kind, **fields))

        found = PeerShards(state, holders, self._service.job, make, told)
        here = {*self._memory.held(state), *self._replicas_of(state)}
        for shard in sorted(set(holders) - here):
            self._jobs.fetch(partial(found.get, shard), lambda _memory, _error: None)
        return found

    def lend(self, state: StateId | None) -> Lent:
        """Return the replicas of *state* (None: of all) that are here, for this node's ranks."""
        lent = Lent()
        replicas = self._service.replicas if self._service else None
        for copy in self.copies():
            is_wanted = state is None or copy.state == state
            pinned = replicas.open(copy.state, copy.shard) if replicas and is_wanted else None
            if pinned is None:
                continue
            lent.pinned.append(pinned)
            memory = SlotMemory.attach(handle_of(pinned.fd), writable=False)
            held = Held(replace(copy, digest=pinned.digest), _NO_SLOT, memory)
            lent.held.setdefault(copy.state, {})[copy.shard] = held
        return lent

    def adopt(self, found: PeerShards) -> None:
        """Let what this node's ranks go on from count as a copy, until a state is committed.

        Before that, the nodes that it was fetched from may be lost as well.
        """
        service, mine = self._service, set(self._mine())
        if service is None:
            return
        for fetched, memory in found.fetched():
            if fetched.shard not in mine:
                continue  # of a world that was: all nodes have all of it for a moment
            with suppress(CheckpointError):
                kept = SlotMemory.attach(handle(memory, writable=True), nbytes=memory.nbytes)
                copy = replace(fetched, holder=self._memory.node)
                if service.replicas.adopt(copy, kept, kept.nbytes):
                    self._adopted.add(copy.shard)
                    self._holds_more = True
                else:
                    kept.close()

    def give_back(self) -> bool:
        """Give the memory of what was adopted back; say whether there was any."""
        adopted, self._adopted = self._adopted, set()
        if self._service is None or not adopted:
            return False
        there = {copy.shard for copy in self._service.replicas.copies()}
        self._service.replicas.keep_only(self._keep | (there - adopted))
        return True

    def copies(self) -> list[Copy]:
        """Return the replicas that are held here."""
        return self._service.replicas.copies() if self._service else []

    # What happens.

    def begin_generation(self) -> None:
        """End all pushes: until it is said what the job goes on from, none is of use."""
        self.replication.stop()

    def chosen(self, state: StateId | None, epoch: int) -> None:
        """Turn away who is of an epoch before *epoch*; hold on to *state*."""
        self._epoch = max(self._epoch, epoch)
        if self._service is not None:
            self._service.job.advance(epoch)
            self._service.replicas.begin_epoch(epoch)
            if state is not None:
                self._service.replicas.commit(state)

    def committed(self, state: StateId) -> None:
        """Note a commit: it is what all holders are to hold, and all that they need to hold."""
        if self._service is None:
            return
        self._service.replicas.commit(state)
        if self._holds_more and state.epoch >= self._epoch:
            self._holds_more = False
            self._adopted.clear()
            self._service.replicas.keep_only(self._keep)

    def tick(self) -> None:
        """Do what became possible, or due, meanwhile."""
        self._promised_bytes = self._memory.promised_bytes()
        self.replication.pump()
        for copy, number in self._service.replicas.damaged() if self._service else ():
            self._events.add(
                "corrupt",
                state=state_to_json(copy.state),
                rank=copy.shard.rank,
                tier=copy.tier.value,
                why=f"piece {number} of the replica that is held here",
            )

    def counts(self) -> dict[str, object]:
        """Return what was counted so far, by name."""
        service = self._service
        return {
            **self.replication.counts(),
            "peer_port": service.server.port if service else None,
            "held_for_others_bytes": service.replicas.held_bytes if service else 0,
            "keeps": sorted(shard_to_json(shard) for shard in self._keep)[:64],
        }

    def close(self) -> None:
        """Leave the peers, and give back what is held for them."""
        self.replication.stop()
        if self._service is not None:
            self._service.close()
            self._service = None

    # Behind it.

    def _end_service(self) -> None:
        service, self._service = self._service, None
        self.replication.stop()
        self.replication.job = None
        if service is not None:
            # Its threads may wait for ours.
            self._jobs.fetch(service.close, lambda _none, _error: None)

    def _replicas_of(self, state: StateId) -> dict[Shard, Copy]:
        return {copy.shard: copy for copy in self.copies() if copy.state == state}

    def _own_is_damaged(self, state: StateId, shard: Shard, number: int) -> None:
        self._events.add(
            "corrupt",
            state=state_to_json(state),
            rank=shard.rank,
            tier="memory",
            why=f"piece {number} of it is not what was sealed",
        )
        # No commit may rest on it; a committed one has its other copies.
        self._memory.gate.give_up(state)


def _first_of(makes: Sequence[Callable[[], TransferServer]]) -> TransferServer:
    """Return what the first of *makes* returns that can be made."""
    for make in makes[:-1]:
        with suppress(CheckpointError):
            return _beside(make)
    return _beside(makes[-1])


def _beside(make: Callable[[], TransferServer]) -> TransferServer:
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
