"""What a holder keeps for others: two slots for each foreign shard, and a gate before them.

A push never goes to the slot with the newest committed state, nor to one that is being read. A slot
counts as a copy again only when every byte in it has been verified; until then nobody hears of it.
An owner has one state on its way at a time: by pushing the next one it says that the last was
committed, or given up.
"""

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gpuops.checkpoint.digest import HASH_BYTES
from gpuops.checkpoint.states import (
    CHUNK_BYTES,
    CheckpointError,
    Copy,
    Digest,
    Shard,
    StateId,
    Tier,
)
from gpuops.checkpoint.transfer_intake import Intake
from gpuops.checkpoint.transfer_turns import PinnedCopy
from gpuops.checkpoint.transfer_wire import Push, Refusal, RefusedError
from gpuops.units import format_bytes

N_SLOTS = 2
_BEFORE_ALL = StateId(0, 0)


class Memory(Protocol):
    """What a slot is made of: such as `arena.SlotMemory`."""

    @property
    def fd(self) -> int:
        """Return a descriptor of the same bytes."""
        ...

    @property
    def view(self) -> memoryview:
        """Return the bytes, to be written."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclass(eq=False, slots=True)
class _Slot:
    memory: Memory
    nbytes: int
    copy: Copy | None = None  # whole and verified
    inbox: "ReplicaInbox | None" = None  # on its way
    last: Digest | None = None  # what lay there before
    pins: int = 0  # who reads

    @property
    def is_used(self) -> bool:
        return self.pins > 0 or (self.inbox is not None and self.inbox.n_users > 0)


@dataclass(eq=False, slots=True)
class ReplicaInbox:
    """A replica on its way into a slot; see `transfer_server.Inbox`."""

    store: "ReplicaStore"
    slot: _Slot
    push: Push
    intake: Intake
    ready: threading.Event = field(default_factory=threading.Event)
    n_users: int = 0
    is_over: bool = False

    def is_wanted(self) -> bool:
        return not self.is_over

    def complete(self) -> None:
        self.store._complete(self)  # noqa: SLF001 one thing in two classes

    def leave(self) -> None:
        self.store._leave(self)  # noqa: SLF001


class ReplicaStore:
    """The replicas that *node* holds for others: source and sink of its server. Thread-safe.

    *allocate* is given a name and a size; what it raises of `CheckpointError` and OSError is "no
    room". All slots together have at most *bytes_max*.
    """

    def __init__(
        self,
        node: str,
        allocate: Callable[[str, int], Memory],
        *,
        bytes_max: int,
        n_slots: int = N_SLOTS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if n_slots < 2:
            raise ValueError("with one slot the newest state would be lost to the next")
        self._node, self._allocate = node, allocate
        self._bytes_max, self._n_slots, self._chunk_bytes = bytes_max, n_slots, chunk_bytes
        self._lock = threading.Lock()
        self._slots: dict[Shard, list[_Slot]] = {}
        self._parting: list[_Slot] = []
        self._committed: StateId | None = None
        self._damaged: list[tuple[Copy, int]] = []

    # What the keeper says.

    def keep_only(self, shards: Collection[Shard]) -> None:
        """Be a holder of *shards* from now on; the memory of others is given back when unused."""
        with self._lock:
            for shard in set(self._slots) - set(shards):
                for slot in self._slots.pop(shard):
                    self._doom(slot)
            for shard in shards:
                self._slots.setdefault(shard, [])

    def adopt(self, copy: Copy, memory: Memory, nbytes: int) -> bool:
        """Hold *copy*, of which *memory* has every byte, verified; say whether it was wanted.

        Then the memory is the store's. It goes with the next `keep_only` that leaves it out.
        """
        with self._lock:
            slots = self._slots.setdefault(copy.shard, [])
            there = any(s.copy is not None and s.copy.state == copy.state for s in slots)
            if there or len(slots) >= self._n_slots:
                return False
            slots.append(_Slot(memory, nbytes, copy))
            return True

    def commit(self, state: StateId) -> None:
        """Note that *state* is committed in the whole job.

        It is overwritten only once a newer one is committed too.
        """
        with self._lock:
            self._committed = max(self._committed or state, state)

    def begin_epoch(self, epoch: int) -> None:
        """Drop what was on its way of older epochs: nobody will send the rest."""
        with self._lock:
            for slot in self._all():
                if slot.inbox is not None and slot.inbox.push.state.epoch < epoch:
                    self._drop_inbox(slot)

    def copies(self) -> list[Copy]:
        """Return the whole copies, newest first."""
        with self._lock:
            found = [slot.copy for slot in self._all() if slot.copy is not None]
        return sorted(found, key=lambda copy: (copy.state, copy.shard), reverse=True)

    def damaged(self) -> list[tuple[Copy, int]]:
        """Return the copies that were found damaged since the last call, and the chunk of each."""
        with self._lock:
            found, self._damaged = self._damaged, []
        return found

    @property
    def held_bytes(self) -> int:
        """Return how much memory the slots have."""
        with self._lock:
            return self._held_bytes()

    def close(self) -> None:
        """Give all memory back; the server must have been closed before."""
        with self._lock:
            for slot in [*self._all(), *self._parting]:
                slot.memory.close()
            self._slots.clear()
            self._parting.clear()

    # What the server asks for.

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return the copy of *shard* of *state*, pinned, None where it is not held whole."""
        with self._lock:
            for slot in self._slots.get(shard, ()):
                copy = slot.copy
                if copy is not None and copy.state == state:
                    slot.pins += 1
                    return PinnedCopy(
                        slot.memory.fd,
                        copy.digest,
                        release=_once(partial(self._unpin, slot)),
                        damaged=partial(self._on_damage, slot, copy),
                        view=slot.memory.view,
                    )
        return None

    def accept(self, push: Push, digest: Digest) -> ReplicaInbox | None:
        """Return where *push* is to go, None where it is held already, whole.

        Raises:
            RefusedError: Not wanted, no room, or all slots in use.
        """
        with self._lock:
            inbox, is_new = self._inbox_for(push, digest)
            if inbox is not None:
                inbox.n_users += 1
        if inbox is None:
            return None
        if is_new:
            try:
                self._look(inbox)
            finally:
                inbox.ready.set()
        else:
            inbox.ready.wait()
        return inbox

    # The gate.

    def _inbox_for(self, push: Push, digest: Digest) -> tuple[ReplicaInbox | None, bool]:
        slots = self._slots.get(push.shard)
        what = f"{push.shard.file_name} of {push.state}"
        if slots is None:
            raise RefusedError(Refusal.NOT_WANTED, f"{self._node} is no holder of {what}")
        if push.committed is not None:
            self._committed = max(self._committed or push.committed, push.committed)
        for slot in slots:
            if slot.copy is not None and slot.copy.state == push.state:
                if slot.copy.digest.root == digest.root:
                    return None, False
                raise RefusedError(
                    Refusal.DIFFERENT, f"{self._node} holds {what} with another content"
                )
            inbox = slot.inbox
            if inbox is not None and inbox.push.state == push.state:
                if inbox.is_over:
                    raise RefusedError(
                        Refusal.BUSY, f"{self._node} is still ending an earlier push of {what}"
                    )
                if inbox.intake.digest == digest:
                    return inbox, False
                if inbox.n_users:
                    raise RefusedError(
                        Refusal.DIFFERENT, f"{self._node} is receiving {what} with another content"
                    )
        self._check_not_overtaken(push, slots, what)
        return self._into(self._free_slot(push, slots, what), push, digest), True

    def _check_not_overtaken(self, push: Push, slots: list[_Slot], what: str) -> None:
        committed = self._committed
        held = [slot.copy.state for slot in slots if slot.copy is not None]
        held += [s.inbox.push.state for s in slots if s.inbox is not None and not s.inbox.is_over]
        newest = max(held, default=push.state)
        if committed is not None and push.state < committed:
            raise RefusedError(Refusal.NOT_WANTED, f"{what} was overtaken by {committed}")
        if push.state < newest and push.state != committed:
            raise RefusedError(Refusal.NOT_WANTED, f"{what} was overtaken by {newest}")

    def _free_slot(self, push: Push, slots: list[_Slot], what: str) -> _Slot:
        kept = self._kept(slots)
        free = [slot for slot in slots if slot is not kept and not slot.is_used]
        # What is no copy goes before what is one; of copies the oldest.
        free.sort(key=_age)
        if free and (free[0].copy is None or len(slots) >= self._n_slots):
            return self._of_size(free[0], push)
        if len(slots) < self._n_slots:
            slots.append(self._new_slot(push.shard, push.nbytes))
            return slots[-1]
        for slot in slots:
            # A state that was given up must not keep the next one out.
            if slot.inbox is not None and slot.inbox.push.state < push.state:
                slot.inbox.is_over = True
        raise RefusedError(
            Refusal.BUSY, f"{self._node} has no free slot for {what}: all are in use or committed"
        )

    def _kept(self, slots: list[_Slot]) -> _Slot | None:
        """Return the slot of the newest committed state; of the newest where none is known."""
        committed = self._committed
        held = [(slot.copy.state, slot) for slot in slots if slot.copy is not None]
        settled = [pair for pair in held if committed is not None and pair[0] <= committed]
        return max(settled or held, key=lambda pair: pair[0], default=(None, None))[1]

    def _new_slot(self, shard: Shard, nbytes: int) -> _Slot:
        self._check_room(nbytes)
        return _Slot(self._memory(shard, nbytes), nbytes)

    def _of_size(self, slot: _Slot, push: Push) -> _Slot:
        if slot.nbytes != push.nbytes:
            self._check_room(push.nbytes - slot.nbytes)
            memory = self._memory(push.shard, push.nbytes)
            slot.memory.close()
            slot.memory, slot.nbytes = memory, push.nbytes
            slot.copy = slot.last = slot.inbox = None
        return slot

    def _check_room(self, more_bytes: int) -> None:
        would_be = self._held_bytes() + more_bytes
        if would_be > self._bytes_max:
            raise RefusedError(
                Refusal.NO_ROOM,
                f"{self._node} would hold {format_bytes(would_be)} for others, and may hold "
                f"{format_bytes(self._bytes_max)}",
            )

    def _memory(self, shard: Shard, nbytes: int) -> Memory:
        try:
            return self._allocate(f"gpuops-replica-{shard.rank:05d}", nbytes)
        except (CheckpointError, OSError) as exc:
            raise RefusedError(
                Refusal.NO_ROOM, f"{self._node} has no {format_bytes(nbytes)}: {exc}"
            ) from exc

    def _into(self, slot: _Slot, push: Push, digest: Digest) -> ReplicaInbox:
        intake = Intake(slot.memory.view, digest, chunk_bytes=self._chunk_bytes)
        if slot.copy is not None:
            slot.last = slot.copy.digest
        # From here on it is no copy of anything.
        slot.copy = None
        slot.inbox = ReplicaInbox(self, slot, push, intake)
        return slot.inbox

    def _look(self, inbox: ReplicaInbox) -> None:
        """Find the chunks that are the same as in the state that lay there: frozen weights."""
        last, table = inbox.slot.last, inbox.intake.digest.table
        if last is None or last.nbytes != inbox.intake.digest.nbytes:
            return
        places = range(0, len(table), HASH_BYTES)
        same = [
            at for at in places if table[at : at + HASH_BYTES] == last.table[at : at + HASH_BYTES]
        ]
        inbox.intake.look(at // HASH_BYTES for at in same)

    # What becomes of slots.

    def _complete(self, inbox: ReplicaInbox) -> None:
        with self._lock:
            slot, push = inbox.slot, inbox.push
            if slot.inbox is not inbox:
                if slot.copy is not None and slot.copy.digest == inbox.intake.digest:
                    return
                inbox.is_over = True
            if inbox.is_over:
                raise RefusedError(
                    Refusal.NOT_WANTED, f"{push.shard.file_name} of {push.state} was overtaken"
                )
            inbox.intake.check_root()
            slot.copy = Copy(
                push.state, push.shard, push.layout, inbox.intake.digest, Tier.MEMORY, self._node
            )
            slot.inbox = slot.last = None

    def _leave(self, inbox: ReplicaInbox) -> None:
        with self._lock:
            inbox.n_users -= 1
            if inbox.is_over and inbox.n_users == 0 and inbox.slot.inbox is inbox:
                inbox.slot.inbox = None
            self._part()

    def _unpin(self, slot: _Slot) -> None:
        with self._lock:
            slot.pins -= 1
            self._part()

    def _on_damage(self, slot: _Slot, copy: Copy, number: int) -> None:
        with self._lock:
            if slot.copy is copy:
                slot.copy = slot.last = None
                self._damaged.append((copy, number))

    def _drop_inbox(self, slot: _Slot) -> None:
        inbox = slot.inbox
        if inbox is not None:
            inbox.is_over = True
            if inbox.n_users == 0:
                slot.inbox = None

    def _doom(self, slot: _Slot) -> None:
        slot.copy = None
        self._drop_inbox(slot)
        self._parting.append(slot)
        self._part()

    def _part(self) -> None:
        """Close the slots that are not wanted any more and that nobody uses."""
        for slot in [slot for slot in self._parting if not slot.is_used]:
            self._parting.remove(slot)
            slot.memory.close()

    def _all(self) -> list[_Slot]:
        return [slot for slots in self._slots.values() for slot in slots]

    def _held_bytes(self) -> int:
        return sum(slot.nbytes for slot in [*self._all(), *self._parting])


def _age(slot: _Slot) -> tuple[bool, StateId]:
    return (False, _BEFORE_ALL) if slot.copy is None else (True, slot.copy.state)


def _once(release: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls *release* the first time that it is called."""
    left = [release]

    def call() -> None:
        if left:
            left.pop()()

    return call
