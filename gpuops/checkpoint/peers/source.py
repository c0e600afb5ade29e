"""What a keeper serves to other nodes: its replicas, and the states of its own ranks."""

from collections.abc import Callable
from concurrent.futures import Future

from gpuops.checkpoint.keeper.jobs import Jobs
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.peers.store import ReplicaStore
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.wire import TransferRefusal, TransferRefusedError
from gpuops.checkpoint.types import CheckpointError, Shard, StateId

# The thread of the messages never works for long.
PIN_TIMEOUT_S = 5.0


class ReplicaSource:
    """The source of a keeper's server; its threads call `open`.

    States of this node's own ranks are pinned only by the thread of the messages, so that one
    thread decides which slot is granted next and which may be read.
    """

    def __init__(
        self,
        memory: NodeMemory,
        replicas: ReplicaStore,
        jobs: Jobs,
        on_damage: Callable[[StateId, Shard, int], None],
        *,
        timeout_s: float = PIN_TIMEOUT_S,
    ) -> None:
        self._memory = memory
        self._replicas = replicas
        self._jobs = jobs
        self._on_damage = on_damage
        self._timeout_s = timeout_s
        self._n_pins = 0

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return a complete copy, pinned; None where there is none.

        Raises:
            TransferRefusedError: This keeper is too busy to answer.
        """
        found = self._replicas.open(state, shard)
        if found is not None:
            return found
        pinned: Future[PinnedCopy | None] = Future()

        def do() -> None:
            if not pinned.set_running_or_notify_cancel():
                return
            try:
                pinned.set_result(self._pin_own(state, shard))
            except CheckpointError as exc:
                pinned.set_exception(exc)

        self._jobs.post(do)
        try:
            return pinned.result(self._timeout_s)
        except TimeoutError:
            if pinned.cancel():
                raise TransferRefusedError(
                    TransferRefusal.BUSY, "this keeper is too busy to answer"
                ) from None
            return pinned.result()

    def _pin_own(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        entry = self._memory.complete_shards(state).get(shard)
        if entry is None:
            return None
        self._n_pins += 1
        owner = f"serve-{self._n_pins}"
        table = self._memory.buffer_table
        table.pin(state, owner)

        def unpin() -> None:
            table.unpin(owner)
            self._memory.release()

        return PinnedCopy(
            entry.memory.fd,
            entry.copy.digest,
            release=lambda: self._jobs.post(unpin),
            on_damage=lambda number: self._jobs.post(lambda: self._on_damage(state, shard, number)),
            view=entry.memory.view,
        )
