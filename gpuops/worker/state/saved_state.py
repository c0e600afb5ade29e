"""A saved state: the images of all ranks, opened when they are needed.

In a world of the same size each rank has its own image, and reads all plain tensors from it: ranks
may differ in values that no placement describes, such as running averages of a batch norm. What
it held alike with others of its node may be in the image of one of them, which its own names. Where
the world or the placements changed, sharded tensors are assembled from all images, and others are
read from the lowest rank's.

Also checks that the saved parts of a tensor cover it exactly once.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from gpuops.checkpoint.hashed_image import HashedImage
from gpuops.checkpoint.image import (
    ITEMSIZE_BYTES,
    ImageLayout,
    PlacedTensor,
    TensorSpec,
    read_layout,
    read_metadata_blob,
)
from gpuops.checkpoint.partial_image import ByteRange, OpenedImage
from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.storage.inspection import LENGTH_BYTES, first_overlap, header_size_bytes
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    Shard,
    StructureError,
)
from gpuops.convert.tensors import (
    DTYPE_NAMES,
    TensorPlacements,
    as_storable,
    check_storable,
    is_dtensor,
    local_tensor,
    view_of,
)
from gpuops.convert.values import STATE_FORMAT, loads
from gpuops.host.gc_pause import paused_gc
from gpuops.worker.staging import pinned_buffer
from gpuops.worker.state.adapter import logical_shape
from gpuops.worker.state.parallel_copy import (
    DirectTensor,
    TensorPair,
    copy_parallel,
    read_parallel,
)

_log = logging.getLogger(__name__)

SavedPiece = tuple[OpenedImage, PlacedTensor]


def distinct_pieces(pieces: Iterable[SavedPiece]) -> list[SavedPiece]:
    """Return each part once, the first of equal ones: replicas have the same content.

    Empty parts are left out.
    """
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], SavedPiece] = {}
    for image, placed in pieces:
        if placed.begin != placed.end:
            found.setdefault((placed.spec.offsets, placed.spec.shape), (image, placed))
    return list(found.values())


def check_complete(name: str, specs: Sequence[TensorSpec]) -> None:
    """Raise unless *specs* cover the tensor exactly once.

    torch's reader does not check it: a missing part would leave old values.

    Raises:
        CheckpointError: A part is missing, two overlap, or they describe different tensors.
    """
    kinds = {(part.global_shape, part.dtype) for part in specs}
    if len(kinds) > 1:
        raise CheckpointError(f"the ranks saved different tensors as {name}: {sorted(kinds)}")
    n_items = prod(specs[0].global_shape) if specs else 0
    volume = sum(prod(part.shape) for part in specs)
    if volume != n_items:
        raise CheckpointError(
            f"the saved parts of {name} have {volume} of its {n_items} items: a rank's part is "
            "missing, or two overlap"
        )
    if first_overlap([(part.offsets, part.shape) for part in specs]) is not None:
        raise CheckpointError(f"two saved parts of {name} overlap: they were not saved together")


OpenImage = Callable[[Shard], OpenedImage]


class _TensorMemory(NamedTuple):
    """Equal for two views of one tensor; ``address`` is 0 where it is empty."""

    address: int
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _ShardImage(NamedTuple):
    opened: OpenedImage
    layout: ImageLayout
    tensors: Mapping[str, PlacedTensor]
    owner_by_name: Mapping[str, int]  # of tensors that are in the image of another rank
    metadata: Mapping[str, Any]


class SavedState:
    """A state of *world* ranks, for rank *rank* of *own_world*; parts request tensors from it.

    *open_image* returns a shard's image, which must stay until `load` returned.
    """

    def __init__(
        self, open_image: OpenImage, *, step: int, world: int, rank: int, own_world: int
    ) -> None:
        self._open = open_image
        self._step = step
        self._world = world
        self._images: dict[int, _ShardImage] = {}
        self.is_own = world == own_world
        self._home_rank = rank if self.is_own else 0
        self._requests: list[tuple[str, torch.Tensor]] = []
        self._target_names: dict[_TensorMemory, str] = {}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was saved next to the parts: ``rng``, versions; of this rank, or of the lowest."""
        return self._image(self._home_rank).metadata

    def part_keys(self) -> set[str]:
        return set(self.metadata["parts"])

    def spec(self, name: str) -> TensorSpec | None:
        """Return the tensor of that name in the image of the lowest rank that has it."""
        found = self._find_tensor(name)
        return found[1].spec if found else None

    def names(self, prefix: str) -> list[str]:
        """Return the names of this rank's tensors with *prefix*; of all ranks in another world."""
        found: dict[str, None] = {}
        for image in [self._image(self._home_rank)] if self.is_own else self._all_images():
            names = (*image.tensors, *image.owner_by_name)
            found.update(dict.fromkeys(n for n in names if n.startswith(prefix)))
        return list(found)

    def fragments(self, key: str) -> list[Any]:
        """Return the JSON fragments of that part: of this rank, or of all, in order."""
        if self.is_own:
            parts = self.metadata["parts"]
            return [parts[key]] if key in parts else []
        return [
            image.metadata["parts"][key]
            for image in self._all_images()
            if key in image.metadata["parts"]
        ]

    def request(self, name: str, target: torch.Tensor) -> None:
        """Have *target* filled with what is saved as *name*.

        Raises:
            CheckpointError: There is none, or it is of another shape or dtype; or *target* is
                already requested for other values.
        """
        check_storable(target, name)
        spec = self.spec(name)
        if spec is None:
            raise StructureError(f"the checkpoint has no {name}")
        with torch.no_grad():
            stored = as_storable(target) if not is_dtensor(target) else target
            dtype = DTYPE_NAMES[stored.dtype]
        if spec.dtype != dtype:
            raise StructureError(
                f"{name} was saved as {spec.dtype} and is {dtype} now; restore with the dtypes "
                "that were saved, and convert afterwards"
            )
        if tuple(target.shape) != logical_shape(spec, target.dtype):
            raise StructureError(
                f"{name} was saved with the shape {logical_shape(spec, target.dtype)} and has "
                f"{tuple(target.shape)} now; restore into a model of the structure that was saved"
            )
        if target.is_inference():
            raise CheckpointError(
                f"{name} was made in inference mode and cannot be written; make it "
                "outside, or give its clone()"
            )
        memory = _memory_of(target)
        if not self.can_fill(name, target):
            raise CheckpointError(
                f"{name} and {self._target_names[memory]} are one tensor here, and were saved with "
                "different values; give each its own memory (clone()) before restoring"
            )
        if memory not in self._target_names:
            self._requests.append((name, target))
        if memory.address:
            self._target_names.setdefault(memory, name)

    def can_fill(self, name: str, target: torch.Tensor) -> bool:
        """Return whether *target* is not already requested for other values than *name*."""
        memory = _memory_of(target)
        first = self._target_names.get(memory, name)
        return first == name or not memory.address or self._has_same_values(first, name)

    def fetch(self) -> None:
        """Have what was requested read and verified, but for memory; nothing is changed yet.

        What is in memory is verified when it is read, by `load`.

        Raises:
            CorruptError: A part is damaged, and no copy of it is intact.
            CheckpointError: A part cannot be read.
        """
        for opened, ranges in self._requested_ranges():
            opened.ensure(ranges)

    @torch.no_grad()
    @paused_gc()
    def _requested_ranges(self) -> list[tuple[OpenedImage, list[ByteRange]]]:
        """Return the bytes of each image that the requested tensors need."""
        placements = TensorPlacements()
        wanted: dict[int, tuple[OpenedImage, list[ByteRange]]] = {}
        for name, target in self._requests:
            local = local_tensor(target)
            if local.numel() == 0:
                continue
            spec = placements.spec_of(target, local, name)
            found = self._find_tensor(name)
            assert found is not None
            if _is_same_region(spec, found[1].spec):
                if isinstance(found[0].opened, HashedImage):
                    continue
                pieces = [(found[0].opened, found[1])]
            else:
                parts = self._saved_parts(name)
                pieces = distinct_pieces(p for p in parts if overlap_ranges(p[1], spec))
            for opened, placed in pieces:
                ranges = wanted.setdefault(id(opened), (opened, []))[1]
                ranges += overlap_ranges(placed, spec)
        return list(wanted.values())

    @torch.no_grad()
    def load(self, n_threads: int) -> int:
        """Fill all requested tensors with *n_threads* threads; return how many bytes were written.

        Raises:
            CorruptError: A part is damaged.
            CheckpointError: The parts of a tensor do not cover it. The content of the requested
                tensors is then undefined.
        """
        placements = TensorPlacements()
        direct: list[DirectTensor] = []
        copied: list[TensorPair] = []
        resharded: dict[str, torch.Tensor] = {}
        nbytes = 0
        for name, target in self._requests:
            local = local_tensor(target)
            if local.numel() == 0:
                continue
            nbytes += local.numel() * local.element_size()
            found = self._find_tensor(name)
            assert found is not None
            image, placed = found
            if _is_same_region(placements.spec_of(target, local, name), placed.spec):
                direct.append((local, image.opened, placed))
            elif name in resharded:
                copied.append((local, local_tensor(resharded[name])))
            else:
                resharded[name] = target if is_dtensor(target) else local
        if resharded:
            # A lazy import: most restores need no resharding.
            from gpuops.worker.state.resharding import load_resharded

            load_resharded(resharded, {name: self._pieces(name) for name in resharded})
        rest = read_parallel(direct, n_threads)
        copied += [(local, _tensor_of(opened, placed)) for local, opened, placed in rest]
        targets, sources = [a for a, _ in copied], [b for _, b in copied]
        # Others may be sparse: pinning one would take the memory of all of it.
        in_memory = dict.fromkeys(it[1] for it in rest if isinstance(it[1], HashedImage))
        device = pinned_buffer.first_cuda_device(targets)
        with pinned_buffer.pinned(in_memory, device, _log.info):
            copy_parallel(targets, sources, n_threads)
        return nbytes

    def _has_same_values(self, first_name: str, second_name: str) -> bool:
        """Return whether two tensors were saved with the same values."""
        for image in [self._image(self._home_rank)] if self.is_own else self._all_images():
            a, b = self._find_in(image, first_name), self._find_in(image, second_name)
            if a is None and b is None:
                continue
            if a is None or b is None or not _is_same_region(a[1].spec, b[1].spec):
                return False
            if not torch.equal(_bytes_of(a[0].opened, a[1]), _bytes_of(b[0].opened, b[1])):
                return False
        return True

    def _find_in(self, image: _ShardImage, name: str) -> tuple[_ShardImage, PlacedTensor] | None:
        """Return the tensor of the rank of *image*: from there, or from its owner's image.

        The owner's image may be without it, and name a rank of another node: it comes from disk,
        this one from memory.
        """
        seen: list[int] = []
        while name not in image.tensors:
            owner = image.owner_by_name.get(name)
            if owner is None and not seen:
                return None
            if owner is None or owner in seen:
                raise CorruptError(
                    f"{name} is not in the image of rank {seen[-1]}, which has to have it"
                )
            seen.append(owner)
            image = self._image(owner)
        return image, image.tensors[name]

    def _find_tensor(self, name: str) -> tuple[_ShardImage, PlacedTensor] | None:
        found = self._find_in(self._image(self._home_rank), name)
        if found is not None:
            return found
        for image in self._all_images():
            if name in image.tensors:
                return image, image.tensors[name]
        return None

    def _pieces(self, name: str) -> list[SavedPiece]:
        found = distinct_pieces(self._saved_parts(name))
        if not found:
            raise CheckpointError(f"no rank saved anything of {name}")
        return found

    def _saved_parts(self, name: str) -> list[SavedPiece]:
        images = list(self._all_images())
        return [(image.opened, image.tensors[name]) for image in images if name in image.tensors]

    def _all_images(self) -> Iterator[_ShardImage]:
        """Yield this rank's image first, then the others from the lowest rank on."""
        yield self._image(self._home_rank)
        for rank in range(self._world):
            if rank != self._home_rank:
                yield self._image(rank)

    def _image(self, rank: int) -> _ShardImage:
        if rank not in self._images:
            self._images[rank] = self._read(Shard(rank, self._world))
        return self._images[rank]

    def _read(self, shard: Shard) -> _ShardImage:
        opened = self._open(shard)
        layout = _read_header(opened)
        if layout.shard != shard:
            raise CorruptError(
                f"the image of rank {shard.rank} of {shard.world} declares that it is of rank "
                f"{layout.shard.rank} of {layout.shard.world}"
            )
        opened.ensure([(layout.metadata_blob.begin, layout.metadata_blob.end)])
        metadata = loads(
            read_metadata_blob(opened.view, layout), f"the metadata of rank {shard.rank}"
        )
        if not isinstance(metadata, dict) or not isinstance(metadata.get("parts"), dict):
            raise CorruptError(f"the metadata of rank {shard.rank} is incomplete")
        if metadata.get("format") != STATE_FORMAT:
            raise CheckpointError(
                f"the state of rank {shard.rank} has the format {metadata.get('format')!r:.40}; "
                f"this gpuops reads {STATE_FORMAT}; use the gpuops that saved it, or a newer one"
            )
        if metadata.get("step") != self._step:
            raise CorruptError(
                f"the image of rank {shard.rank} is of step {metadata.get('step')!r:.40}, the "
                f"others are of step {self._step}"
            )
        tensors = {placed.spec.name: placed for placed in layout.tensors}
        return _ShardImage(opened, layout, tensors, layout.owner_by_name, metadata)


