"""The states that a node has in memory, and the memory reserved for other nodes.

Not thread-safe; only `WrittenSlot.hash` and the views may be used by other threads meanwhile.
"""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.keeper.messages import SLOTS_MAX, SLOTS_MIN
from gpuops.checkpoint.memory.available import available_bytes
from gpuops.checkpoint.memory.buffer_table import BufferTable
from gpuops.checkpoint.memory.copy_stamp import create_stamp, is_stamped
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.memory.state_record import SlotKey, SlotPhase
from gpuops.checkpoint.types import (
    IMAGE_BYTES_MAX,
    CheckpointError,
    CorruptError,
    Digest,
    KeeperError,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.units import format_bytes

POOLS_MAX = 1024
SYSTEM_RESERVE_BYTES = 2**30
SYSTEM_RESERVE_SHARE = 0.05
_LENGTH_BYTES = 8

AvailableBytes = Callable[[], int]


@dataclass(slots=True)
class BufferPool:
    """One rank's slots of one layout, by number; ``next_index`` is the next number.

    ``stamp``: see `gpuops.checkpoint.memory.copy_stamp`.
    """

    number: int
    shard: Shard
    layout: str
    nbytes: int
    stamp: SharedBuffer
    slots: dict[int, SharedBuffer] = field(default_factory=dict)
    next_index: int = 0


def system_reserve_bytes(room_bytes: int) -> int:
    """Return how many of the available bytes are reserved for the system."""
    return max(int(room_bytes * SYSTEM_RESERVE_SHARE), SYSTEM_RESERVE_BYTES)


def duplicate_fd(memory: SharedBuffer, *, writable: bool) -> int:
    """Return a new descriptor of *memory*; a read-only one cannot be mapped for writing."""
    if writable:
        return os.dup(memory.fd)
    return open_read_only(memory.fd)


def open_read_only(fd: int) -> int:
    """Return a new, read-only descriptor of the file of *fd*."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


@dataclass(frozen=True, slots=True)
class MemoryShard:
    """One complete shard in memory. ``memory`` is unchanged while its state is pinned."""

    copy: ShardCopy
    slot: SlotKey
    memory: SharedBuffer


@dataclass(frozen=True, slots=True)
class WrittenSlot:
    """A slot that a rank has written, to be hashed."""

    key: SlotKey
    state: StateId
    layout: str
    view: memoryview
    shard: Shard

    def hash(self) -> Digest:
        """Return the digest of the image.

        Raises:
            CorruptError: The slot has no image of the layout it was reserved for.
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
        return compute_digest(self.view)


@dataclass(slots=True)
class NodeMemory:
    """The memory of one node, named *node*.

    *available* returns how many bytes could be allocated, *unpopulated_elsewhere* how many of them
    are reserved for other users than this node's ranks.
    """

    node: str
    available: AvailableBytes = available_bytes
    unpopulated_elsewhere: Callable[[], int] = lambda: 0
    buffer_table: BufferTable = field(default_factory=BufferTable)
    _pools: dict[int, BufferPool] = field(default_factory=dict)
    _populated: set[int] = field(default_factory=set)
    _n_pools: int = 0

    def reserve(
        self, local_rank: int, shard: Shard, layout: str, nbytes: int, n_slots: int
    ) -> BufferPool:
        """Return the rank's pool of *layout*, with at least *n_slots* slots.

        Raises:
            KeeperError: It does not fit into this machine's memory, or the request is invalid.
        """
        if not 0 < nbytes <= IMAGE_BYTES_MAX or not SLOTS_MIN <= n_slots <= SLOTS_MAX:
            raise KeeperError(f"invalid request: {n_slots} slots of {nbytes} bytes")
        self.release()
        pool = self._find(shard, layout, nbytes)
        n_missing = n_slots - (len(pool.slots) if pool else 0)
        if n_missing > 0:
            next_pool = pool.number if pool else None
            self._free(self.buffer_table.release_empty(local_rank, next_pool))
            self._check_room(shard, nbytes, n_slots, n_missing)
        if pool is None:
            if len(self._pools) >= POOLS_MAX:
                raise KeeperError(f"{POOLS_MAX} layouts are in memory; the limit is reached")
            self._n_pools += 1
            stamp = create_stamp(f"gpuops-stamp-{shard.rank}-{self._n_pools}")
            pool = BufferPool(self._n_pools, shard, layout, nbytes, stamp)
            self._pools[pool.number] = pool
        for _ in range(n_missing):
            name = f"gpuops-{shard.rank}-of-{shard.world}-{pool.number}-{pool.next_index}"
            pool.slots[pool.next_index] = SharedBuffer.create(name, nbytes)
            pool.next_index += 1
        self.buffer_table.register(local_rank, pool.number, pool.slots)
        return pool

    def buffer(self, key: SlotKey) -> SharedBuffer:
        return self._pools[key.pool].slots[key.index]

    def unpopulated(self) -> list[SharedBuffer]:
        return [
            memory
            for pool in self._pools.values()
            for memory in pool.slots.values()
            if id(memory) not in self._populated
        ]

    def mark_populated(self, memory: SharedBuffer) -> None:
        if any(
            memory is own_buffer
            for pool in self._pools.values()
            for own_buffer in pool.slots.values()
        ):
            self._populated.add(id(memory))

    def mark_written(self, local_rank: int, state: StateId) -> WrittenSlot | None:
        """Return the slot to hash, None where that is done or the state was given up meanwhile."""
        key = self.buffer_table.mark_written(local_rank, state)
        return None if key is None else self._written_slot(key, state)

    def take_stamped(self) -> list[WrittenSlot]:
        """Return the slots to hash that ranks have written and not reported."""
        table = self.buffer_table
        saved = None if table.in_flight is None else table.find(table.in_flight)
        if saved is None:
            return []
        keys = saved.mark_stamped(lambda key: is_stamped(self._pools[key.pool].stamp, saved.number))
        return [self._written_slot(key, saved.state) for key in keys]

    def _written_slot(self, key: SlotKey, state: StateId) -> WrittenSlot:
        pool = self._pools[key.pool]
        view = memoryview(pool.slots[key.index].view)
        return WrittenSlot(key, state, pool.layout, view, pool.shard)

    def is_last_to_verify(self, written: WrittenSlot) -> bool:
        """Return whether all other slots of the state of *written* are verified."""
        saved = self.buffer_table.find(written.state)
        if saved is None:
            return False
        waiting = {saved.slots[r] for r in saved.slots if saved.phases[r] is not SlotPhase.VERIFIED}
        return waiting == {written.key}

    def record_digest(self, written: WrittenSlot, digest: Digest) -> bool:
        """Record a slot's digest; return whether that completes its state."""
        saved = self.buffer_table.find(written.state)
        if saved is None:
            return False
        saved.digests[written.key] = digest
        return self.buffer_table.mark_verified(written.key, written.state)

    def complete_shards(self, state: StateId) -> dict[Shard, MemoryShard]:
        """Return the shards of *state*; empty where it is not complete."""
        found: dict[Shard, MemoryShard] = {}
        saved = self.buffer_table.complete.get(state)
        if saved is None:
            return found
        for key in saved.slots.values():
            pool, digest = self._pools[key.pool], saved.digests[key]
            copy = ShardCopy(state, pool.shard, pool.layout, digest, Tier.MEMORY, self.node)
            found[pool.shard] = MemoryShard(copy, key, pool.slots[key.index])
        return found

    def complete_states(self) -> list[StateId]:
        """Return the complete states, the newest first."""
        return sorted(self.buffer_table.complete_states(), reverse=True)

    def release(self) -> int:
        """Release the memory that is no longer needed; return how many bytes."""
        return self._free(self.buffer_table.release())

    def _free(self, keys: Iterable[SlotKey]) -> int:
        freed = 0
        for key in keys:
            pool = self._pools[key.pool]
            memory = pool.slots.pop(key.index)
            self._populated.discard(id(memory))
            memory.close()
            freed += pool.nbytes
            if not pool.slots:
                pool.stamp.close()
                del self._pools[key.pool]
        return freed

    def reserved_bytes(self) -> int:
        """Return the size of all slots once they are populated."""
        return sum(pool.nbytes * len(pool.slots) for pool in self._pools.values())

    def populated_bytes(self) -> int:
        return self.reserved_bytes() - self.unpopulated_bytes()

    def unpopulated_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.unpopulated())

    def counts(self) -> dict[str, Any]:
        table = self.buffer_table
        return {
            "granted": table.n_granted,
            "committed": table.n_committed,
            "given_up": table.n_given_up,
            "skipped": {reason.value: n for reason, n in table.skipped.items()},
            "newest": None
            if table.last_committed is None
            else [table.last_committed.epoch, table.last_committed.step],
            "epoch": table.epoch,
            "states": [[state.epoch, state.step] for state in self.complete_states()],
            "reserved_bytes": self.reserved_bytes(),
            "populated_bytes": self.populated_bytes(),
        }

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stamp.close()
            for memory in pool.slots.values():
                memory.close()
        self._pools.clear()

    def _find(self, shard: Shard, layout: str, nbytes: int) -> BufferPool | None:
        for pool in self._pools.values():
            if (pool.shard, pool.layout, pool.nbytes) == (shard, layout, nbytes):
                return pool
        return None

    def check_fits(self, nbytes: int) -> None:
        """Raise unless *nbytes* more fit; thread-safe.

        Raises:
            KeeperError: They do not fit; the message has the figures.
        """
        free_bytes, reserve_bytes = self._available_and_reserve()
        if nbytes + reserve_bytes > free_bytes:
            raise KeeperError(
                f"{format_bytes(nbytes)} do not fit into memory: {format_bytes(free_bytes)} are "
                f"available, and {format_bytes(reserve_bytes)} of that are reserved for the system"
            )

    def _check_room(self, shard: Shard, nbytes: int, n_slots: int, n_missing: int) -> None:
        """Refuse early: reserved memory is populated only gradually."""
        free_bytes, reserve_bytes = self._available_and_reserve()
        unpopulated = self.unpopulated_bytes() + self.unpopulated_elsewhere()
        needed = n_missing * nbytes
        if needed + unpopulated + reserve_bytes > free_bytes:
            raise KeeperError(
                f"the checkpoints of rank {shard.rank} do not fit into memory: {n_slots} slots of "
                f"{format_bytes(nbytes)} need {format_bytes(needed)} more; "
                f"{format_bytes(free_bytes)} are available, {format_bytes(unpopulated)} of it "
                f"are reserved for other slots and {format_bytes(reserve_bytes)} for the system; "
                "save into a directory only, or give the job more memory"
            )

    def _available_and_reserve(self) -> tuple[int, int]:
        """Return how many bytes are available, and how many of them are reserved for the system."""
        try:
            free_bytes = self.available()
        except CheckpointError as exc:
            raise KeeperError(str(exc)) from exc
        return free_bytes, system_reserve_bytes(free_bytes)


