"""Which state all nodes go on from, and from where each of them gets it.

A pure function of what the nodes say they hold: whoever computes it from the same words comes to
the same plan, in whatever order they were said. The newest state wins of which every shard of its
world has a copy that may be trusted; it is never mixed with another, and never passed over without
a reason.

Copies of one shard of one state must be equal. Where they are not, each holder has one vote, a
directory like a node; a holder that tells two things at once has none. The content that more than
half of the votes are for is trusted, its holders only. With no such majority nobody knows which
copy is the damaged one, so none is loaded, and the state counts as incomplete.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from gpuops.checkpoint.types import RestorePoint, Shard, ShardCopy, StateId, Tier

REASONS_MAX = 32
_NAMED_MAX = 4
_TIER_ORDER = {tier: place for place, tier in enumerate(Tier)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreInputs:
    """What is known when a job's workers are about to start.

    ``inventories`` has what each node holds in memory; what a node that is not in ``ranks`` holds
    is out of reach. ``ranks`` has the live nodes, each with the ranks that will run on it (none: it
    only serves); together they are 0 to the next world's size. ``persistent`` has copies with the
    directory as their holder, whole states or parts of them. ``domains`` says which nodes are near
    to each other.
    """

    inventories: Mapping[str, Collection[ShardCopy]]
    ranks: Mapping[str, Collection[int]]
    persistent: Collection[ShardCopy] = ()
    excluded: Collection[StateId] = ()
    excluded_steps: Collection[int] = ()
    domains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Where a node gets one shard: equal copies, in the order in which they are to be tried.

    The tier of each is as that node sees it: its own memory, a peer's, a directory.
    """

    shard: Shard
    copies: tuple[ShardCopy, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What all nodes are to do. ``offer`` None: nothing can be loaded, they start afresh.

    ``epoch`` is that of the states saved from now on: greater than any seen, loaded or not.
    ``why`` has a sentence for each newer state that was passed over, the newest first.
    """

    offer: RestorePoint | None
    epoch: int
    why: tuple[str, ...]
    sources: Mapping[str, tuple[ShardSource, ...]]


@dataclass(slots=True)
class _ShardCopies:
    """All copies of one shard of one state that are within reach, and the vote over them."""

    contents: dict[tuple[Tier, str], set[tuple[str, str, int]]]
    copies: dict[tuple[Tier, str], ShardCopy]

    @classmethod
    def of(cls, copies: Iterable[ShardCopy]) -> "_ShardCopies":
        found = cls({}, {})
        for copy in copies:
            key = (copy.tier, copy.holder)
            found.contents.setdefault(key, set()).add(_content(copy))
            before = found.copies.get(key)
            # A holder that says the same twice: which of the two must not depend on the order.
            if before is None or copy.digest.table < before.digest.table:
                found.copies[key] = copy
        return found

    def trusted(self) -> list[ShardCopy]:
        """Return the copies that the vote is for, memory before directories, by holder."""
        votes = Counter(
            next(iter(contents)) for contents in self.contents.values() if len(contents) == 1
        )
        if not votes:
            return []
        winner, winner_votes = max(votes.items(), key=lambda pair: (pair[1], pair[0]))
        if 2 * winner_votes <= votes.total():
            return []
        # With contents and votes counted, keys are unique: no order of the words shows here.
        return [
            self.copies[key]
            for key in sorted(self.contents, key=lambda key: (_TIER_ORDER[key[0]], key[1]))
            if self.contents[key] == {winner}
        ]

    def holders(self) -> list[str]:
        return sorted({holder for _tier, holder in self.contents})


_Candidate = tuple[StateId, int]


def plan_restore(inputs: RestoreInputs) -> RestorePlan:
    """Return the plan for *inputs*.

    Raises:
        ValueError: The ranks are not those of one world.
    """
    world = _world_of(inputs.ranks)
    reachable, lost = _group_by_state(inputs)
    seen = {copy.state for copies in inputs.inventories.values() for copy in copies}
    seen |= {copy.state for copy in inputs.persistent}
    epoch = 1 + max((state.epoch for state in seen), default=-1)
    why: list[str] = []
    for candidate in sorted({*reachable, *lost}, reverse=True):
        state, state_world = candidate
        shards = reachable.get(candidate, {})
        reason = _why_rejected(candidate, inputs, shards, lost.get(candidate, {}))
        if reason is None:
            trusted = {rank: copies.trusted() for rank, copies in shards.items()}
            sources = _sources(inputs, world, state_world, trusted)
            tier = _slowest_tier(sources, trusted)
            offer = RestorePoint(state, state_world, tier, epoch, tuple(why))
            return RestorePlan(offer, epoch, tuple(why), sources)
        if len(why) < REASONS_MAX:
            why.append(f"{state}, world {state_world}: {reason}")
    return RestorePlan(None, epoch, tuple(why), dict.fromkeys(sorted(inputs.ranks), ()))


def _world_of(ranks: Mapping[str, Collection[int]]) -> int:
    all_ranks = sorted(rank for of_node in ranks.values() for rank in of_node)
    if all_ranks != list(range(len(all_ranks))):
        raise ValueError(f"the ranks {all_ranks[:8]}… are not 0 to {len(all_ranks) - 1}, each once")
    return len(all_ranks)


def _group_by_state(
    inputs: RestoreInputs,
) -> tuple[dict[_Candidate, dict[int, _ShardCopies]], dict[_Candidate, dict[int, set[str]]]]:
    """Return what is within reach, and which lost nodes had what, by state and rank."""
    reachable_copies: dict[_Candidate, dict[int, list[ShardCopy]]] = defaultdict(
        lambda: defaultdict(list)
    )
    lost: dict[_Candidate, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for node, copies in inputs.inventories.items():
        for copy in copies:
            if copy.tier is Tier.PERSISTENT:
                continue  # told apart below: a node speaks for its memory only
            candidate, rank = (copy.state, copy.shard.world), copy.shard.rank
            if node in inputs.ranks:
                reachable_copies[candidate][rank].append(
                    replace(copy, tier=Tier.MEMORY, holder=node)
                )
            else:
                lost[candidate][rank].add(node)
    for copy in inputs.persistent:
        candidate = (copy.state, copy.shard.world)
        reachable_copies[candidate][copy.shard.rank].append(replace(copy, tier=Tier.PERSISTENT))
    reachable = {
        candidate: {rank: _ShardCopies.of(copies) for rank, copies in by_rank.items()}
        for candidate, by_rank in reachable_copies.items()
    }
    return reachable, lost


def _why_rejected(
    candidate: _Candidate,
    inputs: RestoreInputs,
    shards: Mapping[int, _ShardCopies],
    lost: Mapping[int, Collection[str]],
) -> str | None:
    """Return what speaks against a state, None where it can be loaded."""
    state, world = candidate
    if state in inputs.excluded or state.step in inputs.excluded_steps:
        return "it is excluded"
    for rank in sorted(shards):
        if not shards[rank].trusted():
            holders = shards[rank].holders()
            names = _format_names(holders, len(holders))
            return f"the copies of shard {rank} differ ({names}), and no majority has the same"
    n_missing = world - len(shards)
    if not n_missing:
        return None
    # Not all of them: whoever made up a shard of a world of 100,000 must not cost that much.
    missing = list(islice((rank for rank in range(world) if rank not in shards), _NAMED_MAX))
    lost_nodes = sorted({node for rank in lost.keys() - shards.keys() for node in lost[rank]})
    which = "shard" if n_missing == 1 else "shards"
    text = f"nobody has {which} {_format_names(map(str, missing), n_missing)} of {world}"
    return f"{text}; lost with {_format_names(lost_nodes, len(lost_nodes))}" if lost_nodes else text


def _sources(
    inputs: RestoreInputs, world: int, state_world: int, trusted: Mapping[int, list[ShardCopy]]
) -> dict[str, tuple[ShardSource, ...]]:
    """Return what each node needs and where it gets it.

    In an unchanged world a node needs the shards of its ranks. In another one all of them: which
    parts of which shards a rank then reads is known only to whoever reshards.
    """
    ranks = inputs.ranks
    every = range(state_world)
    needed_shards: dict[str, Collection[int]] = {
        node: sorted(ranks[node]) if world == state_world else every if ranks[node] else ()
        for node in sorted(ranks)
    }
    load_bytes: Counter[str] = Counter()
    found: dict[str, dict[int, ShardSource]] = {node: {} for node in needed_shards}
    needs = [(node, rank) for node, shards in needed_shards.items() for rank in shards]
    # Who has no choice goes first, so that those who have one can avoid the same holder.
    for node, rank in sorted(needs, key=lambda need: (len(trusted[need[1]]), need)):
        copies = _in_preferred_order(node, trusted[rank], inputs.domains, load_bytes)
        if copies[0].tier is Tier.PEER:
            load_bytes[copies[0].holder] += copies[0].digest.nbytes
        found[node][rank] = ShardSource(copies[0].shard, copies)
    return {
        node: tuple(by_rank[rank] for rank in sorted(by_rank)) for node, by_rank in found.items()
    }


def _in_preferred_order(
    node: str,
    copies: Iterable[ShardCopy],
    domains: Mapping[str, str],
    load_bytes: Mapping[str, int],
) -> tuple[ShardCopy, ...]:
    """Return *copies* as *node* sees them: its own, near peers, far ones, directories."""

    def far(copy: ShardCopy) -> bool:
        return node not in domains or domains.get(copy.holder) != domains[node]

    seen = [
        replace(copy, tier=Tier.PEER) if copy.tier is Tier.MEMORY and copy.holder != node else copy
        for copy in copies
    ]
    return tuple(
        sorted(
            seen,
            key=lambda copy: (
                _TIER_ORDER[copy.tier],
                copy.tier is Tier.PEER and far(copy),
                load_bytes.get(copy.holder, 0),
                copy.holder,
            ),
        )
    )


def _slowest_tier(
    sources: Mapping[str, tuple[ShardSource, ...]], trusted: Mapping[int, list[ShardCopy]]
) -> Tier:
    used = [source.copies[0].tier for of_node in sources.values() for source in of_node]
    # Where no rank runs yet, what all shards could be had from.
    used = used or [copies[0].tier for copies in trusted.values()]
    return max(used, key=lambda tier: _TIER_ORDER[tier])


def _content(copy: ShardCopy) -> tuple[str, str, int]:
    return copy.layout, copy.digest.root, copy.digest.nbytes


def _format_names(names: Iterable[str], n_names: int) -> str:
    shown = ", ".join(islice(names, _NAMED_MAX))
    return f"{shown} and {n_names - _NAMED_MAX} more" if n_names > _NAMED_MAX else shown
