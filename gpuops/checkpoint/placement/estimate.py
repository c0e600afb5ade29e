"""What the copies of a job's state survive, how much RAM they need, and how long they take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gpuops.checkpoint.agreement.replica_check import RANK_DIGESTS_MAX
from gpuops.checkpoint.agreement.write_once import KEYS_MAX, is_written_once
from gpuops.checkpoint.placement.domains import FailureDomains
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement, place
from gpuops.checkpoint.placement.survival import (
    DomainLoss,
    DomainSpread,
    SurvivalOdds,
    corollary_bound,
    domain_losses,
    domain_spread,
    mixed_odds,
    ring_odds,
)
from gpuops.checkpoint.types import CheckpointError
from gpuops.plan.interval import TierCost, TwoTiers, two_tiers
from gpuops.units import format_bytes

SLOTS_MIN = 2  # one for the newest committed state, one to write the next into
# Adam in mixed precision stores 12 bytes a parameter (master, m and v, 4 each): the master alone.
WEIGHTS_ONLY_SHARE = 4 / 12


class RamSaving(StrEnum):
    """What is given up, in this order; each option includes those before it."""

    NOTHING = "nothing"
    SPARSE_COPIES = "sparse_copies"  # peers get every k-th save, in two slots
    TWO_SLOTS = "two_slots"
    WEIGHTS_ONLY = "weights_only"  # no optimizer state: a resumed run differs
    NO_COPIES = "no_copies"  # the loss of a node loses its state


@dataclass(frozen=True, slots=True)
class RamNeed:
    """What one node's keeper stores: its ranks' states, and replicas for the peers that it serves.

    ``slots`` is for each state of its own, ``copy_slots`` for each replica of a peer's state;
    ``replicas`` counts the copies of a state, the node's own included. ``shared_bytes`` of the
    ``bytes_per_rank`` are alike on every ``shards``-th rank (HSDP; 1: on all), which save them once
    a node and write them once. ``are_alike``: each holder has these bytes of its owner itself.
    """

    ranks: int
    bytes_per_rank: int
    replicas: int
    slots: int = SLOTS_MIN
    copy_slots: int = SLOTS_MIN
    shared_bytes: int = 0
    shards: int = 1
    are_alike: bool = True

    def __post_init__(self) -> None:
        counts = (self.ranks, self.bytes_per_rank, self.replicas, self.shards)
        if min(counts) < 1 or min(self.slots, self.copy_slots) < SLOTS_MIN:
            raise CheckpointError(
                f"RAM cannot be planned for {self.ranks} ranks of {self.bytes_per_rank} bytes with"
                f" {self.replicas} copies in {self.slots} and {self.copy_slots} slots: at least one"
                f" of each and {SLOTS_MIN} slots are needed"
            )
        if self.shards % self.ranks and self.ranks % self.shards:
            raise CheckpointError(
                f"nodes of {self.ranks} ranks do not have whole parts of {self.shards} shards"
            )
        if not 0 <= self.shared_bytes <= self.bytes_per_rank:
            raise CheckpointError(
                f"a rank of {self.bytes_per_rank} bytes cannot share {self.shared_bytes} of them"
            )

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one state of the node: one slot of each rank."""
        return self._n_shards * self.shared_bytes + self._by_rank_bytes

    @property
    def replica_bytes(self) -> int:
        """Return the bytes of one copy of the node's state on a peer."""
        return self._by_rank_bytes if self.are_alike else self.state_bytes

    @property
    def _n_shards(self) -> int:
        """Return how many different shards of what is shared one node has."""
        return min(self.shards, self.ranks)

    @property
    def _by_rank_bytes(self) -> int:
        return self.ranks * (self.bytes_per_rank - self.shared_bytes)

    def persisted_bytes(self, n_nodes: int) -> int:
        """Return the bytes that each of *n_nodes* writes of one state."""
        own_bytes = self.bytes_per_rank - self.shared_bytes
        n_sharers = n_nodes * self.ranks * self._n_shards // self.shards
        is_once = is_written_once(own_bytes, self._n_shards * self.shared_bytes, n_sharers)
        if not is_once or self.shards > KEYS_MAX or self._n_shards > RANK_DIGESTS_MAX:
            return self.state_bytes
        return -(-self.shards * self.shared_bytes // n_nodes) + self._by_rank_bytes

    @property
    def copied_bytes(self) -> int:
        """Return how many bytes each rank copies at a save."""
        return -(-self.state_bytes // self.ranks)

    @property
    def own_bytes(self) -> int:
        return self.state_bytes * self.slots

    @property
    def peers_bytes(self) -> int:
        return self.replica_bytes * self.copy_slots * (self.replicas - 1)

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.peers_bytes

    def __str__(self) -> str:
        by_rank = self.bytes_per_rank - self.shared_bytes
        own = f"{self.ranks} ranks x {format_bytes(by_rank)}"
        if self.shared_bytes:
            own = f"({format_bytes(self._n_shards * self.shared_bytes)} + {own})"
        own = f"{self.slots} slots x {own}"
        if self.replicas == 1:
            return f"{format_bytes(self.total_bytes)} a node ({own})"
        if (self.copy_slots, self.replica_bytes) == (self.slots, self.state_bytes):
            return f"{format_bytes(self.total_bytes)} a node ({own} x {self.replicas} copies)"
        peers = f"{format_bytes(self.peers_bytes)} for peers, {self.copy_slots} slots"
        return f"{format_bytes(self.total_bytes)} a node ({own}, and {peers})"


@dataclass(frozen=True, slots=True)
class RamOption:
    """One option, and what is needed with it."""

    saving: RamSaving
    need: RamNeed

    @property
    def keeps_optimizer(self) -> bool:
        """Return whether a resumed run goes on as if nothing had happened."""
        return self.saving not in {RamSaving.WEIGHTS_ONLY, RamSaving.NO_COPIES}


def ram_options(need: RamNeed) -> tuple[RamOption, ...]:
    """Return *need* unchanged and with ever more given up, without options that save nothing."""
    options = [RamOption(RamSaving.NOTHING, need)]
    least_bytes = need.total_bytes
    weights = max(1, round(need.bytes_per_rank * WEIGHTS_ONLY_SHARE))
    shared = min(weights, round(need.shared_bytes * WEIGHTS_ONLY_SHARE))
    savings: tuple[tuple[RamSaving, dict[str, Any]], ...] = (
        (RamSaving.SPARSE_COPIES, {"copy_slots": SLOTS_MIN}),
        (RamSaving.TWO_SLOTS, {"slots": SLOTS_MIN}),
        (RamSaving.WEIGHTS_ONLY, {"bytes_per_rank": weights, "shared_bytes": shared}),
        (RamSaving.NO_COPIES, {"replicas": 1}),
    )
    for saving, saving_fields in savings:
        need = replace(need, **saving_fields)
        if need.total_bytes < least_bytes:
            least_bytes = need.total_bytes
            options.append(RamOption(saving, need))
    return tuple(options)


def ram_refusal(need: RamNeed, available_bytes: int) -> str | None:
    """Return why *need* does not fit, and the first option that would; None where it fits."""
    if need.total_bytes <= available_bytes:
        return None
    text = f"checkpoints need {need}, and {format_bytes(available_bytes)} are available"
    for option in ram_options(need):
        if option.need.total_bytes <= available_bytes:
            return f"{text}; {describe_option(option)} would fit: {option.need}"
    smallest = ram_options(need)[-1].need
    return f"{text}; nothing fits, the smallest option is {smallest}"


def describe_option(option: RamOption) -> str:
    """Return a description of *option*."""
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


LOST_MAX = 4
# Pinned memory over PCIe Gen5 x16, of 64 GB/s: the stall of a copy without overlap.
DEVICE_TO_HOST_BYTES_PER_S = 55e9


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateInput:
    """The input. Rates are of a whole node, None where unknown; times in seconds.

    ``stall_s`` is what a save to memory takes from training, ``slowdown`` the share of the
    training rate that is lost while a state is written to the persistent tier, ``restart_s`` from a
    failure until workers begin to read their state, ``missed`` the share of failures that memory
    cannot serve; None: `estimate` derives it.
    """

    nodes: Sequence[str]
    replicas: int
    domains: FailureDomains | None
    need: RamNeed
    mtbf_s: float
    restart_s: float
    slowdown: float
    step_s: float | None = None
    stall_s: float | None = None
    missed: float | None = None
    nic_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class RecoveryOdds:
    """For so many nodes lost at once: exact, the paper's lower bound, and all nodes in one ring."""

    odds: SurvivalOdds
    bound: float
    ring: SurvivalOdds


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """How long the transfers of one node take; None where the rate is not known.

    ``replica_s`` to send one copy of a node's state, ``replicas_s`` all copies for its peers;
    ``persist_s`` to write its part of the state, ``read_s`` to read what it loads.
    """

    replica_s: float | None
    replicas_s: float | None
    persist_s: float | None
    read_s: float | None


@dataclass(frozen=True, slots=True)
class CheckpointEstimate:
    """The figures for ``job``. ``tiers`` is None where the rate of a tier is not known."""

    job: EstimateInput
    placement: ReplicaPlacement
    spreads: tuple[DomainSpread, ...]
    recoveries: tuple[RecoveryOdds, ...]
    losses: tuple[DomainLoss, ...]
    times: TransferTimes
    stall_s: float
    missed: float
    tiers: TwoTiers | None


def estimate(job: EstimateInput) -> CheckpointEstimate:
    """Return the plan of *job*.

    Where the share of failures that memory cannot serve is not given, that of the random loss of
    two nodes at once is used.

    Raises:
        CheckpointError, ConfigError: See `place` and `FailureDomains.of`.
    """
    paths = None if job.domains is None else job.domains.of(job.nodes)
    placement = place(job.nodes, job.replicas, paths)
    job = replace(job, need=replace(job.need, are_alike=_are_alike(placement, job)))
    n_nodes, m = len(job.nodes), placement.replicas
    recoveries = tuple(
        RecoveryOdds(
            mixed_odds(n_nodes, m, lost),
            corollary_bound(n_nodes, m, lost),
            ring_odds(n_nodes, m, lost),
        )
        for lost in range(1, min(LOST_MAX, n_nodes) + 1)
    )
    seconds = _transfer_times(job, m)
    stall_s = job.stall_s
    if stall_s is None:
        stall_s = job.need.copied_bytes / DEVICE_TO_HOST_BYTES_PER_S
    missed = job.missed
    if missed is None:
        missed = mixed_odds(n_nodes, m, min(2, n_nodes)).missed
    return CheckpointEstimate(
        job=job,
        placement=placement,
        spreads=() if job.domains is None else domain_spread(placement, job.domains),
        recoveries=recoveries,
        losses=() if job.domains is None else domain_losses(placement, job.domains),
        times=seconds,
        stall_s=stall_s,
        missed=missed,
        tiers=_tier_intervals(job, seconds, stall_s, missed),
    )


def _are_alike(placement: ReplicaPlacement, job: EstimateInput) -> bool:
    """Return whether the holders of each node have the same shards as that node."""
    n_nodes = max(job.need.shards // job.need.ranks, 1)  # that have all shards together
    shards = {node: number % n_nodes for number, node in enumerate(job.nodes)}
    return all(
        shards[holder] == shards[node]
        for node in placement.nodes
        for holder in placement.holders(node)
    )


def _transfer_times(job: EstimateInput, m: int) -> TransferTimes:
    size, nic, disk = job.need.state_bytes, job.nic_bytes_per_s, job.disk_bytes_per_s
    replica_s = None if nic is None else job.need.replica_bytes / nic
    return TransferTimes(
        replica_s,
        0.0 if m == 1 else None if replica_s is None else replica_s * (m - 1),
        None if disk is None else job.need.persisted_bytes(len(job.nodes)) / disk,
        None if disk is None else size / disk,
    )


def _tier_intervals(
    job: EstimateInput, seconds: TransferTimes, stall_s: float, missed: float
) -> TwoTiers | None:
    if seconds.replicas_s is None or seconds.persist_s is None or seconds.read_s is None:
        return None
    # A lost node's state comes from a peer, and all others wait for it.
    nic = job.nic_bytes_per_s
    from_peer_s = job.need.state_bytes / nic if nic is not None and job.replicas > 1 else 0.0
    return two_tiers(
        TierCost(stall_s, seconds.replicas_s, job.restart_s + from_peer_s),
        TierCost(
            seconds.persist_s * job.slowdown, seconds.persist_s, job.restart_s + seconds.read_s
        ),
        job.mtbf_s,
        missed,
        job.step_s or 0.0,
    )
