"""A pair test of a sweep: two nodes that ran one collective together, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

NodePair = tuple[str, str]


class PairOutcome(StrEnum):
    """What came of a pair test; ``unknown``: it ran, but it did not measure."""

    PASS = "pass"  # noqa: S105 not a password
    SLOW = "slow"
    FAIL = "fail"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"

    @property
    def is_bad(self) -> bool:
        """Return whether something is wrong with the pair."""
        return self in {PairOutcome.SLOW, PairOutcome.FAIL, PairOutcome.TIMEOUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """One test of two nodes. ``nodes`` is sorted; ``value`` is a rate in ``unit``.

    ``round`` counts from 0 within the sweep. ``t_us``: when it ended, by the coordinator's
    clock.
    """

    nodes: NodePair
    outcome: PairOutcome
    round: int = 0
    value: float | None = None
    unit: str = "GB/s"
    sweep: str = ""
    t_us: int = 0

    def __post_init__(self) -> None:
        if self.nodes[0] >= self.nodes[1]:
            raise ValueError(f"a pair test is of two different nodes, sorted; got {self.nodes!r}")


def node_pair(a: str, b: str) -> NodePair:
    """Return the pair of *a* and *b*, sorted."""
    return (a, b) if a < b else (b, a)


def is_same_domain(pair: NodePair, domains: Mapping[str, str]) -> bool | None:
    """Return whether both nodes are below one leaf switch; None where *domains* lacks one."""
    first, second = domains.get(pair[0]), domains.get(pair[1])
    return None if first is None or second is None else first == second
