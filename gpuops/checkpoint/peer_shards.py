"""The shards of one state that other nodes hold: each is fetched once, when it is first wanted."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.image import read_layout
from gpuops.checkpoint.messages import shard_to_json, state_to_json
from gpuops.checkpoint.states import (
    CheckpointError,
    Copy,
    Digest,
    KeeperError,
    Shard,
    StateId,
    Tier,
)
from gpuops.checkpoint.transfer_auth import JobPass
from gpuops.checkpoint.transfer_client import Fetched, fetch, fetch_digest
from gpuops.checkpoint.transfer_line import Limits
from gpuops.checkpoint.transfer_team import Peer, Terms

# A peer that has moved nothing on for so long is given up: the next holder is asked.
PATIENCE_S = 10.0
# The slowest that is still waited for.
_RATE_MIN_BYTES_S = 2 * 2**20
_DEADLINE_MIN_S = 60.0
_LIMITS = Limits(stall_s=5.0)

# Called by any thread with the kind of an event and its fields.
Told = Callable[[str, Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class Holders:
    """Who has a shard, in the order in which they are asked.

    ``root`` is that of the digest which the bytes must have, "" where any will do that a holder has
    verified.
    """

    peers: tuple[Peer, ...]
    root: str = ""


@dataclass(slots=True)
class _Place:
    """One shard; whoever has the lock fetches it, the others wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    memory: SlotMemory | None = None
    copy: Copy | None = None  # that which `memory` is, where it says of what shard it is
    error: CheckpointError | None = None


class PeerShards:
    """What peers hold of *state*, and the memory into which it is fetched. Thread-safe.

    *make* returns that memory, or raises CheckpointError where there is no room.
    """

    def __init__(
        self,
        state: StateId,
        holders: Mapping[Shard, Holders],
        job: JobPass,
        make: Callable[[int], SlotMemory],
        told: Told,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.state = state
        self._holders = dict(holders)
        self._job, self._make, self._told = job, make, told
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._places = {shard: _Place() for shard in holders}

    def __contains__(self, shard: Shard) -> bool:
        return shard in self._holders

    @property
    def world(self) -> int | None:
        """Return the size of the world of which the shards are."""
        return next((shard.world for shard in self._holders), None)

    @property
    def is_closed(self) -> bool:
        """Say whether nothing more can be had."""
        return self._stop.is_set()

    def again(self) -> "PeerShards":
        """Return the same with nothing fetched."""
        return PeerShards(
            self.state,
            self._holders,
            self._job,
            self._make,
            self._told,
            patience_s=self._patience_s,
        )

    def get(self, shard: Shard) -> SlotMemory:
        """Return the bytes of *shard*, every one verified; they stay until `close`.

        Raises:
            CheckpointError: No holder could serve; says what was wrong with each.
        """
        place = self._places[shard]
        with place.lock:
            if place.memory is None and place.error is None:
                try:
                    place.memory, digest = self._fetched(shard)
                    place.copy = self._copy_of(shard, place.memory, digest)
                except CheckpointError as exc:
                    place.error = exc
            if place.error is not None:
                raise place.error
            assert place.memory is not None
            if self.is_closed:
                place.memory.close()
                raise KeeperError(f"newer workers have begun: {shard.file_name} is not wanted")
            return place.memory

    def fetched(self) -> Iterator[tuple[Copy, SlotMemory]]:
        """Yield what was fetched by now, verified, and held by nobody yet; until `close`."""
        for place in self._places.values():
            if place.memory is not None and place.copy is not None:
                yield place.copy, place.memory

    def close(self) -> None:
        """End what is being fetched, and give all memory back."""
        self._stop.set()
        for place in self._places.values():
            # Whoever fetches just now sees that it is over, and closes what it has.
            if place.lock.acquire(blocking=False):
                try:
                    if place.memory is not None:
                        place.memory.close()
                finally:
                    place.lock.release()

    def _fetched(self, shard: Shard) -> tuple[SlotMemory, Digest]:
        holders = self._holders[shard]
        left, seen, why = list(holders.peers), set[str](), list[str]()
        while left:
            if self.is_closed:
                raise KeeperError(f"newer workers have begun: {shard.file_name} is not wanted")
            peer = left.pop(0)
            try:
                digest = self._digest(peer, shard, holders.root)
                if digest.root in seen:
                    continue
                seen.add(digest.root)
                return self._bytes([peer, *left], shard, digest), digest
            except CheckpointError as exc:
                why.append(str(exc))
                self._failed(shard, peer.name, str(exc))
        reasons = "; ".join(why) or "no node has it"
        raise KeeperError(f"the shard of rank {shard.rank} of {self.state}: {reasons}")

    def _copy_of(self, shard: Shard, memory: SlotMemory, digest: Digest) -> Copy | None:
        try:
            layout = read_layout(memory.view)
        except CheckpointError:
            return None  # whoever loads it will tell
        if layout.shard != shard:
            return None
        return Copy(self.state, shard, layout.hash, digest, Tier.MEMORY, "")

    def _digest(self, peer: Peer, shard: Shard, root: str) -> Digest:
        return fetch_digest(peer, self._job, (self.state, shard), root, self._terms(0))

    def _bytes(self, peers: list[Peer], shard: Shard, digest: Digest) -> SlotMemory:
        memory = self._make(digest.nbytes)
        wanted = Copy(self.state, shard, "", digest, Tier.PEER, peers[0].name)
        try:
            done = fetch(peers, self._job, wanted, memory.view, self._terms(digest.nbytes))
        except BaseException:  # boundary: nobody else gives the memory back
            memory.close()
            raise
        self._tell(shard, done)
        return memory

    def _terms(self, nbytes: int) -> Terms:
        deadline_s = _DEADLINE_MIN_S + nbytes / _RATE_MIN_BYTES_S
        return Terms(
            deadline_s=deadline_s, patience_s=self._patience_s, limits=_LIMITS, stop=self._stop
        )

    def _tell(self, shard: Shard, done: Fetched) -> None:
        # Who was asked before the last failed, in this order.
        for (name, _nbytes), why in zip(done.served, done.failed, strict=False):
            self._failed(shard, name, why)
        self._told(
            "fetched",
            {
                "state": state_to_json(self.state),
                "shard": shard_to_json(shard),
                "holder": done.served[-1][0] if done.served else "",
                "seconds": done.seconds,
                "bytes": done.received_bytes,
            },
        )

    def _failed(self, shard: Shard, holder: str, why: str) -> None:
        if not self.is_closed:
            fields = {"state": state_to_json(self.state), "shard": shard_to_json(shard)}
            self._told("fetch_failed", {**fields, "holder": holder, "why": why})
