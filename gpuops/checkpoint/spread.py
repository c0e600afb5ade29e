"""How well a placement keeps the copies of one state apart, beside the best that can be."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.checkpoint.domains import DomainPath, Domains
from gpuops.checkpoint.placement import Placement


@dataclass(frozen=True, slots=True)
class Spread:
    """One level of domains. What is "at best" is a bound that no placement of as many copies beats.

    ``together`` counts the nodes whose state has all its copies in one domain: the loss of that
    domain loses the state. ``met`` is how many domains hold a copy of a state, on average.
    """

    level: str
    n_domains: int
    largest: int  # nodes of the largest domain
    together: int
    together_at_best: int
    met: float
    met_at_best: float


def spread(placement: Placement, domains: Domains) -> tuple[Spread, ...]:
    """Return how *placement* does on each level, from the widest to the narrowest.

    The bounds: as every node holds m states, a domain of c of the N nodes meets at most
    min(N, m c) states; and the N - c nodes outside of it hold copies of at most m (N - c), so that
    of the others all copies are inside.

    Raises:
        ConfigError: A node has no domain.
    """
    paths = domains.of(placement.nodes)
    return tuple(
        _level(placement, name, {node: path[: depth + 1] for node, path in paths.items()})
        for depth, name in enumerate(domains.levels)
    )


def n_together(placement: Placement, paths: Mapping[str, DomainPath]) -> int:
    """Return of how many nodes all copies of the state lie in one of the narrowest domains.

    *paths* are those of all nodes, of one length. 0 where there are none, and where one copy is all
    that was asked for, or can be.
    """
    if not paths or placement.replicas == 1:
        return 0
    return sum(len({paths[h] for h in placement.holders(node)}) == 1 for node in placement.nodes)


def _level(placement: Placement, name: str, domain: Mapping[str, tuple[str, ...]]) -> Spread:
    sizes = Counter(domain.values())
    n_nodes, m = len(placement.nodes), placement.replicas
    met = [len({domain[holder] for holder in placement.holders(node)}) for node in placement.nodes]
    return Spread(
        level=name,
        n_domains=len(sizes),
        largest=max(sizes.values()),
        together=met.count(1),
        together_at_best=sum(max(0, n_nodes - m * (n_nodes - size)) for size in sizes.values()),
        met=sum(met) / n_nodes,
        met_at_best=sum(min(n_nodes, m * size) for size in sizes.values()) / n_nodes,
    )
