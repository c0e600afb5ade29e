"""Which rank of a node has the one copy of a tensor that several ranks hold alike; pure.

The ranks of a node that must hold a tensor alike (`gpuops.checkpoint.agreement.replicated`) save it
once: it is in the image of its owner, and the image of each of the others has a digest of what that
rank had at the same step. Each rank assigns the owners by itself, from names and sizes that are
equal on all of them; that they did, and that the digests are equal, is seen before a state is
complete (`gpuops.checkpoint.keeper.replica_checker`).
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import xxhash

from gpuops.checkpoint.agreement.replicated import (
    SETS_MAX,
    from_spans,
    read_replicated,
    to_spans,
)
from gpuops.checkpoint.types import WORLD_MAX, Shard
from gpuops.wire.messages import Limit, Message

if TYPE_CHECKING:  # it imports this module
    from gpuops.checkpoint.image import ImageLayout, TensorSpec

KEY = "shared"
MARK = b'\\"shared\\":[{'  # in the header of an image that shares, and in no other
DIGEST_BYTES = 16
_NAMES_MAX = 10_000_000  # an image's header has fewer
_Rank = Annotated[int, Limit(WORLD_MAX)]


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors that must be equal on ``ranks`` of the job, some of which share them on a node.

    ``key`` is their `group_key`. ``owners`` has for each of ``names`` the rank, of this node, whose
    image has the tensor. ``stored``: the numbers of those whose digest is in this image, in order.
    ``source``: on disk, the root of the digest of the image in memory that this one was written
    from, where that has tensors that other nodes write (`gpuops.checkpoint.storage.written_once`).
    """

    ranks: tuple[int, ...]
    key: str
    names: tuple[str, ...]
    owners: tuple[int, ...]
    stored: tuple[int, ...]
    source: str = ""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors whose digest is in this image, in order."""
        return tuple(self.names[number] for number in self.stored)

    def owner_by_name(self, rank: int) -> dict[str, int]:
        """Return the owner of each tensor that is not in the image of *rank*."""
        pairs = zip(self.names, self.owners, strict=True)
        return {name: owner for name, owner in pairs if owner != rank}


@dataclass(frozen=True, slots=True)
class _Entry(Message):
    ranks: Annotated[tuple[_Rank, ...], Limit(2 * WORLD_MAX)]
    key: Annotated[str, Limit(16, low=16)]
    names: Annotated[tuple[str, ...], Limit(_NAMES_MAX, low=1)]
    owners: Annotated[tuple[_Rank, ...], Limit(_NAMES_MAX)]
    stored: Annotated[tuple[int, ...], Limit(2 * _NAMES_MAX)]
    source: Annotated[str, Limit(64)] = ""


def group_key(world: int, ranks: Sequence[int], specs: Sequence["TensorSpec"]) -> str:
    """Return what is equal for images that describe the same tensors of the same ranks alike."""
    described = [(s.name, s.dtype, s.shape, s.offsets) for s in specs]
    return xxhash.xxh3_64_hexdigest(repr((world, tuple(ranks), described)).encode())


def assign_owners(sizes_bytes: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the owner, of *ranks*, of each tensor, so that all own about as many bytes.

    The largest first, each to the rank that owns least (R. L. Graham, SIAM J. Appl. Math. 17(2),
    1969: at most 4/3 of the best).
    """
    loads = dict.fromkeys(sorted(ranks), 0)
    owners = [0] * len(sizes_bytes)
    for number in sorted(range(len(sizes_bytes)), key=lambda n: (-sizes_bytes[n], n)):
        owner = min(loads, key=lambda rank: (loads[rank], rank))
        owners[number] = owner
        loads[owner] += sizes_bytes[number]
    return tuple(owners)


