"""A state as the tensors that it is of, instead of the shards that it lies in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gpuops.checkpoint.image import HEADER_BYTES_MAX, ImageLayout, PlacedTensor, read_layout
from gpuops.checkpoint.manifest import Manifest, ShardRecord
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import CorruptError, Shard, StateId

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a tensor: in which shard, and where in its image."""

    shard: Shard
    placed: PlacedTensor

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where the part begins in the whole tensor, and its shape."""
        return self.placed.spec.offsets, self.placed.spec.shape


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the state: ``parts`` cover it without overlap.

    ``dtype`` is safetensors' name. ``n_copies`` is how many ranks hold the part that most of them
    hold: 4 for what four data-parallel ranks saved alike.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    n_copies: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return sum(part.placed.end - part.placed.begin for part in self.parts)

    @property
    def sharding(self) -> str:
        """Return how it is cut: ``whole``, ``4 along 0``, ``2 x 4 along 0, 1`` or ``7 parts``."""
        if len(self.parts) == 1:
            return "whole"
        cuts = [len({part.box[0][dim] for part in self.parts}) for dim in range(len(self.shape))]
        if prod(cuts) != len(self.parts):
            return f"{len(self.parts)} parts"
        along = [dim for dim, n_cuts in enumerate(cuts) if n_cuts > 1]
        sizes = " x ".join(str(cuts[dim]) for dim in along)
        return f"{sizes} along {', '.join(map(str, along))}"


def read_layouts(
    store: CheckpointStore, manifest: Manifest, advance: Iterable[object] = ()
) -> tuple[ImageLayout, ...]:
    """Return the layout of each shard, in the order of ranks; only the headers are read.

    Args:
        store: Where the state lies.
        manifest: Its manifest.
        advance: One item is taken from it after each shard, for a progress bar.

    Raises:
        CorruptError: A header is not the one that was saved.
        CheckpointError: A shard is missing or cannot be read.
    """
    steps = iter(advance)
    found = []
    there = store.files(manifest.state)
    for record in manifest.shards:
        _require_size(store, manifest.state, record, there.get(record.shard.file_name))
        found.append(_read_layout(store, manifest.state, record))
        next(steps, None)
    return tuple(found)


def _require_size(
    store: CheckpointStore, state: StateId, record: ShardRecord, nbytes: int | None
) -> None:
    if nbytes == record.digest.nbytes:
        return
    is_there = "is not there" if nbytes is None else f"has {nbytes} bytes"
    raise CorruptError(
        f"{record.shard.file_name} of {state} in {store.address} {is_there}; "
        f"{record.digest.nbytes} bytes were saved"
    )


def _read_layout(store: CheckpointStore, state: StateId, record: ShardRecord) -> ImageLayout:
    where = f"{record.shard.file_name} of {state} in {store.address}"
    try:
        layout = read_layout(_header(store, state, record), nbytes=record.digest.nbytes)
    except CorruptError as exc:
        raise CorruptError(f"{where}: {exc}") from exc
    if layout.hash != record.layout or layout.shard != record.shard:
        raise CorruptError(f"{where}: its header is not the one that was saved")
    return layout


def _header(store: CheckpointStore, state: StateId, record: ShardRecord) -> bytes:
    path = store.open_shard(state, record.shard)
    if path is not None:
        return _header_of_file(path)
    data = bytearray()
    wanted = _LENGTH_BYTES
    for chunk in store.read_chunks(state, record.shard):
        data += chunk
        if wanted == _LENGTH_BYTES and len(data) >= _LENGTH_BYTES:
            wanted = _header_nbytes(bytes(data[:_LENGTH_BYTES]))
        if len(data) >= wanted > _LENGTH_BYTES:
            break
    return bytes(data[:wanted])


def _header_of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            return length + file.read(_header_nbytes(length) - _LENGTH_BYTES)
    except OSError as exc:
        raise CorruptError(f"cannot be read: {exc.strerror}") from exc


def _header_nbytes(length: bytes) -> int:
    n_json = int.from_bytes(length, "little")
    if n_json > HEADER_BYTES_MAX:
        raise CorruptError(f"its header would have {n_json} bytes")
    return _LENGTH_BYTES + n_json


def whole_tensors(layouts: Sequence[ImageLayout]) -> Mapping[str, WholeTensor]:
    """Return each tensor by name, put together from the shards of one state.

    A part that several ranks hold is taken from the first of them.

    Raises:
        CorruptError: The parts of a tensor disagree, overlap, or leave a hole.
    """
    by_name: dict[str, list[Part]] = {}
    for layout in layouts:
        for placed in layout.tensors:
            by_name.setdefault(placed.spec.name, []).append(Part(layout.shard, placed))
    return {name: _whole(name, parts) for name, parts in sorted(by_name.items())}


def _whole(name: str, parts: Sequence[Part]) -> WholeTensor:
    first = parts[0].placed.spec
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Part]] = {}
    for part in parts:
        spec = part.placed.spec
        if (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
            raise CorruptError(
                f"{name!r} is {first.dtype} {list(first.global_shape)} in shard "
                f"{parts[0].shard.rank} and {spec.dtype} {list(spec.global_shape)} in shard "
                f"{part.shard.rank}"
            )
        copies.setdefault(part.box, []).append(part)
    kept = [same[0] for box, same in sorted(copies.items()) if prod(box[1])] or [parts[0]]
    _check_cover(name, first.global_shape, kept)
    return WholeTensor(
        name, first.dtype, first.global_shape, tuple(kept), max(map(len, copies.values()))
    )


def _check_cover(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    """Disjoint parts inside of the whole that have its volume together leave no hole."""
    overlap = first_overlap([part.box for part in parts])
    if overlap is not None:
        one, other = (parts[place] for place in overlap)
        raise CorruptError(
            f"{name!r}: the parts at {list(one.box[0])} of shard {one.shard.rank} and at "
            f"{list(other.box[0])} of shard {other.shard.rank} overlap"
        )
    n_there = sum(prod(part.box[1]) for part in parts)
    if n_there != prod(shape):
        raise CorruptError(
            f"{name!r} of shape {list(shape)} has {prod(shape)} elements; its "
            f"{len(parts)} parts have {n_there}"
        )


def first_overlap(
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[int, int] | None:
    """Return the places of two of *boxes* (offsets, shape) that overlap, None where none do.

    Found by a sweep along the dimension with most cuts.
    """
    if len(boxes) < 2:
        return None
    n_dims = len(boxes[0][0])
    if n_dims == 0:
        return 0, 1
    dim = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    order = sorted(range(len(boxes)), key=lambda place: boxes[place][0][dim])
    active: list[int] = []
    for place in order:
        begin = boxes[place][0][dim]
        active = [other for other in active if boxes[other][0][dim] + boxes[other][1][dim] > begin]
        for other in active:
            if _meet(boxes[place], boxes[other]):
                return other, place
        active.append(place)
    return None


def _meet(
    one: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]
) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in zip(*one, *other, strict=True))
