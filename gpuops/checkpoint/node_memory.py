"""What memory holds of a node's states: the slots behind the gate, and the digests of each.

Used by one thread at a time; only `SealedSlot.hash` and the views may be read by others meanwhile.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.digest import digest_of
from gpuops.checkpoint.keeper import SLOTS_MAX, SLOTS_MIN
from gpuops.checkpoint.memory_room import available_bytes
from gpuops.checkpoint.slots import Gate, SlotKey
from gpuops.checkpoint.states import (
    IMAGE_BYTES_MAX,
    CheckpointError,
    Copy,
    CorruptError,
    Digest,
    KeeperError,
    Shard,
    StateId,
    Tier,
)
from gpuops.units import format_bytes

ARENAS_MAX = 1024
MARGIN_BYTES = 2**30
MARGIN_SHARE = 0.05
_LENGTH_BYTES = 8

Available = Callable[[], int]


@dataclass(slots=True)
class Arena:
    """One rank's slots of one layout, by number; ``n_made`` is the next number."""

    number: int
    shard: Shard
    layout: str
    nbytes: int
    slots: dict[int, SlotMemory] = field(default_factory=dict)
    n_made: int = 0


def margin_bytes(room_bytes: int) -> int:
    """Return how many of the available bytes are not for checkpoints."""
    return max(int(room_bytes * MARGIN_SHARE), MARGIN_BYTES)


def share(memory: SlotMemory, *, writable: bool) -> SlotMemory:
    """Return the same memory once more, with a descriptor of its own."""
    return SlotMemory.attach(handle(memory, writable=writable), writable=writable)


def handle(memory: SlotMemory, *, writable: bool) -> int:
    """Return a new descriptor of *memory*; one that is not writable cannot be mapped to write."""
    if writable:
        return os.dup(memory.fd)
    return handle_of(memory.fd)


def handle_of(fd: int) -> int:
    """Return a new descriptor of what *fd* is of, to be read only."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class Held:
    """One whole shard in memory. ``memory`` stays as it is while its state is pinned."""

    copy: Copy
    slot: SlotKey
    memory: SlotMemory


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A slot that a rank has sealed, to be hashed."""

    key: SlotKey
    state: StateId
    layout: str
    view: memoryview

    def hash(self) -> Digest:
        """Return the digest of the image.

        Raises:
            CorruptError: What stands in the slot is no image of the layout it was reserved for.
        """
        with self.view[:_LENGTH_BYTES] as length:
            begin = _LENGTH_BYTES + int.from_bytes(length, "little")
        if begin > len(self.view):
            raise CorruptError(f"the header of an image of {len(self.view)} bytes is not written")
        with self.view[:begin] as header:
            found = blake3(header).hexdigest()
        if found != self.layout:
            raise CorruptError(
                f"the header in the slot ({found[:16]}…) is not that of the layout "
                f"({self.layout[:16]}…)"
            )
        return digest_of(self.view)