def _memory_of(tensor: torch.Tensor) -> _TensorMemory:
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    address = local.data_ptr() if local.numel() else 0
    return _TensorMemory(address, local.device, tuple(local.shape), local.stride())


def _read_header(opened: OpenedImage) -> ImageLayout:
    nbytes = len(opened.view)
    opened.ensure([(0, min(LENGTH_BYTES, nbytes))])
    end = min(header_size_bytes(bytes(opened.view[:LENGTH_BYTES])), nbytes)
    opened.ensure([(0, end)])
    return read_layout(opened.view[:end], nbytes=nbytes)


def _tensor_of(opened: OpenedImage, placed: PlacedTensor) -> torch.Tensor:
    opened.ensure([(placed.begin, placed.end)])
    return view_of(opened.view, placed)


def _bytes_of(opened: OpenedImage, placed: PlacedTensor) -> torch.Tensor:
    return _tensor_of(opened, placed).reshape(-1).view(torch.uint8)


def overlap_ranges(placed: PlacedTensor, wanted: TensorSpec) -> list[ByteRange]:
    """Return the bytes of the saved part *placed* that are in the part *wanted* of the tensor."""
    begins, ends = [], []
    saved = placed.spec
    for w, n, s, m in zip(wanted.offsets, wanted.shape, saved.offsets, saved.shape, strict=True):
        begin, end = max(w - s, 0), min(w + n - s, m)
        if begin >= end:
            return []  # as most parts: those of other ranks
        begins.append(begin)
        ends.append(end)
    return box_ranges(placed, begins, ends)


