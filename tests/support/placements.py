"""What tests and benchmarks ask of a placement: what it sends, and how often a state survives."""

from collections.abc import Sequence
from random import Random

from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement
from gpuops.checkpoint.placement.survival import lost_states


def missing_copies(old: ReplicaPlacement, new: ReplicaPlacement) -> tuple[tuple[str, str], ...]:
    """Return the pairs of an owner and a holder that *new* has and *old* has not: what is sent."""
    existing = set(old.copies())
    return tuple(pair for pair in new.copies() if pair not in existing)


def simulate_survival(placement: ReplicaPlacement, lost: int, trials: int, random: Random) -> float:
    """Return the share of *trials* random losses that leave each state a holder.

    It asks the placement itself who holds what, and so checks what `mixed_odds` counts.
    """
    nodes: Sequence[str] = placement.nodes
    survived = sum(
        not lost_states(placement, set(random.sample(nodes, lost))) for _ in range(trials)
    )
    return survived / trials
