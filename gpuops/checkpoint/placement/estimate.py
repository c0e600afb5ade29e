"""The plan of a job: what copies on these nodes survive, how much they take, what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuops.checkpoint.placement.domains import FailureDomains
from gpuops.checkpoint.placement.ram import RamNeed
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
from gpuops.plan.interval import TierCost, TwoTiers, two_tiers

LOST_MAX = 4
# Pinned memory over PCIe Gen5 x16, of 64 GB/s: the stall of a copy that overlaps with nothing.
DEVICE_TO_HOST_BYTES_PER_S = 55e9


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateInput:
    """What is asked. Rates are of a whole node, None where unknown; times in seconds.

    ``stall_s`` is what a save to memory takes from training, ``slowdown`` the share of the
    training rate that is lost while a state is written to the persistent tier, ``restart_s`` from a
    failure until workers begin to read their state, ``missed`` the share of failures that memory
    cannot serve; None for what `plan_of` derives.
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
    """For so many nodes lost at once: exact, the paper's lower bound, and all nodes as one ring."""

    odds: SurvivalOdds
    bound: float
    ring: SurvivalOdds


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """How long the bytes of a node are under way; None where the rate is not known.

    ``replica_s`` to send one copy of a node's state, ``replicas_s`` all that it owes its peers;
    ``persist_s`` to write it, and to read it again.
    """

    replica_s: float | None
    replicas_s: float | None
    persist_s: float | None


@dataclass(frozen=True, slots=True)
class CheckpointEstimate:
    """The figures of `Job`. ``tiers`` is None where the rate of a tier is not known."""

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

    Where the share of failures that memory cannot serve is not given, it is that of two nodes lost
    at once: as if every failure took two, at random.

    Raises:
        CheckpointError, ConfigError: See `place` and `FailureDomains.of`.
    """
    paths = None if job.domains is None else job.domains.of(job.nodes)
    placement = place(job.nodes, job.replicas, paths)
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
        stall_s = job.need.bytes_per_rank / DEVICE_TO_HOST_BYTES_PER_S
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


def _transfer_times(job: EstimateInput, m: int) -> TransferTimes:
    size, nic, disk = job.need.state_bytes, job.nic_bytes_per_s, job.disk_bytes_per_s
    replica_s = None if nic is None else size / nic
    return TransferTimes(
        replica_s,
        0.0 if m == 1 else None if replica_s is None else replica_s * (m - 1),
        None if disk is None else size / disk,
    )


def _tier_intervals(
    job: EstimateInput, seconds: TransferTimes, stall_s: float, missed: float
) -> TwoTiers | None:
    if seconds.replicas_s is None or seconds.persist_s is None:
        return None
    # A lost node's state comes from a peer, and all others wait for it.
    from_peer_s = (seconds.replica_s or 0.0) if job.replicas > 1 else 0.0
    return two_tiers(
        TierCost(stall_s, seconds.replicas_s, job.restart_s + from_peer_s),
        TierCost(
            seconds.persist_s * job.slowdown, seconds.persist_s, job.restart_s + seconds.persist_s
        ),
        job.mtbf_s,
        missed,
        job.step_s or 0.0,
    )
