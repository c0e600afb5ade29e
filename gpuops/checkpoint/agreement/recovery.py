"""Decide which state all nodes resume from, and from where each of them gets it.

A pure function of the inventories of the nodes: equal inputs give an equal plan, in any order. It
selects the newest state of which every shard of its world has a trusted copy. States are never
mixed, and a state is never skipped without a reason.

Copies of one shard of one state must be equal. Where they differ, each holder has one vote; a
directory counts as a holder, and a holder with contradictory copies has no vote. The content with
more than half of the votes is trusted, and only its holders. Without such a majority the damaged
copy cannot be identified, so none is loaded, and the state counts as incomplete.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated

from gpuops.checkpoint.types import EPOCH_MAX, WORLD_MAX, ShardCopy, StateId, Tier
from gpuops.wire.messages import Limit, Message

REASONS_MAX = 8
_REASON_CHARS_MAX = 200
_HOLDERS_MAX = 16
_NAME_CHARS_MAX = 255
_NAMED_MAX = 4
_TIER_ORDER = {tier: place for place, tier in enumerate(Tier)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreInputs:
    """The facts known before a job's workers start.

    ``inventories``: what each node has in memory; a node that is not in ``ranks`` is unreachable.
    ``ranks``: the live nodes, each with the ranks that will run on it (none: it only serves
    copies); together they are 0 to the next world's size. ``persistent``: copies in the directory,
    of complete states or parts of them. ``epoch_max``: the greatest epoch known to any node.
    """

    inventories: Mapping[str, Collection[ShardCopy]]
    ranks: Mapping[str, Collection[int]]
    persistent: Collection[ShardCopy] = ()
    excluded_steps: Collection[int] = ()
    epoch_max: int = -1


_Name = Annotated[str, Limit(_NAME_CHARS_MAX, low=1)]
SourceNames = Annotated[tuple[_Name, ...], Limit(_HOLDERS_MAX, is_cut=True)]
_Reason = Annotated[str, Limit(_REASON_CHARS_MAX, is_cut=True)]
_Root = Annotated[str, Limit(64, low=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan(Message):
    """Where all ranks resume from. ``state`` None: nothing can be loaded, they start from scratch.

    ``epoch``: of the states saved from now on; greater than any seen, loaded or not.
    ``why``: a sentence for each newer state that was skipped, the newest first.
    ``sources``: the nodes that have the shard of a rank of ``world`` in memory, all equal.
    ``roots``: of the digests of these shards. ``tier``: the slowest that any node loads from.
    ``blocks``: the name under which sources and roots are, where they are kept apart from the plan.
    """

    state: StateId | None
    epoch: Annotated[int, Limit(EPOCH_MAX)]
    world: Annotated[int, Limit(WORLD_MAX)] = 0
    tier: Tier = Tier.MEMORY
    why: Annotated[tuple[_Reason, ...], Limit(REASONS_MAX, is_cut=True)] = ()
    sources: Annotated[Mapping[int, SourceNames], Limit(WORLD_MAX)] = field(default_factory=dict)
    roots: Annotated[Mapping[int, _Root], Limit(WORLD_MAX)] = field(default_factory=dict)
    blocks: Annotated[str, Limit(64)] = ""


@dataclass(slots=True)
class _ShardCopies:
    """All reachable copies of one shard of one state, and the vote over them."""

    contents: dict[tuple[Tier, str], set[tuple[str, str, int]]]
    copies: dict[tuple[Tier, str], ShardCopy]

    @classmethod
    def of(cls, copies: Iterable[ShardCopy]) -> "_ShardCopies":
        found = cls({}, {})
        for copy in copies:
            key = (copy.tier, copy.holder)
            found.contents.setdefault(key, set()).add(_content(copy))
            before = found.copies.get(key)
            # A holder with two copies: which of them counts must not depend on the order.
            if before is None or copy.digest.table < before.digest.table:
                found.copies[key] = copy
        return found

    def trusted(self) -> list[ShardCopy]:
        """Return the copies of the winning content, memory before directories, by holder."""
        votes = Counter(
            next(iter(contents)) for contents in self.contents.values() if len(contents) == 1
        )
        if not votes:
            return []
        winner, winner_votes = max(votes.items(), key=lambda pair: (pair[1], pair[0]))
        if 2 * winner_votes <= votes.total():
            return []
        # Keys are unique, since they include content and votes: the input order has no effect.
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
    epoch = min(max(epoch, inputs.epoch_max + 1), EPOCH_MAX)
    why: list[str] = []
    for candidate in sorted({*reachable, *lost}, reverse=True):
        state, state_world = candidate
        shards = reachable.get(candidate, {})
        trusted = {rank: copies.trusted() for rank, copies in sorted(shards.items())}
        reason = _why_rejected(candidate, inputs, shards, trusted, lost.get(candidate, {}))
        if reason is None:
            nearest = {
                rank: [copy for copy in copies if copy.tier is Tier.MEMORY]
                for rank, copies in trusted.items()
            }
            return RestorePlan(
                state=state,
                epoch=epoch,
                world=state_world,
                tier=_slowest_tier(inputs, nearest, is_same_world=world == state_world),
                why=tuple(why),
                sources={
                    r: tuple(copy.holder for copy in found) for r, found in nearest.items() if found
                },
                roots={rank: found[0].digest.root for rank, found in nearest.items() if found},
            )
        if len(why) < REASONS_MAX:
            why.append(f"{state}, world {state_world}: {reason}"[:_REASON_CHARS_MAX])
    return RestorePlan(state=None, epoch=epoch, why=tuple(why))


def _world_of(ranks: Mapping[str, Collection[int]]) -> int:
    all_ranks = sorted(rank for of_node in ranks.values() for rank in of_node)
    if all_ranks != list(range(len(all_ranks))):
        raise ValueError(f"the ranks {all_ranks[:8]}… are not 0 to {len(all_ranks) - 1}, each once")
    return len(all_ranks)


def _group_by_state(
    inputs: RestoreInputs,
) -> tuple[dict[_Candidate, dict[int, _ShardCopies]], dict[_Candidate, dict[int, set[str]]]]:
    """Return the reachable copies, and which lost nodes had which, by state and rank."""
    reachable_copies: dict[_Candidate, dict[int, list[ShardCopy]]] = defaultdict(
        lambda: defaultdict(list)
    )
    lost: dict[_Candidate, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for node, copies in inputs.inventories.items():
        for copy in copies:
            if copy.tier is Tier.PERSISTENT:
                continue  # an inventory describes only the node's own memory
            candidate, rank = (copy.state, copy.shard.world), copy.shard.rank
            if node in inputs.ranks:
                if (copy.tier, copy.holder) != (Tier.MEMORY, node):
                    copy = replace(copy, tier=Tier.MEMORY, holder=node)  # noqa: PLW2901
                reachable_copies[candidate][rank].append(copy)
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
    trusted: Mapping[int, Collection[ShardCopy]],
    lost: Mapping[int, Collection[str]],
) -> str | None:
    """Return why a state cannot be loaded, None where it can."""
    state, world = candidate
    if state.step in inputs.excluded_steps:
        return "it is excluded"
    for rank, copies in trusted.items():
        if not copies:
            holders = shards[rank].holders()
            names = _format_names(holders, len(holders))
            return f"the copies of shard {rank} differ ({names}), and no majority agrees"
    n_missing = world - len(shards)
    if not n_missing:
        return None
    # Not all of them: a forged shard of a world of 100,000 must not cost that much.
    missing = list(islice((rank for rank in range(world) if rank not in shards), _NAMED_MAX))
    lost_nodes = sorted({node for rank in lost.keys() - shards.keys() for node in lost[rank]})
    which = "shard" if n_missing == 1 else "shards"
    text = f"no node has {which} {_format_names(map(str, missing), n_missing)} of {world}"
    return f"{text}; lost with {_format_names(lost_nodes, len(lost_nodes))}" if lost_nodes else text


def _slowest_tier(
    inputs: RestoreInputs, nearest: Mapping[int, Collection[ShardCopy]], *, is_same_world: bool
) -> Tier:
    """Return the slowest tier from which any node loads what it needs.

    In an unchanged world a node needs only the shards of its ranks. In another one it may need all:
    which parts of which shards a rank reads is known only when it reshards.
    """
    found = Tier.MEMORY
    for node, ranks in inputs.ranks.items():
        for rank in ranks if is_same_world or not ranks else nearest:
            if not nearest[rank]:
                return Tier.PERSISTENT
            if all(copy.holder != node for copy in nearest[rank]):
                found = Tier.PEER
    return found


def _content(copy: ShardCopy) -> tuple[str, str, int]:
    return copy.layout, copy.digest.root, copy.digest.nbytes


def _format_names(names: Iterable[str], n_names: int) -> str:
    shown = ", ".join(islice(names, _NAMED_MAX))
    return f"{shown} and {n_names - _NAMED_MAX} more" if n_names > _NAMED_MAX else shown
