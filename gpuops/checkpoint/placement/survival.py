"""The probability that the memory of the remaining nodes still has every state.

Exact, by counting the sets of k lost nodes that leave each state a holder, over all C(N, k) sets.
Every set is assumed to be equally likely; correlated failures are in `domain_losses`.

Also how well a placement separates the copies of one state, compared with the best possible.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from gpuops.checkpoint.placement.domains import DomainPath, FailureDomains
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement


@dataclass(frozen=True, slots=True)
class SurvivalOdds:
    """Of ``total`` sets of ``lost`` nodes, ``survived`` leave a holder of every state."""

    lost: int
    survived: int
    total: int

    @property
    def probability(self) -> float:
        return self.survived / self.total

    @property
    def missed(self) -> float:
        """Return the share that memory does not serve, with full precision where it is small."""
        return (self.total - self.survived) / self.total


@dataclass(frozen=True, slots=True)
class DomainLoss:
    """The effect of the loss of all nodes of one domain."""

    level: str
    domain: DomainPath
    n_nodes: int
    lost_states: tuple[str, ...]  # the nodes whose states no other node holds

    @property
    def is_survived(self) -> bool:
        return not self.lost_states


def mixed_odds(n_nodes: int, replicas: int, lost: int) -> SurvivalOdds:
    """Return the odds of GEMINI's mixed placement when *lost* nodes are lost at once.

    Sets that spare each of g groups of m: inclusion-exclusion over the groups that are lost whole,
    sum over j of (-1)^j C(g, j) C(g m - j m, k - j m). The ring of m + N mod m nodes is counted
    separately (`ring_sets`), and the two are combined.

    Raises:
        ValueError: Not 1 <= *replicas* <= *n_nodes* and 0 <= *lost* <= *n_nodes*.
    """
    _check(n_nodes, replicas, lost)
    m, rest = replicas, n_nodes % replicas
    in_ring = m + rest if rest else 0
    n_groups = (n_nodes - in_ring) // m
    survived = sum(
        ring_sets(in_ring, m, at) * _group_sets(n_groups, m, lost - at)
        for at in range(min(in_ring, lost) + 1)
    )
    return SurvivalOdds(lost, survived, comb(n_nodes, lost))


def ring_odds(n_nodes: int, replicas: int, lost: int) -> SurvivalOdds:
    """Return the odds if all nodes were one ring, for comparison.

    Raises:
        ValueError: As `mixed_odds`.
    """
    _check(n_nodes, replicas, lost)
    return SurvivalOdds(lost, ring_sets(n_nodes, replicas, lost), comb(n_nodes, lost))


def ring_sets(n_nodes: int, m: int, lost: int) -> int:
    """Return how many sets of *lost* nodes of a ring have no *m* neighbours among them.

    The n - k that remain cut the ring into as many gaps, which share k lost nodes, fewer than m
    each: n / (n - k) times the number of such compositions, itself by inclusion-exclusion,
    sum over j of (-1)^j C(n - k, j) C(n - 1 - j m, n - k - 1).
    """
    live = n_nodes - lost
    if live <= 0 or lost == 0:
        return int(lost == 0)
    compositions = sum(
        (1 - 2 * (j % 2)) * comb(live, j) * comb(n_nodes - 1 - j * m, live - 1)
        for j in range(min(live, lost // m) + 1)
    )
    return n_nodes * compositions // live


def corollary_bound(n_nodes: int, replicas: int, lost: int) -> float:
    """Return the lower bound of Wang et al., SOSP 2023, Corollary 1.

    1 for k < m, else max(0, 1 - N C(N - m, k - m) / (m C(N, k))). The paper has it for m that
    divides N; it holds for the mixed placement with a ring where N / m is replaced by the number
    of different sets of holders, N // m - 1 + m + N mod m.

    Raises:
        ValueError: As `mixed_odds`.
    """
    _check(n_nodes, replicas, lost)
    if lost < replicas:
        return 1.0
    rest = n_nodes % replicas
    n_sets = n_nodes // replicas - 1 + replicas + rest if rest else n_nodes // replicas
    unsafe = Fraction(n_sets * comb(n_nodes - replicas, lost - replicas), comb(n_nodes, lost))
    return float(max(Fraction(0), 1 - unsafe))


def lost_states(placement: ReplicaPlacement, lost: Collection[str]) -> tuple[str, ...]:
    """Return the nodes whose states have no holder left when the nodes *lost* are lost."""
    lost_nodes = lost if isinstance(lost, set | frozenset) else set(lost)
    return tuple(
        node
        for node in placement.nodes
        if node in lost_nodes and lost_nodes.issuperset(placement.holders(node))
    )


def domain_losses(placement: ReplicaPlacement, domains: FailureDomains) -> tuple[DomainLoss, ...]:
    """Return what the loss of each single domain does, from the widest level to the narrowest.

    Raises:
        ConfigError: A node has no domain.
    """
    losses = []
    paths = domains.of(placement.nodes)
    for depth, level in enumerate(domains.levels, start=1):
        members: dict[DomainPath, list[str]] = {}
        for node, path in paths.items():
            members.setdefault(path[:depth], []).append(node)
        for domain, nodes in members.items():
            lost_nodes = set(nodes)
            alone = tuple(node for node in nodes if lost_nodes.issuperset(placement.holders(node)))
            losses.append(DomainLoss(level, domain, len(nodes), alone))
    return tuple(losses)


def _group_sets(n_groups: int, m: int, lost: int) -> int:
    """Return how many sets of *lost* nodes leave a node in each group of *m*."""
    return sum(
        (1 - 2 * (j % 2)) * comb(n_groups, j) * comb((n_groups - j) * m, lost - j * m)
        for j in range(min(n_groups, lost // m) + 1)
    )


def _check(n_nodes: int, replicas: int, lost: int) -> None:
    if not 1 <= replicas <= n_nodes:
        raise ValueError(f"{n_nodes} nodes cannot hold {replicas} copies of a state")
    if not 0 <= lost <= n_nodes:
        raise ValueError(f"{lost} of {n_nodes} nodes cannot be lost")


@dataclass(frozen=True, slots=True)
class DomainSpread:
    """One level of domains. "At best" is a bound that no placement with as many copies exceeds.

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


