"""The order of a placement's ring: who follows whom, so that few holders share a failure domain.

A ring has fewer than twice as many nodes as there are copies; each node's state is held by it and
by the m - 1 that follow it, a window of the ring.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpuops.checkpoint.placement.domains import DomainPath

EXHAUSTIVE_MAX = 7  # 720 orders; the ring of four copies
SEARCHED_MAX = 32
Score = tuple[int, int]


def order_ring(nodes: Sequence[str], m: int, domain: Mapping[str, DomainPath]) -> tuple[str, ...]:
    """Return *nodes* in an order whose windows of *m* span many domains.

    The best order for rings of up to `EXHAUSTIVE_MAX`, a good one for longer ones.
    """
    if len({domain[node] for node in nodes}) == 1:
        return tuple(nodes)
    if len(nodes) <= EXHAUSTIVE_MAX:
        orders = ((nodes[0], *rest) for rest in itertools.permutations(nodes[1:]))
        return min(orders, key=lambda order: _spread_score(order, m, domain))
    stride = next(
        n for n in range(round(len(nodes) * 0.618), len(nodes)) if _is_coprime(n, len(nodes))
    )
    alike = sorted(nodes, key=lambda node: domain[node])
    order = [alike[at * stride % len(nodes)] for at in range(len(nodes))]
    return _hill_climb(order, m, domain) if len(nodes) <= SEARCHED_MAX else tuple(order)


def insert_nodes(
    ring: Sequence[str],
    new_nodes: Sequence[str],
    m: int,
    domain: Mapping[str, DomainPath],
    existing: Collection[tuple[str, str]],
) -> tuple[str, ...]:
    """Return the ring *ring* with *new_nodes* let in, each where the fewest copies move.

    *existing* are the pairs of owner and holder whose copies are there. Of equals the place with
    the best spread over domains is taken, of these the first.
    """
    order = tuple(ring)
    for node in new_nodes:
        if len(order) > 2 * SEARCHED_MAX:
            order = (*order, node)
            continue
        order = min(
            ((*order[:at], node, *order[at:]) for at in range(len(order) + 1)),
            key=lambda tried: (_n_moved(tried, m, existing), _spread_score(tried, m, domain)),
        )
    return order


def windows(order: Sequence[str], m: int) -> Iterator[tuple[str, ...]]:
    """Yield for each node of the ring *order* itself and the ``m - 1`` that follow it."""
    for at in range(len(order)):
        yield tuple(order[(at + ahead) % len(order)] for ahead in range(min(m, len(order))))


def _spread_score(order: Sequence[str], m: int, domain: Mapping[str, DomainPath]) -> Score:
    """Return how many windows are within one domain, over all levels; and minus the domains met."""
    n_colocated = n_domains = 0
    for window in windows(order, m):
        paths = [domain[node] for node in window]
        for depth in range(1, len(paths[0]) + 1):
            n_distinct = len({path[:depth] for path in paths})
            n_colocated += n_distinct == 1
            n_domains += n_distinct
    return n_colocated, -n_domains


def _n_moved(order: Sequence[str], m: int, existing: Collection[tuple[str, str]]) -> int:
    return sum(
        (window[0], holder) not in existing for window in windows(order, m) for holder in window[1:]
    )


def _hill_climb(order: list[str], m: int, domain: Mapping[str, DomainPath]) -> tuple[str, ...]:
    """Swap two of *order* as long as that makes it better."""
    best, is_better = _spread_score(order, m, domain), True
    while is_better:
        is_better = False
        for i, j in itertools.combinations(range(len(order)), 2):
            order[i], order[j] = order[j], order[i]
            score = _spread_score(order, m, domain)
            if score < best:
                best, is_better = score, True
            else:
                order[i], order[j] = order[j], order[i]
    return tuple(order)


def _is_coprime(i: int, j: int) -> bool:
    while j:
        i, j = j, i % j
    return i == 1