@dataclass(slots=True)
class NodeMemory:
    """The memory of one node, named *node*.

    *available* says how many bytes could be taken, *promised_elsewhere* how many of them are
    promised to others than this node's ranks.
    """

    node: str
    available: Available = available_bytes
    promised_elsewhere: Callable[[], int] = lambda: 0
    gate: Gate = field(default_factory=Gate)
    _arenas: dict[int, Arena] = field(default_factory=dict)
    _digests: dict[tuple[StateId, SlotKey], Digest] = field(default_factory=dict)
    _populated: set[int] = field(default_factory=set)
    _n_arenas: int = 0

    def reserve(
        self, local_rank: int, shard: Shard, layout: str, nbytes: int, n_slots: int
    ) -> Arena:
        """Return the rank's arena of *layout*, with at least *n_slots* slots.

        Raises:
            KeeperError: The memory of this machine does not hold it, or the request cannot be.
        """
        if not 0 < nbytes <= IMAGE_BYTES_MAX or not SLOTS_MIN <= n_slots <= SLOTS_MAX:
            raise KeeperError(f"there are no {n_slots} slots of {nbytes} bytes")
        self.release()
        arena = self._find(shard, layout, nbytes)
        n_missing = n_slots - (len(arena.slots) if arena else 0)
        if n_missing > 0:
            self._check_room(shard, nbytes, n_slots, n_missing)
        if arena is None:
            if len(self._arenas) >= ARENAS_MAX:
                raise KeeperError(f"{ARENAS_MAX} layouts are in memory: no more are taken")
            self._n_arenas += 1
            arena = Arena(self._n_arenas, shard, layout, nbytes)
            self._arenas[arena.number] = arena
        for _ in range(n_missing):
            name = f"gpuops-{shard.rank}-of-{shard.world}-{arena.number}-{arena.n_made}"
            arena.slots[arena.n_made] = SlotMemory.create(name, nbytes)
            arena.n_made += 1
        self.gate.register(local_rank, arena.number, arena.slots)
        return arena

    def memory(self, key: SlotKey) -> SlotMemory:
        """Return the memory of a slot that the gate knows."""
        return self._arenas[key.arena].slots[key.index]

    def unpopulated(self) -> list[SlotMemory]:
        """Return the slots whose memory is not yet taken."""
        return [
            memory
            for arena in self._arenas.values()
            for memory in arena.slots.values()
            if id(memory) not in self._populated
        ]

    def populated(self, memory: SlotMemory) -> None:
        """Take note that the memory of a slot is taken."""
        if any(memory is mine for arena in self._arenas.values() for mine in arena.slots.values()):
            self._populated.add(id(memory))

    def seal(self, local_rank: int, state: StateId) -> SealedSlot | None:
        """Return what is to be hashed, None where the state was given up meanwhile."""
        key = self.gate.seal(local_rank, state)
        if key is None:
            return None
        arena = self._arenas[key.arena]
        view = memoryview(arena.slots[key.index].view)
        return SealedSlot(key, state, arena.layout, view)

    def hashed(self, sealed: SealedSlot, digest: Digest) -> bool:
        """Take note of a slot's digest; say whether its state is whole by that."""
        self._digests[sealed.state, sealed.key] = digest
        is_whole = self.gate.verified(sealed.key, sealed.state)
        kept = {*self.gate.whole(), self.gate.in_flight}
        for key in [k for k in self._digests if k[0] not in kept]:
            del self._digests[key]
        return is_whole

    def held(self, state: StateId) -> dict[Shard, Held]:
        """Return the shards of *state*; empty where it is not whole."""
        found: dict[Shard, Held] = {}
        for key in self.gate.whole().get(state, {}).values():
            arena = self._arenas[key.arena]
            digest = self._digests[state, key]
            copy = Copy(state, arena.shard, arena.layout, digest, Tier.MEMORY, self.node)
            found[arena.shard] = Held(copy, key, arena.slots[key.index])
        return found

    def states(self) -> list[StateId]:
        """Return the states that are whole, the newest first."""
        return sorted(self.gate.whole(), reverse=True)

    def release(self) -> int:
        """Give back the memory that nobody needs; return how many bytes."""
        freed = 0
        for key in self.gate.release():
            arena = self._arenas[key.arena]
            memory = arena.slots.pop(key.index)
            self._populated.discard(id(memory))
            memory.close()
            freed += arena.nbytes
            if not arena.slots:
                del self._arenas[key.arena]
        return freed

    def reserved_bytes(self) -> int:
        """Return what all slots have when all of their memory is taken."""
        return sum(arena.nbytes * len(arena.slots) for arena in self._arenas.values())

    def populated_bytes(self) -> int:
        """Return what the slots have that were populated."""
        return self.reserved_bytes() - self.promised_bytes()

    def promised_bytes(self) -> int:
        """Return what the slots have that are still to be populated."""
        return sum(memory.nbytes for memory in self.unpopulated())

    def counts(self) -> dict[str, Any]:
        """Return what was counted so far, by name; a state is [epoch, step]."""
        gate = self.gate
        return {
            "granted": gate.granted,
            "committed": gate.committed,
            "given_up": gate.given_up,
            "skipped": {reason.value: n for reason, n in gate.skipped.items()},
            "newest": None if gate.newest is None else [gate.newest.epoch, gate.newest.step],
            "epoch": gate.epoch,
            "states": [[state.epoch, state.step] for state in self.states()],
            "reserved_bytes": self.reserved_bytes(),
            "populated_bytes": self.populated_bytes(),
        }

    def close(self) -> None:
        """Give all memory back."""
        for arena in self._arenas.values():
            for memory in arena.slots.values():
                memory.close()
        self._arenas.clear()

    def _find(self, shard: Shard, layout: str, nbytes: int) -> Arena | None:
        for arena in self._arenas.values():
            if (arena.shard, arena.layout, arena.nbytes) == (shard, layout, nbytes):
                return arena
        return None

    def check_fits(self, nbytes: int) -> None:
        """Say nothing where *nbytes* more can be taken; for any thread.

        Raises:
            KeeperError: They cannot; says with which figures.
        """
        room, margin = self._room_bytes()
        if nbytes + margin > room:
            raise KeeperError(
                f"{format_bytes(nbytes)} do not fit into memory: {format_bytes(room)} are "
                f"available, and {format_bytes(margin)} of that are left to the system"
            )

    def _check_room(self, shard: Shard, nbytes: int, n_slots: int, n_missing: int) -> None:
        """Refuse before it is too late: what is reserved is taken only little by little."""
        room, margin = self._room_bytes()
        promised = self.promised_bytes() + self.promised_elsewhere()
        needed = n_missing * nbytes
        if needed + promised + margin > room:
            raise KeeperError(
                f"the checkpoints of rank {shard.rank} do not fit into memory: {n_slots} slots of "
                f"{format_bytes(nbytes)} need {format_bytes(needed)} more; "
                f"{format_bytes(room)} are available, {format_bytes(promised)} of it are promised "
                f"to other slots and {format_bytes(margin)} are left to the system; "
                "save into a directory only, or give the job more memory"
            )

    def _room_bytes(self) -> tuple[int, int]:
        """Return how many bytes are available, and how many of them are not for us."""
        try:
            room = self.available()
        except CheckpointError as exc:
            raise KeeperError(str(exc)) from exc
        return room, margin_bytes(room)
