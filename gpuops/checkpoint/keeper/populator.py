"""Have the kernel allocate the memory of new slots before a rank copies into them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer


@dataclass(slots=True)
class SlotPopulator:
    """Populates the slots of *memory* in jobs, until *is_ending* returns true."""

    memory: NodeMemory
    jobs: Jobs
    events: EventQueue
    is_ending: Callable[[], bool]
    _populating: set[int] = field(default_factory=set)

    def start(self) -> None:
        """Begin with each slot that was not begun."""
        for slot in self.memory.unpopulated():
            if id(slot) not in self._populating:
                run_task(self._populate(slot))

    async def _populate(self, slot: SharedBuffer) -> None:
        self._populating.add(id(slot))
        try:
            if await JobResult(self.jobs, JobKind.POPULATE, lambda: slot.populate(self.is_ending)):
                self.memory.mark_populated(slot)
        except Exception as exc:  # noqa: BLE001 boundary: the first copy populates the memory then
            self.events.add("not_populated", why=str(exc))
        finally:
            self._populating.discard(id(slot))