def box_ranges(placed: PlacedTensor, begins: Sequence[int], ends: Sequence[int]) -> list[ByteRange]:
    """Return the bytes of the items *begins* to *ends* of a saved part, in each dimension.

    Rows of less than a piece are not told apart: a piece is read as a whole.
    """
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return []
    shape = placed.spec.shape
    strides = [ITEMSIZE_BYTES[placed.spec.dtype] * prod(shape[d + 1 :]) for d in range(len(shape))]

    def walk(dim: int, at: int) -> Iterator[ByteRange]:
        rest = range(dim, len(shape))
        is_whole = all(begins[d] == 0 and ends[d] == shape[d] for d in rest[1:])
        if not rest or is_whole or strides[dim] <= PIECE_BYTES:
            last = at + sum((ends[d] - 1) * strides[d] for d in rest)
            yield at + sum(begins[d] * strides[d] for d in rest), last + itemsize
            return
        for index in range(begins[dim], ends[dim]):
            yield from walk(dim + 1, at + index * strides[dim])

    itemsize = ITEMSIZE_BYTES[placed.spec.dtype]
    return list(walk(0, placed.begin))


def _is_same_region(target: TensorSpec, saved: TensorSpec) -> bool:
    return (
        target.shape == saved.shape
        and target.offsets == saved.offsets
        and target.global_shape == saved.global_shape
    )
