"""The order of a placement's ring: who follows whom, so that few holders share a failure domain.

A ring has fewer than twice as many nodes as there are copies; each node's state is held by it and
by the m - 1 that follow it, a window of the ring.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpuops.checkpoint.domains import DomainPath

EXHAUSTIVE_MAX = 7  # 720 orders; the ring of four copies
SEARCHED_MAX = 32
Score = tuple[int, int]


def arrange(nodes: Sequence[str], m: int, domain: Mapping[str, DomainPath]) -> tuple[str, ...]:
    """Return *nodes* in an order whose windows of *m* span many domains.

    The best order for rings of up to `EXHAUSTIVE_MAX`, a good one for longer ones.
    """
    if len({domain[node] for node in nodes}) == 1:
        return tuple(nodes)
    if len(nodes) <= EXHAUSTIVE_MAX:
        orders = ((nodes[0], *rest) for rest in itertools.permutations(nodes[1:]))
        return min(orders, key=lambda order: _score(order, m, domain))
    stride = next(
        n for n in range(round(len(nodes) * 0.618), len(nodes)) if _coprime(n, len(nodes))
    )
    alike = sorted(nodes, key=lambda node: domain[node])
    order = [alike[at * stride % len(nodes)] for at in range(len(nodes))]
    return _climbed(order, m, domain) if len(nodes) <= SEARCHED_MAX else tuple(order)


def insert(
    core: Sequence[str],
    added: Sequence[str],
    m: int,
    domain: Mapping[str, DomainPath],
    had: Collection[tuple[str, str]],
) -> tuple[str, ...]:
    """Return the ring *core* with *added* let in, each where the fewest copies move.

    *had* are the pairs of owner and holder whose copies are there. Of equals the place with the
    best spread over domains is taken, of these the first.
    """
    order = tuple(core)
    for node in added:
        if len(order) > 2 * SEARCHED_MAX:
            order = (*order, node)
            continue
        order = min(
            ((*order[:at], node, *order[at:]) for at in range(len(order) + 1)),
            key=lambda tried: (_moved(tried, m, had), _score(tried, m, domain)),
        )
    return order


def windows(order: Sequence[str], m: int) -> Iterator[tuple[str, ...]]:
    """Yield for each node of the ring *order* itself and the ``m - 1`` that follow it."""
    for at in range(len(order)):
        yield tuple(order[(at + ahead) % len(order)] for ahead in range(min(m, len(order))))


def _score(order: Sequence[str], m: int, domain: Mapping[str, DomainPath]) -> Score:
    """Return how many windows are within one domain, over all levels; and minus the domains met."""
    together = met = 0
    for window in windows(order, m):
        paths = [domain[node] for node in window]
        for depth in range(1, len(paths[0]) + 1):
            n_distinct = len({path[:depth] for path in paths})
            together += n_distinct == 1
            met += n_distinct
    return together, -met


def _moved(order: Sequence[str], m: int, had: Collection[tuple[str, str]]) -> int:
    return sum(
        (window[0], holder) not in had for window in windows(order, m) for holder in window[1:]
    )


def _climbed(order: list[str], m: int, domain: Mapping[str, DomainPath]) -> tuple[str, ...]:
    """Swap two of *order* as long as that makes it better."""
    best, better = _score(order, m, domain), True
    while better:
        better = False
        for one, other in itertools.combinations(range(len(order)), 2):
            order[one], order[other] = order[other], order[one]
            score = _score(order, m, domain)
            if score < best:
                best, better = score, True
            else:
                order[one], order[other] = order[other], order[one]
    return tuple(order)


def _coprime(one: int, other: int) -> bool:
    while other:
        one, other = other, one % other
    return one == 1