def assign_writers(
    sizes_bytes: Sequence[int], ranks_by_node: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return the rank whose image has each tensor on disk, so that all write about as much.

    It is the owner on one of the nodes, whose ranks of the group *ranks_by_node* has: the image in
    memory of this rank has the tensor, too, and may be written as it is.
    """
    n_nodes = len(ranks_by_node)
    owners_by_count = {
        n: assign_owners(sizes_bytes, range(n)) for n in set(map(len, ranks_by_node))
    }
    # For each number of ranks and each owner among them: the nodes, first the one that writes least
    # of it. Each owner begins with another node.
    heaps = {
        (count, owner): sorted(
            (0, (node - owner) % n_nodes, node)
            for node, ranks in enumerate(ranks_by_node)
            if len(ranks) == count
        )
        for count in owners_by_count
        for owner in range(count)
    }
    writers = [0] * len(sizes_bytes)
    for number in sorted(range(len(sizes_bytes)), key=lambda n: (-sizes_bytes[n], n)):
        keys = [(count, owners[number]) for count, owners in owners_by_count.items()]
        count, owner = min(keys, key=lambda key: heaps[key][0])
        load, turn, node = heaps[count, owner][0]
        writers[number] = ranks_by_node[node][owner]
        entry = (load + count * sizes_bytes[number], turn, node)
        heapq.heapreplace(heaps[count, owner], entry)
    return tuple(writers)


def plan_sharing(
    shard: Shard,
    specs: Sequence["TensorSpec"],
    replicas_by_name: Mapping[str, tuple[int, ...]],
    node_ranks: Collection[int],
    on_device: Collection[str] = (),
) -> tuple[SharedTensors, ...]:
    """Return what this rank shares with others of *node_ranks*.

    *specs* are all tensors of the rank in the order of an image, *replicas_by_name* the ranks on
    which a tensor must be equal. Of those *on_device* also the owner stores a digest: it is another
    one than the keeper computes of the copy.
    """
    sets: dict[tuple[int, ...], list[TensorSpec]] = {}
    for spec in specs:
        ranks = replicas_by_name.get(spec.name, ())
        if ranks in sets or (len(set(node_ranks) & set(ranks)) > 1 and len(sets) < SETS_MAX):
            sets.setdefault(ranks, []).append(spec)
    return tuple(
        share(shard, ranks, group, sorted(set(node_ranks) & set(ranks)), on_device)
        for ranks, group in sorted(sets.items())
    )


def share(
    shard: Shard,
    ranks: tuple[int, ...],
    specs: Sequence["TensorSpec"],
    local: Sequence[int],
    on_device: Collection[str] = (),
) -> SharedTensors:
    """Return *specs*, which must be equal on *ranks*, as shared by those of *local*."""
    owners = assign_owners([spec.nbytes for spec in specs], local)
    return SharedTensors(
        ranks,
        group_key(shard.world, ranks, specs),
        tuple(spec.name for spec in specs),
        owners,
        tuple(
            number
            for number, (spec, owner) in enumerate(zip(specs, owners, strict=True))
            if owner != shard.rank or spec.name in on_device
        ),
    )


def held_alike(layout: "ImageLayout") -> list[SharedTensors]:
    """Return what the image has or names that must be equal on several ranks.

    What its rank does not share on its node is as if the rank shared it with itself.
    """
    specs = [tensor.spec for tensor in layout.tensors]
    listed = read_replicated(layout.header, layout.shard, len(specs))
    alone = (
        share(layout.shard, each.ranks, [specs[n] for n in each.tensors], [layout.shard.rank])
        for each in listed
    )
    return [*layout.shared, *alone]


def to_json(shared: Sequence[SharedTensors]) -> list[dict[str, Any]]:
    """Return the value of `KEY` in an image's header."""
    return [
        _Entry(
            tuple(to_spans(each.ranks)),
            each.key,
            each.names,
            each.owners,
            tuple(to_spans(each.stored)),
            each.source,
        ).to_json()
        for each in shared
    ]


def from_json(value: object, shard: Shard) -> tuple[SharedTensors, ...]:
    """Return what the header of the image of *shard* describes.

    Raises:
        ValueError: It is invalid.
    """
    if not isinstance(value, list) or len(value) > SETS_MAX:
        raise ValueError("the shared tensors are not a list of groups")
    found = tuple(_read(_Entry.from_json(item), shard) for item in value)
    names = [name for each in found for name in each.names]
    if len(set(names)) < len(names):
        raise ValueError("a tensor is shared twice")
    return found


def _read(entry: _Entry, shard: Shard) -> SharedTensors:
    ranks = from_spans(list(entry.ranks), shard.world)
    stored = from_spans(list(entry.stored), len(entry.names))
    if shard.rank not in ranks or not set(entry.owners) <= set(ranks):
        raise ValueError(f"rank {shard.rank} or an owner is not among those that share")
    if len(entry.owners) != len(entry.names):
        raise ValueError(f"{len(entry.names)} shared tensors have {len(entry.owners)} owners")
    foreign = {number for number, owner in enumerate(entry.owners) if owner != shard.rank}
    if not foreign <= set(stored):
        raise ValueError("a tensor of another owner has no digest")
    return SharedTensors(ranks, entry.key, entry.names, entry.owners, stored, entry.source)