def domain_spread(placement: ReplicaPlacement, domains: FailureDomains) -> tuple[DomainSpread, ...]:
    """Return the spread of *placement* on each level, from the widest to the narrowest.

    The bounds: as every node holds m states, a domain of c of the N nodes meets at most
    min(N, m c) states; and the N - c nodes outside of it have copies of at most m (N - c) states,
    so that all copies of the others are inside.

    Raises:
        ConfigError: A node has no domain.
    """
    paths = domains.of(placement.nodes)
    return tuple(
        _level_spread(placement, name, {node: path[: depth + 1] for node, path in paths.items()})
        for depth, name in enumerate(domains.levels)
    )


def n_colocated(placement: ReplicaPlacement, paths: Mapping[str, DomainPath]) -> int:
    """Return the number of nodes with all copies of their state in one of the narrowest domains.

    *paths* are those of all nodes, of one length. 0 where there are none, and where only one copy
    is requested or possible.
    """
    if not paths or placement.replicas == 1:
        return 0
    return sum(len({paths[h] for h in placement.holders(node)}) == 1 for node in placement.nodes)


def _level_spread(
    placement: ReplicaPlacement, name: str, domain: Mapping[str, tuple[str, ...]]
) -> DomainSpread:
    sizes = Counter(domain.values())
    n_nodes, m = len(placement.nodes), placement.replicas
    n_domains_met = [
        len({domain[holder] for holder in placement.holders(node)}) for node in placement.nodes
    ]
    return DomainSpread(
        level=name,
        n_domains=len(sizes),
        largest=max(sizes.values()),
        together=n_domains_met.count(1),
        together_at_best=sum(max(0, n_nodes - m * (n_nodes - size)) for size in sizes.values()),
        met=sum(n_domains_met) / n_nodes,
        met_at_best=sum(min(n_nodes, m * size) for size in sizes.values()) / n_nodes,
    )
