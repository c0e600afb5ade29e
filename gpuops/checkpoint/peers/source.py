"""What a keeper serves to other nodes: its replicas, and the states of its own ranks."""

import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, TypeVar

from gpuops.checkpoint.keeper.jobs import Jobs
from gpuops.checkpoint.memory.node_memory import MemoryShard, NodeMemory, open_read_only
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.memory.state_record import SlotKey
from gpuops.checkpoint.peers.alike import ComposedReplica, OwnImages, no_images
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.wire import TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import CheckpointError, Shard, ShardCopy, StateId

# The thread of the messages never works for long.
PIN_TIMEOUT_S = 5.0
# The ranks of a job save a state at about the same time; a refused owner tries again later.
SAVED_WAIT_S = 1.0
_RECHECK_S = 0.02
_NO_SLOT = SlotKey(-1, -1)
T = TypeVar("T")


class OwnStates:
    """What this node's own ranks saved, for threads other than that of the messages.

    Only that thread pins these states, so that one thread decides which slot is granted next and
    which may be read. What *own_shards* were fetched of a state is in *replicas*.
    """

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        replicas: ReplicaStore,
        own_shards: Callable[[], Collection[Shard]],
        *,
        timeout_s: float = PIN_TIMEOUT_S,
    ) -> None:
        self._memory, self._jobs, self._timeout_s = memory, jobs, timeout_s
        self._replicas, self._own_shards = replicas, own_shards
        self._n_pins = 0
        self._is_closed = False
        self._waiting: set[Future[Any]] = set()

    def call(self, work: Callable[[], T]) -> T:
        """Return the result of *work* in the thread of the messages.

        Raises:
            TransferRefusedError: This keeper is too busy to answer.
        """
        done: Future[T] = Future()
        self._waiting.add(done)

        def do() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work())
            except CheckpointError as exc:
                done.set_exception(exc)

        self._jobs.post(do)
        if self._is_closed:
            done.cancel()
        try:
            return done.result(self._timeout_s)
        except (TimeoutError, CancelledError):
            if done.cancelled() or done.cancel():
                raise TransferRefusedError(
                    TransferRefusal.BUSY, "this keeper is too busy to answer"
                ) from None
            return done.result()
        finally:
            self._waiting.discard(done)

    def close(self) -> None:
        """Have no thread wait any longer for that of the messages, which calls this."""
        self._is_closed = True
        for done in list(self._waiting):
            done.cancel()

    def pin(self, state: StateId, shards: Collection[Shard] = ()) -> OwnImages | None:
        """Return the images of a complete state, or *shards* of it that were fetched.

        In the thread of the messages.
        """
        saved = self._memory.complete_shards(state)
        if not saved:
            return self._pin_fetched(state, shards)
        self._n_pins += 1
        owner = f"serve-{self._n_pins}"
        table = self._memory.buffer_table
        table.pin(state, owner)

        def unpin() -> None:
            table.unpin(owner)
            self._memory.release()

        return OwnImages(saved, release=lambda: self._jobs.post(unpin))

    def _pin_fetched(self, state: StateId, shards: Collection[Shard]) -> OwnImages | None:
        copies = {copy.shard: copy for copy in self._replicas.copies() if copy.state == state}
        found: dict[Shard, MemoryShard] = {}
        pinned: list[PinnedCopy] = []

        def release() -> None:
            for entry in found.values():
                entry.memory.close()
            while pinned:
                pinned.pop().release()

        for shard in shards:
            copy = self._replicas.open(state, shard) if shard in copies else None
            if copy is None:
                release()
                return None
            pinned.append(copy)
            found[shard] = attach(copies[shard], copy)
        return OwnImages(found, release) if found else None

    def pin_expected(self, state: StateId) -> OwnImages:
        """As `pin`, from other threads; waits a moment for a state that is being saved.

        Raises:
            TransferRefusedError: It is not saved yet, or will not be.
        """
        end_s = time.monotonic() + SAVED_WAIT_S
        while True:
            own, is_expected = self.call(
                lambda: (self.pin(state, self._own_shards()), self._is_expected(state))
            )
            if own is not None:
                return own
            if not is_expected:
                return no_images(state)
            if time.monotonic() >= end_s:
                raise TransferRefusedError(
                    TransferRefusal.NOT_SAVED, f"the ranks here have not saved {state} yet"
                )
            time.sleep(_RECHECK_S)

    def _is_expected(self, state: StateId) -> bool:
        table = self._memory.buffer_table
        is_ahead = table.decided is None or table.decided < state
        return (
            table.epoch is None
            or state == table.in_flight
            or (table.epoch == state.epoch and is_ahead)
        )


class ReplicaSource:
    """The source of a keeper's server; its threads call `open`."""

    def __init__(
        self,
        own: OwnStates,
        replicas: ReplicaStore,
        jobs: Jobs,
        on_damage: Callable[[StateId, Shard, int], None],
    ) -> None:
        self._own = own
        self._replicas = replicas
        self._jobs = jobs
        self._on_damage = on_damage

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return a complete copy, pinned; None where there is none.

        Raises:
            TransferRefusedError: This keeper is too busy to answer.
        """
        found = self._replicas.open(state, shard)
        if found is not None:
            return found
        return self._own.call(lambda: self._open_own(state, shard))

    def _open_own(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        own = self._own.pin(state)
        entry = own.shards.get(shard) if own is not None else None
        if own is not None and entry is not None:
            return PinnedCopy(
                entry.memory.fd,
                entry.copy.digest,
                release=own.release,
                on_damage=lambda number: self._jobs.post(
                    lambda: self._on_damage(state, shard, number)
                ),
                view=entry.memory.view,
            )
        if own is not None:
            own.release()
        replica = self._replicas.open_any(state, shard)
        return self._open_composed(state, replica) if replica is not None else None

    def _open_composed(self, state: StateId, replica: ComposedReplica) -> PinnedCopy | None:
        own = self._own.pin(state, replica.rest.roots if replica.rest is not None else ())
        image = replica.image(own.shards) if own is not None else None

        def release() -> None:
            replica.pinned.release()
            if own is not None:
                own.release()

        if image is None:
            release()
            return None
        return replace(replica.pinned, fd=-1, view=None, read=image.read, release=release)


def attach(copy: ShardCopy, pinned: PinnedCopy) -> MemoryShard:
    """Return the replica *copy*, in memory that is mapped once more; to be closed."""
    memory = SharedBuffer.attach(open_read_only(pinned.fd), writable=False)
    return MemoryShard(replace(copy, digest=pinned.digest), _NO_SLOT, memory)
