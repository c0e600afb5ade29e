"""What ranks have written is hashed, compared where they share it, and makes a state complete."""

from collections.abc import Callable

from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.replica_checker import ReplicaChecker
from gpuops.checkpoint.memory.node_memory import NodeMemory, WrittenSlot
from gpuops.checkpoint.types import StateId


class SlotVerifier:
    """Verifies slots that ranks have written.

    *on_verified* is called with each state of which all slots are, and with how its shared tensors
    differ ("": they do not). ``n_running``: how many slots are being verified; ``hash_s``: the
    seconds of the last state, from its last slot written.
    """

    def __init__(
        self,
        memory: NodeMemory,
        jobs: Jobs,
        events: EventQueue,
        clock_s: Callable[[], float],
        replica_checker: ReplicaChecker,
        on_verified: Callable[[StateId, str], None],
    ) -> None:
        self.n_running = 0
        self.hash_s: float | None = None
        self._memory = memory
        self._jobs = jobs
        self._events = events
        self._clock_s = clock_s
        self._replica_checker = replica_checker
        self._on_verified = on_verified
        self._written_s = 0.0

    def verify(self, written: WrittenSlot) -> None:
        """Have the image hashed."""
        self._written_s = self._clock_s()
        run_task(self._verify(written))

    def verify_stamped(self) -> None:
        """Have what ranks have written and not reported hashed; they may have been killed."""
        for written in self._memory.take_stamped():
            self.verify(written)

    async def _verify(self, written: WrittenSlot) -> None:
        self.n_running += 1
        try:
            digest = await JobResult(self._jobs, JobKind.HASH, written.hash)
            why = await self._replica_checker.vote(written)
        except Exception as exc:  # noqa: BLE001 boundary: a state needs its digest
            self._memory.buffer_table.give_up(written.state)
            rank = written.shard.rank
            self._events.add("corrupt", state=written.state, rank=rank, why=str(exc))
            return
        finally:
            self.n_running -= 1
        if why or self._memory.record_digest(written, digest):
            self.hash_s = self._clock_s() - self._written_s
            self._on_verified(written.state, why)
