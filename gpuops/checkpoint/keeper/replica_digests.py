"""Digests of what the images of one node's ranks hold alike, and which of them differ; pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from gpuops.checkpoint import sharing
from gpuops.checkpoint.agreement.replica_check import (
    RankDigest,
    format_ranks,
    format_tensors,
    stripes_of,
    sums_of,
)
from gpuops.checkpoint.agreement.replicated import KEY, read_replicated
from gpuops.checkpoint.image import ImageLayout, read_layout
from gpuops.checkpoint.sharing import DIGEST_BYTES, group_key
from gpuops.checkpoint.types import Shard

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one image that are compared with those of other images of equal ``key``.

    ``spans`` are those of the tensors, or where ``stored`` has the number, of their digests.
    ``owners``: where they are shared, the rank whose image has each.
    """

    key: str
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    owners: tuple[int, ...] = ()
    stored: frozenset[int] = frozenset()

    def digests(self, view: memoryview) -> list[bytes]:
        """Return the digests of the tensors in the image *view*, in order."""
        return [
            bytes(view[b:e]) if number in self.stored else xxhash.xxh3_128_digest(view[b:e])
            for number, (b, e) in enumerate(self.spans)
        ]


@dataclass(frozen=True, slots=True)
class ShardView:
    """One shard to digest; ``groups`` None: its header was not read yet."""

    shard: Shard
    layout: str
    view: memoryview
    groups: tuple[TensorGroup, ...] | None


@dataclass(frozen=True, slots=True)
class ShardDigests:
    """The digests of one shard's tensors, by the key of their group; ``took_s``: of a core."""

    shard: Shard
    layout: str
    groups: tuple[TensorGroup, ...]
    digests: Mapping[str, Sequence[bytes]]
    took_s: float


@dataclass(frozen=True, slots=True)
class GroupComparison:
    """The digests that this node's ranks of one group have.

    ``differ``: the digests by rank of each tensor that is not the same on all of them here.
    ``rank_digests`` are for other nodes, where some ranks are there.
    """

    group: TensorGroup
    differ: Mapping[int, Mapping[int, bytes]]
    rank_digests: Mapping[int, RankDigest]


@dataclass(frozen=True, slots=True)
class DigestResult:
    """The comparisons of one state. ``disagreement``: why there are none.

    ``layouts``: what the headers list, by the hash of the layout; ``took_s``: seconds of a core.
    """

    layouts: Mapping[str, tuple[TensorGroup, ...]]
    comparisons: tuple[GroupComparison, ...]
    took_s: float
    disagreement: str = ""


def must_equal_others(shard_view: ShardView, *, is_all: bool) -> bool:
    """Return whether there are tensors that ranks of a node share, or with *is_all* any others."""
    if shard_view.groups is not None:
        return bool(shard_view.groups if is_all else shared_groups(shard_view.groups))
    header = _header(shard_view.view)  # the quick way: it is not read
    return sharing.MARK in header or (is_all and KEY.encode() in header)


