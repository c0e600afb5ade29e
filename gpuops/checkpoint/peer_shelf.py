"""What a keeper hands out to other nodes: replicas that it holds, and what its own ranks saved."""

from collections.abc import Callable
from concurrent.futures import Future

from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.node_memory import NodeMemory
from gpuops.checkpoint.replicas import ReplicaStore
from gpuops.checkpoint.states import CheckpointError, Shard, StateId
from gpuops.checkpoint.transfer_turns import PinnedCopy
from gpuops.checkpoint.transfer_wire import Refusal, RefusedError

# The thread of the messages never works for long.
ANSWER_S = 5.0


class Shelf:
    """The source of a keeper's server; its threads call `open`.

    What this node's own ranks saved is pinned by the thread of the messages, and by it alone: which
    slot is granted next and which may be read is decided in one place.
    """

    def __init__(
        self,
        memory: NodeMemory,
        replicas: ReplicaStore,
        jobs: Jobs,
        damaged: Callable[[StateId, Shard, int], None],
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._memory = memory
        self._replicas = replicas
        self._jobs = jobs
        self._damaged = damaged
        self._answer_s = answer_s
        self._n_pins = 0

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return a whole copy, pinned; None where there is none.

        Raises:
            RefusedError: This keeper is too busy to say.
        """
        found = self._replicas.open(state, shard)
        if found is not None:
            return found
        answer: Future[PinnedCopy | None] = Future()

        def do() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(self._pinned(state, shard))
            except CheckpointError as exc:
                answer.set_exception(exc)

        self._jobs.post(do)
        try:
            return answer.result(self._answer_s)
        except TimeoutError:
            if answer.cancel():
                raise RefusedError(Refusal.BUSY, "this keeper does not get to it") from None
            return answer.result()

    def _pinned(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        held = self._memory.held(state).get(shard)
        if held is None:
            return None
        self._n_pins += 1
        who = f"serve-{self._n_pins}"
        gate = self._memory.gate
        gate.pin(state, who)

        def unpin() -> None:
            gate.unpin(who)
            self._memory.release()

        return PinnedCopy(
            held.memory.fd,
            held.copy.digest,
            release=lambda: self._jobs.post(unpin),
            damaged=lambda number: self._jobs.post(lambda: self._damaged(state, shard, number)),
            view=held.memory.view,
        )
