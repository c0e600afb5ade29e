"""Which nodes hold copies of which node's state.

GEMINI's mixed strategy (Wang et al., SOSP 2023, Algorithm 1), for any number of nodes N and of
copies m, a node's own among them: where m divides N, groups of m that hold each other's states;
else one group fewer, and a ring of the m + N mod m nodes that are left, in which each node's state
is also held by the m - 1 that follow it. Every state has exactly m holders and every node holds
exactly m states.

The paper groups neighbours. Here nodes are ordered by failure domain and dealt to the groups in
turn, so that a domain of c nodes meets min(c, groups) groups, the most it can, on every level of
domains at once. After a change of nodes, whole groups stay as they are (`rebalance`).
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated

from gpuops.checkpoint.placement.domains import DomainPath
from gpuops.checkpoint.types import CheckpointError
from gpuops.wire.messages import Limit, Message

NODES_MAX = 65_536
DomainPaths = Mapping[str, DomainPath]
NodeNames = Annotated[tuple[str, ...], Limit(NODES_MAX)]


@dataclass(frozen=True, slots=True)
class ReplicaPlacement(Message):
    """Who holds what: ``groups`` of as many nodes as there are copies, and the ``ring``, or ``()``.

    ``requested_replicas`` is the requested number of copies, a node's own included; ``replicas``
    the actual number, which is smaller where there are fewer nodes.
    """

    requested_replicas: int
    groups: Annotated[tuple[NodeNames, ...], Limit(NODES_MAX)]
    ring: NodeNames = ()
    _positions: Mapping[str, tuple[tuple[str, ...], int]] = field(
        init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        positions = {node: (block, at) for block in self.blocks for at, node in enumerate(block)}
        if self.requested_replicas < 1 or not 0 < len(positions) <= NODES_MAX:
            raise CheckpointError(f"a placement needs at least one copy and 1 to {NODES_MAX} nodes")
        n_nodes, m = len(positions), min(self.requested_replicas, len(positions))
        n_ring = 0 if n_nodes % m == 0 else m + n_nodes % m
        if len(self.ring) != n_ring or sum(map(len, self.blocks)) != n_nodes:
            raise CheckpointError(f"{n_nodes} nodes with {m} copies need a ring of {n_ring}")
        if any(len(group) != m for group in self.groups):
            raise CheckpointError(f"a group of a placement with {m} copies must have {m} nodes")
        object.__setattr__(self, "_positions", positions)

    @property
    def replicas(self) -> int:
        return min(self.requested_replicas, len(self._positions))

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups, and the ring last where there is one."""
        return (*self.groups, self.ring) if self.ring else self.groups

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._positions)

    def holders(self, node: str) -> tuple[str, ...]:
        """Return the holders of the state of *node*, itself first.

        Raises:
            CheckpointError: It is not one of the nodes.
        """
        block, at = self._position(node)
        return tuple(block[(at + ahead) % len(block)] for ahead in range(self.replicas))

    def owners_of(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose states *node* has, its own first.

        Raises:
            CheckpointError: It is not one of the nodes.
        """
        block, at = self._position(node)
        return tuple(block[(at - behind) % len(block)] for behind in range(self.replicas))

    def copies(self) -> Iterator[tuple[str, str]]:
        """Yield each pair of an owner and another node that has its state."""
        for node in self._positions:
            for holder in self.holders(node)[1:]:
                yield node, holder

    def _position(self, node: str) -> tuple[tuple[str, ...], int]:
        position = self._positions.get(node)
        if position is None:
            raise CheckpointError(f"{node} is not one of the {len(self._positions)} nodes placed")
        return position


def place(
    nodes: Sequence[str], replicas: int, paths: DomainPaths | None = None
) -> ReplicaPlacement:
    """Return a placement of *replicas* copies of each node's state, its own included.

    With one copy each node is a group of its own, and no loss of a node is survived. With more
    copies than nodes all nodes are one group.

    Args:
        nodes: Their unique names; the result depends on their order.
        replicas: At least 1.
        paths: The failure domain of each node, all of one length; nodes without one share an
            unknown domain. None: neighbours in *nodes* count as in one domain.

    Raises:
        CheckpointError: No node, a duplicate name, no copy, or too many nodes.
    """
    _check(nodes, replicas)
    m = min(replicas, len(nodes))
    domain = _paths(nodes, paths)
    ordered = _by_domain(nodes, domain)
    n_groups, rest = divmod(len(nodes), m)
    extra = _pick_from_largest(ordered, domain, rest)
    taken = set(extra)
    dealt = [node for node in ordered if node not in taken]
    groups = [tuple(dealt[column::n_groups]) for column in range(n_groups)]
    if not rest:
        return ReplicaPlacement(replicas, tuple(groups))
    widened = min(
        range(n_groups), key=lambda column: (_closeness(extra, groups[column], domain), -column)
    )
    ring = order_ring([*groups.pop(widened), *extra], m, domain)
    return ReplicaPlacement(replicas, tuple(groups), ring)


def rebalance(
    old: ReplicaPlacement, nodes: Sequence[str], paths: DomainPaths | None = None
) -> ReplicaPlacement:
    """Return a placement for *nodes* that changes as little as possible of *old*.

    Every group whose nodes are all present stays, but for one that must take in the last few where
    they are fewer than the copies. The rest of a broken group stays together where possible, new
    nodes fill its gaps, chosen by failure domain; the ring keeps its order. Where the number of
    copies itself changes, with fewer nodes than copies, the placement is computed from scratch.

    Raises:
        CheckpointError: As `place`.
    """
    _check(nodes, old.requested_replicas)
    m = min(old.requested_replicas, len(nodes))
    if m != old.replicas:
        return place(nodes, old.requested_replicas, paths)
    live, domain, existing = set(nodes), _paths(nodes, paths), set(old.copies())
    intact = [group for group in old.groups if live.issuperset(group)]
    settled = set(chain.from_iterable(intact))
    loose = [node for node in nodes if node not in settled]
    n_groups, rest = divmod(len(loose), m)
    if loose and not n_groups:
        widened = intact.pop(_farthest_group(intact, loose, domain))
        return ReplicaPlacement(
            old.requested_replicas, tuple(intact), insert_nodes(widened, loose, m, domain, existing)
        )
    seeds = [
        [node for node in group if node in live]
        for group in old.groups
        if settled.isdisjoint(group)
    ]
    ring = [node for node in old.ring if node in live]
    core: list[str] = []
    if rest:
        core, n_groups = ring[: m + rest], n_groups - 1
    else:
        seeds += [ring[at : at + m] for at in range(0, len(ring), m)]
    stays = set(core)
    rebuilt = _GroupRebuilder(old, m, domain)
    new, left = rebuilt.rebuild(seeds, n_groups, [node for node in loose if node not in stays])
    groups = (*intact, *new)
    if not core and any((one, other) in existing for one in left for other in left):
        core, left = left[:1], left[1:]
    if core:
        return ReplicaPlacement(
            old.requested_replicas, groups, insert_nodes(core, left, m, domain, existing)
        )
    return ReplicaPlacement(
        old.requested_replicas, groups, order_ring(left, m, domain) if left else ()
    )


class _GroupRebuilder:
    """Builds groups from the rest of broken ones and from new nodes."""

    def __init__(self, old: ReplicaPlacement, m: int, domain: DomainPaths) -> None:
        self._m = m
        self._domain = domain
        self._home = {node: number for number, block in enumerate(old.blocks) for node in block}

    def rebuild(
        self, seeds: Iterable[Sequence[str]], n_groups: int, loose: Sequence[str]
    ) -> tuple[list[tuple[str, ...]], list[str]]:
        """Return *count* groups, each around one of *seeds*, the fullest first; and the rest."""
        fullest = sorted(filter(None, seeds), key=len, reverse=True)[:n_groups]
        begun = [list(seed) for seed in fullest]
        placed = set(chain.from_iterable(begun))
        pool: dict[tuple[int, DomainPath], list[str]] = {}
        for node in loose:
            if node not in placed:
                key = (self._home.get(node, -1), self._domain[node])
                pool.setdefault(key, []).append(node)
        for group in begun:
            while len(group) < self._m:
                group.append(self._draw(pool, group))
        made = [tuple(group) for group in begun]
        drawn = set(chain.from_iterable(made))
        left = [node for node in loose if node not in drawn]
        fresh = n_groups - len(made)
        if not fresh:
            return made, left
        ordered = _by_domain(left, self._domain)
        extra = set(_pick_from_largest(ordered, self._domain, len(left) - fresh * self._m))
        dealt = [node for node in ordered if node not in extra]
        made += [tuple(dealt[column::fresh]) for column in range(fresh)]
        return made, [node for node in left if node in extra]

    def _draw(self, pool: dict[tuple[int, DomainPath], list[str]], group: Sequence[str]) -> str:
        """Take the node from *pool* that already shares copies with *group*, or the farthest."""
        homes = {self._home.get(node) for node in group}

        def cost(key: tuple[int, DomainPath]) -> tuple[int, int, int]:
            shared = sum(_shared(key[1], self._domain[node]) for node in group)
            # Of equals, the largest domain: the rest is then spread most evenly.
            return (0 if key[0] in homes else 1, shared, -len(pool[key]))

        best = min(pool, key=cost)
        node = pool[best].pop(0)
        if not pool[best]:
            del pool[best]
        return node


def _farthest_group(
    intact: Sequence[tuple[str, ...]], loose: Sequence[str], domain: DomainPaths
) -> int:
    """Return which of *intact* is farthest from the domains of *loose*, the last of equals."""
    return min(
        range(len(intact)), key=lambda number: (_closeness(loose, intact[number], domain), -number)
    )


def _check(nodes: Sequence[str], replicas: int) -> None:
    if replicas < 1:
        raise CheckpointError(f"cannot place {replicas} copies of a state; at least 1 is required")
    if not nodes:
        raise CheckpointError("copies cannot be placed without a node")
    if len(nodes) > NODES_MAX:
        raise CheckpointError(f"{len(nodes)} nodes cannot be placed; at most {NODES_MAX} can")
    if len(set(nodes)) != len(nodes):
        twice = next(node for at, node in enumerate(nodes) if node in nodes[:at])
        raise CheckpointError(f"node {twice} cannot be placed twice")


def _paths(nodes: Sequence[str], paths: DomainPaths | None) -> dict[str, DomainPath]:
    if paths is None:
        return dict.fromkeys(nodes, ())
    depth = len(next(iter(paths.values()), ()))
    return {node: paths.get(node, ("",) * depth) for node in nodes}


def _by_domain(nodes: Sequence[str], domain: DomainPaths) -> list[str]:
    """Return *nodes* grouped by domain, domains in order of appearance."""
    first: dict[DomainPath, int] = {}
    for at, node in enumerate(nodes):
        path = domain[node]
        for depth in range(1, len(path) + 1):
            first.setdefault(path[:depth], at)

    def key(node: str) -> tuple[int, ...]:
        path = domain[node]
        return tuple(first[path[:depth]] for depth in range(1, len(path) + 1))

    return sorted(nodes, key=key)


def _pick_from_largest(ordered: Sequence[str], domain: DomainPaths, count: int) -> list[str]:
    """Return *count* of *ordered*, each the last of the domain that is then the largest."""
    by_domain: dict[DomainPath, list[str]] = {}
    for node in ordered:
        by_domain.setdefault(domain[node], []).append(node)
    taken: list[str] = []
    for _ in range(count):
        seen = [domain[node] for node in taken]
        largest = max(by_domain, key=lambda path: (len(by_domain[path]), -seen.count(path)))
        taken.append(by_domain[largest].pop())
    return taken


def _closeness(some: Sequence[str], others: Sequence[str], domain: DomainPaths) -> int:
    """Return on how many levels, over all pairs, one of *some* shares a domain with another."""
    return sum(_shared(domain[one], domain[other]) for one in some for other in others)


def _shared(one: DomainPath, other: DomainPath) -> int:
    depth = 0
    for a, b in zip(one, other, strict=True):
        if a != b:
            break
        depth += 1
    return depth


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
    """Return the ring *ring* with *new_nodes* inserted where the fewest copies move.

    *existing*: the pairs of owner and holder of existing copies. Of equal positions the one with
    the best spread over domains is used, of these the first.
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
    """Swap two of *order* as long as that improves it."""
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