def shared_groups(groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """Return those of *groups* of which there is one copy on the node."""
    return [group for group in groups if group.owners]


def digest_shard(
    shard_view: ShardView, wants: Callable[[TensorGroup], bool], cpu_s: Callable[[], float]
) -> ShardDigests:
    """Return the digests of the groups that *wants* selects.

    Raises:
        CorruptError: The header of the image is invalid.
    """
    view, groups = shard_view.view, shard_view.groups
    groups = _groups_of(view) if groups is None else groups
    began_s = cpu_s()
    found = {group.key: group.digests(view) for group in groups if wants(group)}
    return ShardDigests(shard_view.shard, shard_view.layout, groups, found, cpu_s() - began_s)


def compare_shards(shards: Sequence[ShardDigests]) -> DigestResult:
    """Return the comparisons of all groups that were digested, and seconds of a core."""
    layouts = {each.layout: each.groups for each in shards}
    took_s = sum(each.took_s for each in shards)
    if why := _disagreement(shards):
        return DigestResult(layouts, (), took_s, why)
    sets: dict[str, tuple[TensorGroup, dict[int, Sequence[bytes]]]] = {}
    for each in shards:
        for group in each.groups:
            if group.key in each.digests:
                by_rank = sets.setdefault(group.key, (group, {}))[1]
                by_rank[each.shard.rank] = each.digests[group.key]
    found = tuple(_compare_local(group, by_rank) for group, by_rank in sets.values())
    return DigestResult(layouts, found, took_s)


def _disagreement(shards: Sequence[ShardDigests]) -> str:
    """Return why ranks do not share the same tensors in the same way, "" where they do."""
    owners_by_key = {
        each.shard.rank: {group.key: group.owners for group in shared_groups(each.groups)}
        for each in shards
    }
    for each in shards:
        for group in shared_groups(each.groups):
            here = [rank for rank in group.ranks if rank in owners_by_key]
            if not set(group.owners) <= set(here):
                return f"rank {each.shard.rank} shares tensors with ranks of another node"
            for rank in here:
                if owners_by_key[rank].get(group.key) != group.owners:
                    return (
                        f"{format_ranks({rank, each.shard.rank})} should hold the same tensors "
                        f"({format_tensors(group.names, len(group.names))}), and describe them "
                        "with other names, dtypes or shapes"
                    )
    return ""


def _compare_local(group: TensorGroup, by_rank: Mapping[int, Sequence[bytes]]) -> GroupComparison:
    columns = enumerate(zip(*by_rank.values(), strict=True))
    different = {
        number: dict(zip(by_rank, column, strict=True))
        for number, column in columns
        if len(set(column)) > 1
    }
    is_all_here = by_rank.keys() == set(group.ranks)
    rank_digests = {} if is_all_here else {r: rank_digest_of(d) for r, d in by_rank.items()}
    return GroupComparison(group, different, rank_digests)


def rank_digest_of(digests: Sequence[bytes]) -> RankDigest:
    """Return the rank digest of tensors with these *digests*, in order."""
    digest = xxhash.xxh3_128_digest(b"".join(digests))
    return RankDigest(digest, sums_of(digests), stripes_of(digests))


def _groups_of(view: memoryview) -> tuple[TensorGroup, ...]:
    """Return what the header of the image *view* lists for comparison; raises CorruptError."""
    header = _header(view)
    if KEY.encode() not in header and sharing.MARK not in header:
        return ()  # reading all of 20,000 tensors takes a tenth of a second
    layout = read_layout(header, nbytes=len(view))
    report = read_replicated(layout.header, layout.shard, len(layout.tensors))
    return (
        *(_group(layout, item.ranks, item.tensors) for item in report),
        *_groups_shared(layout),
    )


def _header(view: memoryview) -> bytes:
    return bytes(view[: _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")])


def _groups_shared(layout: ImageLayout) -> Iterator[TensorGroup]:
    at = 0 if layout.digests is None else layout.digests.begin
    spans = {tensor.spec.name: (tensor.begin, tensor.end) for tensor in layout.tensors}
    for shared in layout.shared:
        digest_spans = {}
        for number in shared.stored:
            digest_spans[number] = (at, at + DIGEST_BYTES)
            at += DIGEST_BYTES
        yield TensorGroup(
            shared.key,
            shared.ranks,
            shared.names,
            tuple(digest_spans.get(n) or spans[name] for n, name in enumerate(shared.names)),
            shared.owners,
            frozenset(shared.stored),
        )


def _group(layout: ImageLayout, ranks: tuple[int, ...], numbers: Sequence[int]) -> TensorGroup:
    placed = [layout.tensors[number] for number in numbers]
    return TensorGroup(
        group_key(layout.shard.world, ranks, [tensor.spec for tensor in placed]),
        ranks,
        tuple(tensor.spec.name for tensor in placed),
        tuple((tensor.begin, tensor.end) for tensor in placed),
    )
