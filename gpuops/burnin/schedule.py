"""Which nodes are tested together in a sweep: rounds of disjoint pairs, the same for the same seed.

Up to `ALL_PAIRS_MAX` nodes every pair is tested once, by the circle method of round-robin
tournaments (N - 1 rounds; N for odd N, and each node is left out of one). Above, two rounds of
random pairs, whatever N; pairs that earlier sweeps have not tested come first. With domains (leaf
switches) the first round stays below the leaves and the second crosses them. Then each suspect
meets partners that passed, and a pair whose ends both passed is tested once more
(`confirmation_round`).
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from gpuops.burnin.pairs import NodePair, is_same_domain, node_pair

ALL_PAIRS_MAX = 16
RANDOM_ROUNDS = 2
CONFIRMATION_ROUNDS = 2
_TRIES = 64  # other pairs that one pair is compared with, to exchange partners


@dataclass(frozen=True, slots=True)
class SweepRound:
    """Disjoint pairs that are tested at the same time, and the nodes that are left out."""

    pairs: tuple[NodePair, ...]
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenQuestions:
    """What a confirmation round should find out (`blame.open_questions`).

    ``suspects`` need another partner that passed, the most important first; ``repeat`` are pairs to
    test once more; ``partners`` passed, with a number: a higher one is trusted more. ``met`` has
    the nodes that each node was already tested with.
    """

    suspects: tuple[str, ...] = ()
    repeat: tuple[NodePair, ...] = ()
    partners: Mapping[str, int] = field(default_factory=dict)
    met: Mapping[str, Collection[str]] = field(default_factory=dict)


def first_rounds(
    nodes: Iterable[str],
    *,
    seed: int,
    tested: Collection[NodePair] = (),
    domains: Mapping[str, str] | None = None,
) -> tuple[SweepRound, ...]:
    """Return the rounds of a sweep of *nodes* before anything is known; none for fewer than two.

    *tested*: the pairs that earlier sweeps tested (a set; each sorted). *domains*: the leaf switch
    of each node; used where they are two or more. The order of *nodes* does not matter.

    Raises:
        ValueError: A node is named twice.
    """
    names = sorted(nodes)
    if len(set(names)) < len(names):
        twice = next(a for a, b in pairwise(names) if a == b)
        raise ValueError(f"node {twice} is named twice; a sweep tests each node once a round")
    rng = random.Random(f"sweep {seed}")  # noqa: S311 no secret
    if len(names) <= ALL_PAIRS_MAX:
        return _all_pairs(names, rng)
    leaves = {node: domains[node] for node in names if node in domains} if domains else {}
    kinds: list[bool | None] = [None] * RANDOM_ROUNDS
    if len(set(leaves.values())) > 1:
        kinds = [True, False]
    avoid, idle, rounds = set(tested), set[str](), []
    for same in kinds:
        one = _random_round(names, rng, avoid, idle, (leaves, same))
        rounds.append(one)
        avoid |= set(one.pairs)
        idle |= set(one.idle)
    return tuple(rounds)


def confirmation_round(
    questions: OpenQuestions,
    *,
    seed: int,
    domains: Mapping[str, str] | None = None,
    fill: bool = False,
    tested: Collection[NodePair] = (),
) -> SweepRound:
    """Return the round that answers as many of the *questions* as fit into one; empty if none.

    A suspect gets a partner that it has not met in this sweep. With *domains* its partners are, in
    turns, of its own leaf and of another one, where there are such. *fill*: all other nodes are
    tested too, in pairs that this sweep and *tested* do not have; the round takes no longer, and
    the history of weeks finds a node that fails now and then sooner.
    """
    rng = random.Random(f"confirmation {seed}")  # noqa: S311 no secret
    pairs = list(_disjoint(questions.repeat))
    taken = set(chain.from_iterable(pairs))
    busy = taken | set(questions.suspects)
    free = [node for node in sorted(questions.partners) if node not in busy]
    rng.shuffle(free)
    free.sort(key=lambda node: -questions.partners[node])
    pool = _PartnerPool(free, domains or {})
    idle = []
    for suspect in questions.suspects:
        if suspect in taken:
            continue
        partner = pool.take(suspect, questions.met.get(suspect, ()))
        if partner is None:
            idle.append(suspect)
        else:
            pairs.append(node_pair(suspect, partner))
    if fill:
        rest = pool.rest()
        rng.shuffle(rest)
        idle += [rest.pop()] if len(rest) % 2 else []

        def cost(pair: NodePair) -> int:
            return (pair in tested) + 2 * (pair[1] in questions.met.get(pair[0], ()))

        pairs += _exchanged(_adjacent(rest), rng, cost)
    return SweepRound(tuple(pairs), tuple(idle))


def share_tested(nodes: Iterable[str], tested: Collection[NodePair]) -> float:
    """Return which share of all pairs of *nodes* is in *tested*, from 0 to 1."""
    names = set(nodes)
    n_pairs = len(names) * (len(names) - 1) // 2
    found = sum(a in names and b in names for a, b in set(tested))
    return found / n_pairs if n_pairs else 1.0


def _all_pairs(names: list[str], rng: random.Random) -> tuple[SweepRound, ...]:
    """Return every pair once: one node stands still, the others turn around it."""
    if len(names) < 2:
        return ()
    ring: list[str | None] = [*names]
    rng.shuffle(ring)
    if len(ring) % 2:
        ring.append(None)
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        facing = list(zip(ring[:half], reversed(ring[half:]), strict=True))
        pairs = tuple(node_pair(a, b) for a, b in facing if a is not None and b is not None)
        alone = tuple(a or b or "" for a, b in facing if a is None or b is None)
        rounds.append(SweepRound(pairs, alone))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(rounds)


def _random_round(
    names: list[str],
    rng: random.Random,
    avoid: Collection[NodePair],
    was_idle: Collection[str],
    topology: tuple[Mapping[str, str], bool | None],
) -> SweepRound:
    """Return one round of random pairs that are not in *avoid*, as far as that is possible."""
    leaves, same = topology
    order = names.copy()
    rng.shuffle(order)
    idle: tuple[str, ...] = ()
    if len(order) % 2:
        idle = (next(node for node in order if node not in was_idle),)
        order.remove(idle[0])
    if same:
        return SweepRound(tuple(_within_leaves(order, leaves, rng, avoid)), idle)

    def cost(pair: NodePair) -> int:
        crosses = same is None or not is_same_domain(pair, leaves)
        return (pair in avoid) + 2 * (not crosses)

    if same is False:
        ranks = {leaf: n for n, leaf in enumerate(dict.fromkeys(map(leaves.get, order)))}
        order.sort(key=lambda node: ranks[leaves.get(node)])
    half = len(order) // 2
    pairs = [node_pair(a, b) for a, b in zip(order[:half], order[half:], strict=True)]
    return SweepRound(tuple(_exchanged(pairs, rng, cost)), idle)


def _within_leaves(
    order: list[str], leaves: Mapping[str, str], rng: random.Random, avoid: Collection[NodePair]
) -> Iterator[NodePair]:
    groups: dict[str | None, list[str]] = {}
    for node in order:
        groups.setdefault(leaves.get(node), []).append(node)
    left = groups.pop(None, [])
    for members in groups.values():
        if len(members) % 2:
            left.append(members.pop())
        yield from _exchanged(_adjacent(members), rng, lambda pair: pair in avoid)
    yield from _exchanged(_adjacent(left), rng, lambda pair: pair in avoid)


def _adjacent(nodes: Sequence[str]) -> list[NodePair]:
    return [node_pair(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=True)]


def _exchanged(
    pairs: list[NodePair], rng: random.Random, cost: Callable[[NodePair], int]
) -> list[NodePair]:
    """Return *pairs* after exchanges of partners between two pairs, where that costs less."""
    for i in range(len(pairs)):
        for _ in range(_TRIES):
            if not (here := cost(pairs[i])):
                break
            j = rng.randrange(len(pairs))
            (a, b), (c, d) = pairs[i], pairs[j]
            if i == j:
                continue
            options = (
                (node_pair(a, c), node_pair(b, d)),
                (node_pair(a, d), node_pair(b, c)),
            )
            best = min(options, key=lambda two: cost(two[0]) + cost(two[1]))
            if cost(best[0]) + cost(best[1]) < here + cost(pairs[j]):
                pairs[i], pairs[j] = best
    return pairs


def _disjoint(pairs: Iterable[NodePair]) -> Iterator[NodePair]:
    taken: set[str] = set()
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            yield pair


class _PartnerPool:
    """The nodes that can still be a suspect's partner in this round, the most trusted first."""

    def __init__(self, free: Iterable[str], domains: Mapping[str, str]) -> None:
        self._domains = domains
        self._free = dict.fromkeys(free)
        self._by_leaf: dict[str, list[str]] = {}
        for node in self._free:
            if node in domains:
                self._by_leaf.setdefault(domains[node], []).append(node)

    def rest(self) -> list[str]:
        """Return the nodes that no suspect took."""
        return list(self._free)

    def take(self, suspect: str, met: Collection[str]) -> str | None:
        """Remove and return a node that *suspect* has not met; of the leaf whose turn it is."""
        near = [is_same_domain(node_pair(suspect, node), self._domains) for node in met]
        own = self._by_leaf.get(self._domains.get(suspect, ""), [])
        if near.count(True) > near.count(False):
            candidates = chain((n for n in self._free if n not in own), own)
        else:
            candidates = chain(own, self._free)
        found = next((n for n in candidates if n in self._free and n not in met), None)
        if found is not None:
            del self._free[found]
        return found
