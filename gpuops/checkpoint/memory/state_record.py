"""The life of one saved state on its node: leased, written, verified, complete, replicated."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from gpuops.checkpoint.types import Digest, KeeperAddress, Shard, StateId


@dataclass(frozen=True, slots=True, order=True)
class SlotKey:
    """One slot: the pool (one rank's memory of one layout) and its number in the pool."""

    pool: int
    index: int


class SlotPhase(StrEnum):
    """The progress of one rank."""

    GRANTED = "granted"  # its rank has not asked yet
    WRITING = "writing"
    WRITTEN = "written"
    VERIFIED = "verified"


@dataclass(slots=True)
class StateRecord:
    """One state of this node, from the first lease until memory drops it.

    ``slots`` and ``phases`` are by local rank, ``digests`` by slot: once all are verified the state
    is complete here. ``number``: that of its leases, which no other state has. ``arrived``: which
    shards are at which holders; with all of them it is replicated. ``leased_s``: the time of the
    first grant; ``due_s``: when all should be at their holders.
    """

    state: StateId
    slots: dict[int, SlotKey]
    phases: dict[int, SlotPhase]
    number: int
    digests: dict[SlotKey, Digest] = field(default_factory=dict)
    arrived: set[tuple[Shard, KeeperAddress]] = field(default_factory=set)
    leased_s: float | None = None
    due_s: float | None = None

    @property
    def is_complete(self) -> bool:
        return all(phase is SlotPhase.VERIFIED for phase in self.phases.values())

    @property
    def is_written(self) -> bool:
        return all(
            phase in (SlotPhase.WRITTEN, SlotPhase.VERIFIED) for phase in self.phases.values()
        )

    def mark_stamped(self, is_stamped: Callable[[SlotKey], bool]) -> list[SlotKey]:
        """Return the slots that are now written, as the stamps of their ranks say."""
        stamped = [
            local_rank
            for local_rank, phase in self.phases.items()
            if phase is SlotPhase.WRITING and is_stamped(self.slots[local_rank])
        ]
        self.phases |= dict.fromkeys(stamped, SlotPhase.WRITTEN)
        return [self.slots[local_rank] for local_rank in stamped]
