"""How much of a node's RAM copies take, and what to give up first where it is too much."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuops.checkpoint.types import CheckpointError
from gpuops.units import format_bytes

SLOTS_MIN = 2  # one for the newest committed state, one to write the next into
# Adam in mixed precision stores 12 bytes a parameter (master, m and v, 4 each): the master alone.
WEIGHTS_ONLY_SHARE = 4 / 12


class RamSaving(StrEnum):
    """What is given up, in this order; each rung also has what those before it gave up."""

    NOTHING = "nothing"
    SPARSE_COPIES = "sparse_copies"  # peers get every k-th save, in two slots
    TWO_SLOTS = "two_slots"
    WEIGHTS_ONLY = "weights_only"  # no optimizer state: a resumed run differs
    NO_COPIES = "no_copies"  # the loss of a node loses its state


@dataclass(frozen=True, slots=True)
class RamNeed:
    """What one node's keeper holds: its ranks' states, and as many of each of the peers it serves.

    ``slots`` is for each state of its own, ``copy_slots`` for each that it holds for a peer;
    ``replicas`` counts copies of a state, the node's own among them.
    """

    ranks: int
    bytes_per_rank: int
    replicas: int
    slots: int = SLOTS_MIN
    copy_slots: int = SLOTS_MIN

    def __post_init__(self) -> None:
        counts = (self.ranks, self.bytes_per_rank, self.replicas)
        if min(counts) < 1 or min(self.slots, self.copy_slots) < SLOTS_MIN:
            raise CheckpointError(
                f"RAM cannot be planned for {self.ranks} ranks of {self.bytes_per_rank} bytes with"
                f" {self.replicas} copies in {self.slots} and {self.copy_slots} slots: at least one"
                f" of each and {SLOTS_MIN} slots are wanted"
            )

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one state of the node: one slot of each rank."""
        return self.ranks * self.bytes_per_rank

    @property
    def own_bytes(self) -> int:
        return self.state_bytes * self.slots

    @property
    def peers_bytes(self) -> int:
        return self.state_bytes * self.copy_slots * (self.replicas - 1)

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.peers_bytes

    def __str__(self) -> str:
        own = f"{self.slots} slots x {self.ranks} ranks x {format_bytes(self.bytes_per_rank)}"
        if self.replicas == 1:
            return f"{format_bytes(self.total_bytes)} a node ({own})"
        if self.copy_slots == self.slots:
            return f"{format_bytes(self.total_bytes)} a node ({own} x {self.replicas} copies)"
        peers = f"{format_bytes(self.peers_bytes)} for peers, {self.copy_slots} slots"
        return f"{format_bytes(self.total_bytes)} a node ({own}, and {peers})"


@dataclass(frozen=True, slots=True)
class RamOption:
    """One rung, and what is needed on it."""

    saving: RamSaving
    need: RamNeed


def ram_options(need: RamNeed) -> tuple[RamOption, ...]:
    """Return *need* as it is and what gives up ever more, without rungs that save nothing."""
    return tuple(_ram_options(need))


def _ram_options(need: RamNeed) -> Iterator[RamOption]:
    yield RamOption(RamSaving.NOTHING, need)
    least_bytes = need.total_bytes
    weights = max(1, round(need.bytes_per_rank * WEIGHTS_ONLY_SHARE))
    for saving, saving_fields in (
        (RamSaving.SPARSE_COPIES, {"copy_slots": SLOTS_MIN}),
        (RamSaving.TWO_SLOTS, {"slots": SLOTS_MIN}),
        (RamSaving.WEIGHTS_ONLY, {"bytes_per_rank": weights}),
        (RamSaving.NO_COPIES, {"replicas": 1}),
    ):
        need = replace(need, **saving_fields)
        if need.total_bytes < least_bytes:
            least_bytes = need.total_bytes
            yield RamOption(saving, need)


def ram_refusal(need: RamNeed, available_bytes: int) -> str | None:
    """Return why *need* does not fit, with figures and what would; None where it fits."""
    if need.total_bytes <= available_bytes:
        return None
    text = f"checkpoints need {need}, and {format_bytes(available_bytes)} are there"
    for option in ram_options(need):
        if option.need.total_bytes <= available_bytes:
            return f"{text}; {describe_option(option)} would fit: {option.need}"
    smallest = ram_options(need)[-1].need
    return f"{text}; nothing fits, the least is {smallest}"


def describe_option(option: RamOption) -> str:
    """Return in words what *option* gives up."""
    match option.saving:
        case RamSaving.NOTHING:
            return "all of it"
        case RamSaving.SPARSE_COPIES:
            return "copies of only some saves, in two slots"
        case RamSaving.TWO_SLOTS:
            return "two slots"
        case RamSaving.WEIGHTS_ONLY:
            return "weights without optimizer state"
        case RamSaving.NO_COPIES:
            return "weights without optimizer state or copies on peers"