_BLOCK_BYTES = 512  # of `st_blocks`, stat(2)


class ReplicaAllocator:
    """Makes the memory of replicas where *available* bytes suffice. Thread-safe.

    *unpopulated* returns how much of that is reserved for this node's own ranks, which come first.
    """

    def __init__(self, available: AvailableBytes, unpopulated: Callable[[], int]) -> None:
        self._available = available
        self._unpopulated_own = unpopulated
        self._lock = threading.Lock()
        self._allocated: list[SharedBuffer] = []

    def allocate(self, name: str, nbytes: int) -> SharedBuffer:
        """Return new memory; the kernel allocates it as it is written.

        Raises:
            KeeperError: It does not fit; the message has the figures.
            CheckpointError: The kernel refuses.
        """
        with self._lock:
            free_bytes = self._available()
            reserve_bytes = system_reserve_bytes(free_bytes)
            unpopulated = self._unpopulated_own() + self._unpopulated_bytes()
            if nbytes + unpopulated + reserve_bytes > free_bytes:
                raise KeeperError(
                    f"a replica of {format_bytes(nbytes)} does not fit into memory: "
                    f"{format_bytes(free_bytes)} are available, {format_bytes(unpopulated)} of "
                    "it are reserved for other slots and "
                    f"{format_bytes(reserve_bytes)} for the system"
                )
            memory = SharedBuffer.create(name, nbytes)
            self._allocated.append(memory)
            return memory

    def unpopulated_bytes(self) -> int:
        with self._lock:
            return self._unpopulated_bytes()

    def _unpopulated_bytes(self) -> int:
        open_buffers: list[SharedBuffer] = []
        unpopulated = 0
        for memory in self._allocated:
            try:
                taken = os.fstat(memory.fd).st_blocks * _BLOCK_BYTES
            except (CheckpointError, OSError):
                continue  # it is closed
            open_buffers.append(memory)
            unpopulated += max(memory.nbytes - taken, 0)
        self._allocated = open_buffers
        return unpopulated
