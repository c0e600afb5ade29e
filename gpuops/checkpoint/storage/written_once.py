"""Images without what another node writes: the nodes of a job write once what they hold alike.

In memory each node has one copy of what its ranks hold alike with those of other nodes, be it one
rank or several that share it. Once the digests of all of them were seen to be equal at a state, one
node writes each of these tensors of it: the others' images on disk name the rank whose image has it
(`gpuops.checkpoint.sharing`), as they do within a node. That rank has the tensor in its image in
memory, too: a node that does not know that the digests are equal writes its images as they are, and
the others' remain complete.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from gpuops.checkpoint.agreement.replicated import read_replicated
from gpuops.checkpoint.agreement.write_once import WriteOnce, is_written_once
from gpuops.checkpoint.digest import compute_digest, find_damaged_chunks
from gpuops.checkpoint.image import ImageLayout, PlacedTensor, plan_image, read_layout
from gpuops.checkpoint.manifest import ShardRecord
from gpuops.checkpoint.memory.node_memory import MemoryShard
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.sharing import DIGEST_BYTES, SharedTensors, assign_writers, held_alike
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.inspection import LENGTH_BYTES, header_size_bytes
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    Digest,
    Shard,
    StateId,
)


def plan_written_once(
    layouts: Sequence[ImageLayout], once: WriteOnce
) -> Mapping[str, Mapping[str, int]]:
    """Return by the key of each group the rank that writes each of its tensors, by name.

    *layouts* are those of all images of this node. {}: all are written as they are.

    Raises:
        CheckpointError: The images do not have what this node shares.
    """
    groups: dict[str, SharedTensors] = {}
    sizes: dict[str, dict[str, int]] = {}  # two groups may have parts of one tensor
    for layout in layouts:
        nbytes = {tensor.spec.name: tensor.spec.nbytes for tensor in layout.tensors}
        for each in (it for it in held_alike(layout) if it.key in once.keys):
            groups[each.key] = each
            found = {name: nbytes[name] for name in each.names if name in nbytes}
            sizes.setdefault(each.key, {}).update(found)
    if any(len(sizes[key]) < len(each.names) for key, each in groups.items()):
        raise CheckpointError("an image lacks what the ranks of its node share")
    shared_bytes = sum(sum(found.values()) for found in sizes.values())
    own_bytes = sum(layout.nbytes for layout in layouts) - shared_bytes
    n_ranks = len({rank for each in groups.values() for rank in each.ranks})
    if not is_written_once(own_bytes / len(layouts), shared_bytes, n_ranks):
        return {}
    return {key: _writers(each, sizes[key], once) for key, each in groups.items()}


def _writers(each: SharedTensors, sizes: Mapping[str, int], once: WriteOnce) -> dict[str, int]:
    ranks_by_node = once.ranks_by_node(each.ranks)
    writers = assign_writers([sizes[name] for name in each.names], ranks_by_node)
    return dict(zip(each.names, writers, strict=True))


@dataclass(frozen=True, slots=True)
class ImageToWrite:
    """The image of *entry*, of *layout*, without what other ranks write: of *target*."""

    entry: MemoryShard
    layout: ImageLayout
    target: ImageLayout

    @property
    def shard(self) -> Shard:
        return self.target.shard

    @contextlib.contextmanager
    def made(self) -> Iterator[tuple[SharedBuffer, Digest]]:
        """Yield it and its digest; its memory is released at the end.

        Raises:
            CorruptError: The image in memory is not what was saved.
            CheckpointError: There is not enough memory.
        """
        source, saved = self.entry.memory.view, self.entry.copy.digest
        memory = SharedBuffer.create("gpuops-once", self.target.nbytes)
        try:
            _copy(source, self.layout, memory.view, self.target)
            digest = compute_digest(memory.view)
            # What is intact now was intact when it was copied.
            if find_damaged_chunks(source, saved):
                raise CorruptError(f"{self.shard.file_name} is not what was saved")
            _check_same(source, self.layout, memory.view, self.target)
            yield memory, digest
        finally:
            memory.close()


def plan_images(
    shards: Mapping[Shard, MemoryShard],
    once: WriteOnce | None,
    check_fits: Callable[[int], None],
) -> list[ImageToWrite]:
    """Return the images to write instead of *shards*; [] where these are written as they are.

    Raises:
        CheckpointError: The images do not have what their ranks should write.
    """
    if once is None:
        return []
    layouts = {shard: read_layout(entry.memory.view) for shard, entry in shards.items()}
    writers = plan_written_once(list(layouts.values()), once)
    if not writers:
        return []
    images = [
        ImageToWrite(
            entry,
            layouts[shard],
            _layout_without(layouts[shard], writers, entry.copy.digest.root),
        )
        for shard, entry in sorted(shards.items())
    ]
    try:
        check_fits(max(image.target.nbytes for image in images))  # one at a time
    except CheckpointError:
        return []
    return images


def _layout_without(
    layout: ImageLayout, writers: Mapping[str, Mapping[str, int]], root: str
) -> ImageLayout:
    listed = read_replicated(layout.header, layout.shard, len(layout.tensors))
    replicas = {layout.tensors[n].spec.name: each.ranks for each in listed for n in each.tensors}
    return plan_image(
        layout.shard,
        [tensor.spec for tensor in layout.tensors],
        layout.metadata_capacity_bytes,
        replicas,
        tuple(
            _written_by(each, writers.get(each.key, {}), layout.shard, root)
            for each in held_alike(layout)
            if each.key in writers or each in layout.shared
        ),
    )


def _written_by(
    each: SharedTensors, writers: Mapping[str, int], shard: Shard, root: str
) -> SharedTensors:
    pairs = zip(each.names, each.owners, strict=True)
    owners = tuple(writers.get(name, owner) for name, owner in pairs)
    foreign = {number for number, owner in enumerate(owners) if owner != shard.rank}
    stored = tuple(sorted(foreign | set(each.stored)))
    return replace(each, owners=owners, stored=stored, source=root)


def _pairs(old: ImageLayout, new: ImageLayout) -> Iterator[tuple[PlacedTensor, PlacedTensor]]:
    """Yield each tensor of *new*, but for the digests, where it is in both images."""
    by_name = {tensor.spec.name: tensor for tensor in (*old.tensors, old.metadata_blob)}
    for tensor in (*new.tensors, new.metadata_blob):
        yield by_name[tensor.spec.name], tensor


def _copy(view: memoryview, old: ImageLayout, target: memoryview, new: ImageLayout) -> None:
    target[: len(new.header)] = new.header
    for a, b in _pairs(old, new):
        target[b.begin : b.end] = view[a.begin : a.end]
    if new.digests is None:
        return  # it names no other rank
    known = _stored_digests(view, old)
    by_name = {tensor.spec.name: tensor for tensor in old.tensors}
    digests = (
        known[name] if name in known else _hash(view, by_name[name])
        for each in new.shared
        for name in each.stored_names
    )
    target[new.digests.begin : new.digests.end] = b"".join(digests)


def _check_same(source: memoryview, old: ImageLayout, view: memoryview, new: ImageLayout) -> None:
    """Raise CorruptError unless the copy *view* has what *source* has."""
    is_same = view[: len(new.header)] == new.header
    if not is_same or any(_hash(source, a) != _hash(view, b) for a, b in _pairs(old, new)):
        raise CorruptError(f"{new.shard.file_name} was not copied as it was saved")


def _stored_digests(view: memoryview, layout: ImageLayout) -> dict[str, bytes]:
    if layout.digests is None:
        return {}
    names = [name for each in layout.shared for name in each.stored_names]
    begins = range(layout.digests.begin, layout.digests.end, DIGEST_BYTES)
    return {
        name: bytes(view[at : at + DIGEST_BYTES]) for name, at in zip(names, begins, strict=True)
    }


def _hash(view: memoryview, tensor: PlacedTensor) -> bytes:
    return xxhash.xxh3_128_digest(view[tensor.begin : tensor.end])


def read_source_root(store: CheckpointStore, state: StateId, record: ShardRecord) -> str:
    """Return the root of the image that the one of *record* was written from, "" without one.

    The header is not verified: a damaged one has not the root of another image.
    """
    try:
        n_header = header_size_bytes(store.read_bytes(state, record.shard, 0, LENGTH_BYTES))
        header = store.read_bytes(state, record.shard, 0, n_header)
        shared = read_layout(header, nbytes=record.digest.nbytes).shared
    except CheckpointError:
        return ""
    return shared[0].source if shared else ""
