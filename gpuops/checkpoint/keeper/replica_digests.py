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


def shares(shard_view: ShardView) -> bool:
    """Return whether tensors of the rank are in the image of another; the header is not read."""
    if shard_view.groups is not None:
        return bool(shared_groups(shard_view.groups))
    return sharing.MARK in _header(shard_view.view)


def shared_groups(groups: Sequence[TensorGroup]) -> list[TensorGroup]:
    """Return those of *groups* of which there is one copy on the node."""
    return [group for group in groups if group.owners]


def digest_shards(
    shard_views: Sequence[ShardView], cpu_s: Callable[[], float], *, is_shared: bool
) -> DigestResult:
    """Return the comparisons of shared tensors, or of the others; and seconds of a core."""
    layouts = {
        shard_view.layout: _groups_of(shard_view.view)
        if shard_view.groups is None
        else shard_view.groups
        for shard_view in shard_views
    }
    began_s = cpu_s()
    if is_shared and (why := _disagreement(shard_views, layouts)):
        return DigestResult(layouts, (), 0.0, why)
    sets: dict[str, tuple[TensorGroup, dict[int, list[bytes]]]] = {}
    for shard_view in shard_views:
        for group in layouts[shard_view.layout]:
            if bool(group.owners) == is_shared:
                by_rank = sets.setdefault(group.key, (group, {}))[1]
                by_rank[shard_view.shard.rank] = group.digests(shard_view.view)
    found = tuple(_compare_local(group, by_rank) for group, by_rank in sets.values())
    return DigestResult(layouts, found, cpu_s() - began_s)


def _disagreement(
    shard_views: Sequence[ShardView], layouts: Mapping[str, Sequence[TensorGroup]]
) -> str:
    """Return why ranks do not share the same tensors in the same way, "" where they do."""
    owners_by_key = {
        view.shard.rank: {group.key: group.owners for group in shared_groups(layouts[view.layout])}
        for view in shard_views
    }
    for view in shard_views:
        for group in shared_groups(layouts[view.layout]):
            here = [rank for rank in group.ranks if rank in owners_by_key]
            if not set(group.owners) <= set(here):
                return f"rank {view.shard.rank} shares tensors with ranks of another node"
            for rank in here:
                if owners_by_key[rank].get(group.key) != group.owners:
                    return (
                        f"{format_ranks({rank, view.shard.rank})} should hold the same tensors "
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
