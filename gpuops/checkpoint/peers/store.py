"""The replicas that a holder has for other nodes: two slots for each shard, and their admission.

A push never overwrites the slot with the newest committed state, nor one that is being read. A
slot counts as a copy again only when every byte in it is verified. An owner has one state in
flight at a time: a push of the next one implies that the last was committed or given up.
"""

import threading
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial

from gpuops.checkpoint.digest import HASH_BYTES
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.peers.alike import (
    ComposedReplica,
    OwnImages,
    PiecePlans,
    Rest,
    no_images,
    roots_of,
)
from gpuops.checkpoint.transfer.chunks import ChunkTracker, PinnedCopy, once
from gpuops.checkpoint.transfer.wire import PushOffer, TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import (
    CHUNK_BYTES,
    CheckpointError,
    CorruptError,
    Digest,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.units import format_bytes

N_SLOTS = 2  # with one, the next push would overwrite the newest state
_OLDEST = StateId(0, 0)


@dataclass(eq=False, slots=True)
class _ReplicaSlot:
    memory: SharedBuffer
    nbytes: int
    copy: ShardCopy | None = None  # complete and verified
    inbox: "ReplicaInbox | None" = None  # being received
    previous_digest: Digest | None = None  # of the former content
    rest: Rest | None = None  # where it has only the remainder of the copy
    pins: int = 0  # number of readers

    @property
    def is_in_use(self) -> bool:
        return self.pins > 0 or (self.inbox is not None and self.inbox.n_writers > 0)


@dataclass(eq=False, slots=True)
class ReplicaInbox:
    """A replica that is being received into a slot; see `transfer.server.Inbox`."""

    store: "ReplicaStore"
    slot: _ReplicaSlot
    push: PushOffer
    tracker: ChunkTracker
    image: Digest | None = None  # where the remainder of it is received
    rest: Rest | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    n_writers: int = 0
    is_cancelled: bool = False

    def is_wanted(self) -> bool:
        return not self.is_cancelled

    def check(self) -> Generator[None, None, None]:
        return self.store.check_rest(self)

    def complete(self) -> None:
        self.store.complete(self)

    def detach(self) -> None:
        self.store.detach(self)


class ReplicaStore:
    """The replicas that *node* has for others: source and sink of its server. Thread-safe.

    *allocate* is called with a name and a size; its `CheckpointError` or OSError means "no room".
    All slots together have at most *bytes_max*. *pin_own* returns what the own ranks saved of a
    state, or raises TransferRefusedError.
    """

    def __init__(
        self,
        node: str,
        allocate: Callable[[str, int], SharedBuffer],
        *,
        bytes_max: int,
        chunk_bytes: int = CHUNK_BYTES,
        pin_own: Callable[[StateId], OwnImages] | None = None,
    ) -> None:
        self._node, self._allocate = node, allocate
        self._pin_own = pin_own or no_images
        self._plans = PiecePlans()
        self._bytes_max, self._chunk_bytes = bytes_max, chunk_bytes
        self._lock = threading.Lock()
        self._slots: dict[Shard, list[_ReplicaSlot]] = {}
        self._closing: list[_ReplicaSlot] = []
        self._committed: StateId | None = None
        self._damaged: list[tuple[ShardCopy, int]] = []

    # Calls of the keeper.

    def keep_only(self, shards: Collection[Shard]) -> None:
        """Be a holder of *shards* from now on; the memory of others is released when unused."""
        with self._lock:
            for shard in set(self._slots) - set(shards):
                for slot in self._slots.pop(shard):
                    self._retire(slot)
            for shard in shards:
                self._slots.setdefault(shard, [])

    def adopt(self, copy: ShardCopy, memory: SharedBuffer, nbytes: int) -> bool:
        """Take *copy*, whose bytes *memory* has, verified; return whether it was needed.

        Then the store owns the memory, until a `keep_only` without it.
        """
        with self._lock:
            slots = self._slots.setdefault(copy.shard, [])
            there = any(s.copy is not None and s.copy.state == copy.state for s in slots)
            if there or len(slots) >= N_SLOTS:
                return False
            slots.append(_ReplicaSlot(memory, nbytes, copy))
            return True

    def commit(self, state: StateId) -> None:
        """Record that *state* is committed in the whole job.

        It is overwritten only once a newer one is committed too.
        """
        with self._lock:
            self._committed = max(self._committed or state, state)

    def begin_epoch(self, epoch: int) -> None:
        """Drop incomplete replicas of older epochs: no owner sends the rest."""
        with self._lock:
            for slot in self._all_slots():
                if slot.inbox is not None and slot.inbox.push.state.epoch < epoch:
                    self._drop_inbox(slot)

    def copies(
        self, roots: Callable[[StateId], Mapping[Shard, str]] = lambda _state: {}
    ) -> list[ShardCopy]:
        """Return the complete copies, newest first; *roots* are those of images elsewhere here."""
        with self._lock:
            found = [
                slot.copy
                for slot in self._all_slots()
                if slot.copy is not None
                and (slot.rest is None or slot.rest.roots.items() <= roots(slot.copy.state).items())
            ]
        return sorted(found, key=lambda copy: (copy.state, copy.shard), reverse=True)

    def take_damaged(self) -> list[tuple[ShardCopy, int]]:
        """Return the copies found corrupt since the last call, and the chunk of each."""
        with self._lock:
            found, self._damaged = self._damaged, []
        return found

    @property
    def held_bytes(self) -> int:
        """Return the size of all slots."""
        with self._lock:
            return self._held_bytes()

    def close(self) -> None:
        """Release all memory; the server must have been closed before."""
        with self._lock:
            for slot in [*self._all_slots(), *self._closing]:
                slot.memory.close()
            self._slots.clear()
            self._closing.clear()

    # Calls of the server.

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return the copy of *shard* of *state*, pinned, None where it is not complete here."""
        found = self.open_any(state, shard)
        if found is not None and found.rest is not None:
            found.pinned.release()
            return None
        return found.pinned if found is not None else None

    def open_any(self, state: StateId, shard: Shard) -> ComposedReplica | None:
        """As `open`, also where the slot has only the remainder of the copy."""
        with self._lock:
            for slot in self._slots.get(shard, ()):
                if (copy := slot.copy) is not None and copy.state == state:
                    slot.pins += 1
                    release = once(partial(self._unpin, slot))
                    on_damage = partial(self._on_damage, slot, copy)
                    memory = slot.memory
                    pinned = PinnedCopy(memory.fd, copy.digest, release, on_damage, memory.view)
                    return ComposedReplica(pinned, slot.rest)
        return None

    def accept(
        self, push: PushOffer, digest: Digest, image: Digest | None = None
    ) -> ReplicaInbox | None:
        """Return the inbox for *push*, None where its copy is already complete here.

        Raises:
            TransferRefusedError: Not needed, no room, all slots in use; or *digest* is of the
                remainder of *image*, and the rest is not here.
        """
        roots: Mapping[Shard, str] | None = None
        if image is not None:
            own = self._pin_own(push.state)
            roots = roots_of(own.shards)
            own.release()
        with self._lock:
            self._drop_incomplete(push, roots)
            inbox, is_new = self._find_or_open_inbox(push, digest, image)
            if inbox is not None:
                inbox.n_writers += 1
        if inbox is None:
            return None
        if is_new:
            try:
                self._find_unchanged(inbox)
            finally:
                inbox.ready.set()
        else:
            inbox.ready.wait()
        return inbox

    # Admission.

    def _drop_incomplete(self, push: PushOffer, roots: Mapping[Shard, str] | None) -> None:
        """Drop the copy whose rest is gone, or which its owner sends whole."""
        for slot in self._slots.get(push.shard, ()):
            is_same = slot.copy is not None and slot.copy.state == push.state
            if is_same and slot.rest is not None and slot.rest.roots != roots:
                slot.copy = None

    def _find_or_open_inbox(
        self, push: PushOffer, digest: Digest, image: Digest | None
    ) -> tuple[ReplicaInbox | None, bool]:
        slots = self._slots.get(push.shard)
        what = f"{push.shard.file_name} of {push.state}"
        if slots is None:
            raise TransferRefusedError(
                TransferRefusal.NOT_WANTED, f"{self._node} is not a holder of {what}"
            )
        if push.committed is not None:
            self._committed = max(self._committed or push.committed, push.committed)
        for slot in slots:
            if slot.copy is not None and slot.copy.state == push.state:
                if slot.copy.digest.root == (image or digest).root:
                    return None, False
                raise TransferRefusedError(
                    TransferRefusal.DIFFERENT, f"{self._node} has {what} with another content"
                )
            inbox = slot.inbox
            if inbox is not None and inbox.push.state == push.state:
                if inbox.is_cancelled:
                    raise TransferRefusedError(
                        TransferRefusal.BUSY,
                        f"{self._node} is still ending an earlier push of {what}",
                    )
                if (inbox.tracker.digest, inbox.image) == (digest, image):
                    return inbox, False
                if inbox.n_writers:
                    raise TransferRefusedError(
                        TransferRefusal.DIFFERENT,
                        f"{self._node} is receiving {what} with another content",
                    )
        self._check_not_overtaken(push, slots, what)
        slot = self._free_slot(push, slots, what)
        return self._new_inbox(slot, push, digest, image), True

    def _check_not_overtaken(self, push: PushOffer, slots: list[_ReplicaSlot], what: str) -> None:
        committed = self._committed
        known = [slot.copy.state for slot in slots if slot.copy is not None]
        known += [
            s.inbox.push.state for s in slots if s.inbox is not None and not s.inbox.is_cancelled
        ]
        newest = max(known, default=push.state)
        if committed is not None and push.state < committed:
            raise TransferRefusedError(
                TransferRefusal.NOT_WANTED, f"{what} is superseded by {committed}"
            )
        if push.state < newest and push.state != committed:
            raise TransferRefusedError(
                TransferRefusal.NOT_WANTED, f"{what} is superseded by {newest}"
            )

    def _free_slot(self, push: PushOffer, slots: list[_ReplicaSlot], what: str) -> _ReplicaSlot:
        protected = self._protected_slot(slots)
        free = [slot for slot in slots if slot is not protected and not slot.is_in_use]
        # Slots without a copy are reused first; then the oldest copy.
        free.sort(key=lambda s: (s.copy is not None, s.copy.state if s.copy else _OLDEST))
        if free and (free[0].copy is None or len(slots) >= N_SLOTS):
            return self._resized(free[0], push)
        if len(slots) < N_SLOTS:
            slots.append(self._new_slot(push.shard, push.nbytes))
            return slots[-1]
        for slot in slots:
            # A state that was given up must not block the next one.
            if slot.inbox is not None and slot.inbox.push.state < push.state:
                slot.inbox.is_cancelled = True
        raise TransferRefusedError(
            TransferRefusal.BUSY,
            f"{self._node} has no free slot for {what}: all are in use or committed",
        )

    def _protected_slot(self, slots: list[_ReplicaSlot]) -> _ReplicaSlot | None:
        """Return the slot of the newest committed state; of the newest where none is known."""
        committed = self._committed
        pairs = [(slot.copy.state, slot) for slot in slots if slot.copy is not None]
        settled = [pair for pair in pairs if committed is not None and pair[0] <= committed]
        return max(settled or pairs, key=lambda pair: pair[0], default=(None, None))[1]

    def _new_slot(self, shard: Shard, nbytes: int) -> _ReplicaSlot:
        self._check_room(nbytes)
        return _ReplicaSlot(self._allocate_memory(shard, nbytes), nbytes)

    def _resized(self, slot: _ReplicaSlot, push: PushOffer) -> _ReplicaSlot:
        if slot.nbytes != push.nbytes:
            self._check_room(push.nbytes - slot.nbytes)
            memory = self._allocate_memory(push.shard, push.nbytes)
            slot.memory.close()
            slot.memory, slot.nbytes = memory, push.nbytes
            slot.copy = slot.previous_digest = slot.inbox = None
        return slot

    def _check_room(self, more_bytes: int) -> None:
        total_bytes = self._held_bytes() + more_bytes
        if total_bytes > self._bytes_max:
            raise TransferRefusedError(
                TransferRefusal.NO_ROOM,
                f"{self._node} would have {format_bytes(total_bytes)} for others; its limit is "
                f"{format_bytes(self._bytes_max)}",
            )

    def _allocate_memory(self, shard: Shard, nbytes: int) -> SharedBuffer:
        try:
            return self._allocate(f"gpuops-replica-{shard.rank:05d}", nbytes)
        except (CheckpointError, OSError) as exc:
            raise TransferRefusedError(
                TransferRefusal.NO_ROOM, f"{self._node} has no {format_bytes(nbytes)}: {exc}"
            ) from exc

    def _new_inbox(
        self, slot: _ReplicaSlot, push: PushOffer, digest: Digest, image: Digest | None
    ) -> ReplicaInbox:
        tracker = ChunkTracker(slot.memory.view, digest, chunk_bytes=self._chunk_bytes)
        if slot.copy is not None:
            slot.previous_digest = slot.copy.digest
        # From here on its content is not a valid copy.
        slot.copy = None
        slot.inbox = ReplicaInbox(self, slot, push, tracker, image)
        return slot.inbox

    def _find_unchanged(self, inbox: ReplicaInbox) -> None:
        """Find the chunks that are equal to those of the previous state: frozen weights."""
        previous, table = inbox.slot.previous_digest, inbox.tracker.digest.table
        if previous is None or previous.nbytes != inbox.tracker.digest.nbytes:
            return
        offsets = range(0, len(table), HASH_BYTES)
        same = [
            at
            for at in offsets
            if table[at : at + HASH_BYTES] == previous.table[at : at + HASH_BYTES]
        ]
        inbox.tracker.find_present(at // HASH_BYTES for at in same)

    # Calls of an inbox; see `transfer.server.Inbox`.

    def check_rest(self, inbox: ReplicaInbox) -> Generator[None, None, None]:
        """Verify the image of a remainder together with what the own ranks have of it."""
        image, push = inbox.image, inbox.push
        if image is None or inbox.rest is not None:
            return
        own = self._pin_own(push.state)
        try:
            inbox.rest = yield from self._plans.check(
                push.layout, inbox.tracker.view, image, own, chunk_bytes=self._chunk_bytes
            )
        except CorruptError as exc:
            what = f"{push.shard.file_name} of {push.state}"
            raise TransferRefusedError(
                TransferRefusal.NOT_ALIKE, f"{self._node} has no rest of {what}: {exc}"
            ) from exc
        finally:
            own.release()

    def complete(self, inbox: ReplicaInbox) -> None:
        with self._lock:
            slot, push = inbox.slot, inbox.push
            digest = inbox.image or inbox.tracker.digest
            if slot.inbox is not inbox:
                if slot.copy is not None and slot.copy.digest == digest:
                    return
                inbox.is_cancelled = True
            if inbox.is_cancelled:
                raise TransferRefusedError(
                    TransferRefusal.NOT_WANTED,
                    f"{push.shard.file_name} of {push.state} is superseded",
                )
            inbox.tracker.check_root()
            slot.copy = ShardCopy(
                push.state, push.shard, push.layout, digest, Tier.MEMORY, self._node
            )
            slot.rest, slot.inbox, slot.previous_digest = inbox.rest, None, None

    def detach(self, inbox: ReplicaInbox) -> None:
        with self._lock:
            inbox.n_writers -= 1
            if inbox.is_cancelled and inbox.n_writers == 0 and inbox.slot.inbox is inbox:
                inbox.slot.inbox = None
            self._close_unused()

    # The life of slots.

    def _unpin(self, slot: _ReplicaSlot) -> None:
        with self._lock:
            slot.pins -= 1
            self._close_unused()

    def _on_damage(self, slot: _ReplicaSlot, copy: ShardCopy, number: int) -> None:
        with self._lock:
            if slot.copy is copy:
                slot.copy = slot.previous_digest = None
                self._damaged.append((copy, number))

    def _drop_inbox(self, slot: _ReplicaSlot) -> None:
        inbox = slot.inbox
        if inbox is not None:
            inbox.is_cancelled = True
            if inbox.n_writers == 0:
                slot.inbox = None

    def _retire(self, slot: _ReplicaSlot) -> None:
        slot.copy = None
        self._drop_inbox(slot)
        self._closing.append(slot)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the slots that are not needed any more and not in use."""
        for slot in [slot for slot in self._closing if not slot.is_in_use]:
            self._closing.remove(slot)
            slot.memory.close()

    def _all_slots(self) -> list[_ReplicaSlot]:
        return [slot for slots in self._slots.values() for slot in slots]

    def _held_bytes(self) -> int:
        return sum(slot.nbytes for slot in [*self._all_slots(), *self._closing])
