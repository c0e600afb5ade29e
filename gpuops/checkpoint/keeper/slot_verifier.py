"""What ranks have written is hashed, compared where they share it, and makes a state complete."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.replica_checker import ReplicaChecker
from gpuops.checkpoint.memory.node_memory import NodeMemory, WrittenSlot
from gpuops.checkpoint.types import StateId


@dataclass(slots=True)
class SlotVerifier:
    """Verifies slots that ranks have written.

    *on_verified* is called with each state of which all slots are, and with how its shared tensors
    differ ("": they do not). ``n_running``: how many slots are being verified; ``hash_s``: the
    seconds of the last state, from its last slot written.
    """

    memory: NodeMemory
    jobs: Jobs
    events: EventQueue
    clock_s: Callable[[], float]
    replica_checker: ReplicaChecker
    on_verified: Callable[[StateId, str], None]
    n_running: int = 0
    hash_s: float | None = None
    _written_s: float = 0.0

    def verify(self, written: WrittenSlot) -> None:
        """Have the image hashed."""
        self._written_s = self.clock_s()
        run_task(self._verify(written))

    def verify_stamped(self) -> None:
        """Have what ranks have written and not reported hashed; they may have been killed."""
        for written in self.memory.take_stamped():
            self.verify(written)

    async def _verify(self, written: WrittenSlot) -> None:
        self.n_running += 1
        try:
            digest = await JobResult(self.jobs, JobKind.HASH, written.hash)
            why = await self.replica_checker.vote(written)
        except Exception as exc:  # noqa: BLE001 boundary: a state needs its digest
            self.memory.buffer_table.give_up(written.state)
            rank = written.shard.rank
            self.events.add("corrupt", state=written.state, rank=rank, why=str(exc))
            return
        finally:
            self.n_running -= 1
        if why or self.memory.record_digest(written, digest):
            self.hash_s = self.clock_s() - self._written_s
            self.on_verified(written.state, why)
