"""A stored state read back: its tensors, whether it is intact, and its save interval."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Self

from gpuops.checkpoint.digest import HASH_BYTES
from gpuops.checkpoint.image import (
    HEADER_BYTES_MAX,
    ImageLayout,
    PlacedTensor,
    parse_metadata_blob,
    read_layout,
)
from gpuops.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ShardRecord,
    damaged_file_name,
    verified_file_name,
)
from gpuops.checkpoint.pieces import encode_block, pieces_file_name
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError, Shard, StateId
from gpuops.plan.failure_rate import FailureRate
from gpuops.wire.messages import Limit, Message

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One part of a tensor: its shard, and its position in the image."""

    shard: Shard
    placed: PlacedTensor

    @property
    def region(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where the part begins in the whole tensor, and its shape."""
        return self.placed.spec.offsets, self.placed.spec.shape


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the state: ``parts`` cover it without overlap.

    ``dtype`` is safetensors' name. ``n_copies`` is the highest number of ranks with the same part:
    4 where four data-parallel ranks saved equal parts, each its own or all of them one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    n_copies: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return sum(part.placed.end - part.placed.begin for part in self.parts)

    @property
    def sharding(self) -> str:
        """Return how it is split: ``whole``, ``4 along 0``, ``2 x 4 along 0, 1`` or ``7 parts``."""
        if len(self.parts) == 1:
            return "whole"
        cuts = [len({part.region[0][dim] for part in self.parts}) for dim in range(len(self.shape))]
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
    sizes = store.file_sizes(manifest.state)
    for record in manifest.shards:
        _require_size(store, manifest.state, record, sizes.get(record.shard.file_name))
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
        layout = read_layout(_read_header(store, state, record), nbytes=record.digest.nbytes)
    except CorruptError as exc:
        raise CorruptError(f"{where}: {exc}") from exc
    if layout.header_hash != record.layout_hash or layout.shard != record.shard:
        raise CorruptError(f"{where}: its header is not the one that was saved")
    return layout


def _read_header(store: CheckpointStore, state: StateId, record: ShardRecord) -> bytes:
    path = store.local_shard_path(state, record.shard)
    if path is not None:
        return _read_file_header(path)
    data = bytearray()
    wanted = LENGTH_BYTES
    for chunk in store.read_chunks(state, record.shard):
        data += chunk
        if wanted == LENGTH_BYTES and len(data) >= LENGTH_BYTES:
            wanted = header_size_bytes(bytes(data[:LENGTH_BYTES]))
        if len(data) >= wanted > LENGTH_BYTES:
            break
    return bytes(data[:wanted])


def _read_file_header(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            length = file.read(LENGTH_BYTES)
            return length + file.read(header_size_bytes(length) - LENGTH_BYTES)
    except OSError as exc:
        raise CorruptError(f"cannot be read: {exc.strerror}") from exc


def header_size_bytes(length: bytes) -> int:
    """Return the size of the header of an image that begins with the `LENGTH_BYTES` *length*.

    Raises:
        CorruptError: It is above the limit.
    """
    n_json = int.from_bytes(length, "little")
    if n_json > HEADER_BYTES_MAX:
        raise CorruptError(f"its header would have {n_json} bytes")
    return LENGTH_BYTES + n_json


def assemble_tensors(layouts: Sequence[ImageLayout]) -> Mapping[str, StoredTensor]:
    """Return each tensor by name, assembled from the shards of one state.

    A part that several ranks have is read from the first of them.

    Raises:
        CorruptError: The parts of a tensor disagree, overlap, or leave a hole.
    """
    by_name: dict[str, list[TensorPart]] = {}
    sharing_ranks: Counter[tuple[int, str]] = Counter()
    for layout in layouts:
        for placed in layout.tensors:
            by_name.setdefault(placed.spec.name, []).append(TensorPart(layout.shard, placed))
        sharing_ranks.update((owner, name) for name, owner in layout.owner_by_name.items())
    return {
        name: _assemble_tensor(name, parts, sharing_ranks)
        for name, parts in sorted(by_name.items())
    }


def _assemble_tensor(
    name: str, parts: Sequence[TensorPart], sharing_ranks: Mapping[tuple[int, str], int]
) -> StoredTensor:
    first = parts[0].placed.spec
    copies: dict[tuple[tuple[int, ...], tuple[int, ...]], list[TensorPart]] = {}
    for part in parts:
        spec = part.placed.spec
        if (spec.dtype, spec.global_shape) != (first.dtype, first.global_shape):
            raise CorruptError(
                f"{name!r} is {first.dtype} {list(first.global_shape)} in shard "
                f"{parts[0].shard.rank} and {spec.dtype} {list(spec.global_shape)} in shard "
                f"{part.shard.rank}"
            )
        copies.setdefault(part.region, []).append(part)
    distinct = [same[0] for box, same in sorted(copies.items()) if prod(box[1])] or [parts[0]]
    _check_cover(name, first.global_shape, distinct)
    n_copies = max(
        sum(1 + sharing_ranks.get((part.shard.rank, name), 0) for part in same)
        for same in copies.values()
    )
    return StoredTensor(name, first.dtype, first.global_shape, tuple(distinct), n_copies)


def _check_cover(name: str, shape: tuple[int, ...], parts: Sequence[TensorPart]) -> None:
    """Check that the parts are disjoint and together as large as the tensor."""
    overlap = first_overlap([part.region for part in parts])
    if overlap is not None:
        first, second = (parts[place] for place in overlap)
        raise CorruptError(
            f"{name!r}: the parts at {list(first.region[0])} of shard {first.shard.rank} and at "
            f"{list(second.region[0])} of shard {second.shard.rank} overlap"
        )
    n_there = sum(prod(part.region[1]) for part in parts)
    if n_there != prod(shape):
        raise CorruptError(
            f"{name!r} of shape {list(shape)} has {prod(shape)} elements; its "
            f"{len(parts)} parts have {n_there}"
        )


def first_overlap(
    regions: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[int, int] | None:
    """Return the positions of two of *regions* (offsets, shape) that overlap, None where none do.

    Found by a sweep along the dimension with most cuts.
    """
    if len(regions) < 2:
        return None
    n_dims = len(regions[0][0])
    if n_dims == 0:
        return 0, 1
    dim = max(range(n_dims), key=lambda d: len({offsets[d] for offsets, _ in regions}))
    order = sorted(range(len(regions)), key=lambda place: regions[place][0][dim])
    active: list[int] = []
    for index in order:
        begin = regions[index][0][dim]
        active = [
            earlier
            for earlier in active
            if regions[earlier][0][dim] + regions[earlier][1][dim] > begin
        ]
        for earlier in active:
            if _regions_overlap(regions[index], regions[earlier]):
                return earlier, index
        active.append(index)
    return None


def _regions_overlap(
    first: tuple[tuple[int, ...], tuple[int, ...]], second: tuple[tuple[int, ...], tuple[int, ...]]
) -> bool:
    return all(a < b + n and b < a + m for a, m, b, n in zip(*first, *second, strict=True))


# Called with the bytes verified so far and the bytes of the whole state.
VerifyProgress = Callable[[int, int], None]


class FileProblemKind(StrEnum):
    """What is wrong with a file of a state."""

    MANIFEST = "manifest"  # not there, not readable, edited, or of a later version
    MISSING = "missing"
    EXTRA = "extra"
    TRUNCATED = "truncated"
    LONGER = "longer"
    FLIPPED = "flipped"  # the right number of bytes, and some are not what was saved
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One file that is not as it was saved. ``offsets``: where its bad chunks begin, in bytes."""

    file: str
    kind: FileProblemKind
    detail: str
    offsets: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {self.detail}"


def ignore_progress(_done_bytes: int, _all_bytes: int) -> None:
    """Report no progress."""


def verify_state(
    store: CheckpointStore,
    state: StateId,
    *,
    progress: VerifyProgress = ignore_progress,
    sizes_only: bool = False,
) -> list[FileProblem]:
    """Return the problems of *state* in *store*: none where every bit is as it was saved.

    *sizes_only*: check the names and sizes of the files, and the marks of damage that was found
    before, not their content.

    Raises:
        CheckpointError: The store cannot be listed. Problems of the state are returned.
    """
    try:
        manifest = store.read_manifest(state)
    except CheckpointError as exc:
        return [FileProblem(MANIFEST, FileProblemKind.MANIFEST, str(exc))]
    sizes = store.file_sizes(state)
    shards = [record.shard for record in manifest.shards]
    beside = (pieces_file_name, verified_file_name, damaged_file_name)
    expected = {shard.file_name for shard in shards}
    expected |= {file_name(shard) for file_name in beside for shard in shards}
    problems = _unexpected_files(sizes, expected)
    done_bytes = 0
    for record in manifest.shards:
        name, nbytes = record.shard.file_name, record.digest.nbytes
        problem = _size_problem(name, sizes.get(name), nbytes)
        if problem is None and sizes_only and damaged_file_name(record.shard) in sizes:
            detail = "it was not what was saved when it was read last"
            problem = FileProblem(name, FileProblemKind.FLIPPED, detail)
        if problem is None and not sizes_only:
            shard_progress = partial(_report_progress, progress, done_bytes, manifest.nbytes)
            blocks = bytearray()
            problem = _verify_shard(store, state, record, blocks, shard_progress)
            if problem is None and pieces_file_name(record.shard) in sizes:
                problem = _verify_pieces(store, state, record.shard, blocks)
        if problem is not None:
            problems.append(problem)
        done_bytes += nbytes
        progress(done_bytes, manifest.nbytes)
    return problems


def _report_progress(
    progress: VerifyProgress, before_bytes: int, all_bytes: int, so_far: int
) -> None:
    progress(before_bytes + so_far, all_bytes)


def _unexpected_files(present: Iterable[str], expected: Iterable[str]) -> list[FileProblem]:
    return [
        FileProblem(_printable(name), FileProblemKind.EXTRA, "it is not in the manifest")
        for name in sorted(set(present) - set(expected))
    ]


def _size_problem(name: str, there_bytes: int | None, nbytes: int) -> FileProblem | None:
    if there_bytes is None:
        return FileProblem(
            name, FileProblemKind.MISSING, f"it is not there; {nbytes} bytes were saved"
        )
    if there_bytes < 0:
        return FileProblem(name, FileProblemKind.UNREADABLE, "it is not a regular file")
    if there_bytes == nbytes:
        return None
    kind = FileProblemKind.TRUNCATED if there_bytes < nbytes else FileProblemKind.LONGER
    return FileProblem(name, kind, f"it has {there_bytes} bytes, {nbytes} were saved")


def _verify_shard(
    store: CheckpointStore,
    state: StateId,
    record: ShardRecord,
    blocks: bytearray,
    progress: Callable[[int], None],
) -> FileProblem | None:
    """Return what is wrong with a shard; add the hashes of its pieces to *blocks*."""
    name, nbytes = record.shard.file_name, record.digest.nbytes
    bad, at = [], 0
    try:
        for number, chunk in enumerate(store.read_chunks(state, record.shard)):
            block = encode_block(chunk)
            saved = record.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]
            if block[:HASH_BYTES] != saved:
                bad.append(at)
            blocks += block
            at += len(chunk)
            progress(min(at, nbytes))
    except CheckpointError as exc:
        where = f"it ends at byte {at}: " if at else ""
        return FileProblem(name, FileProblemKind.UNREADABLE, f"{where}{exc}", tuple(bad))
    if problem := _size_problem(name, at, nbytes):  # it changed since its size was read
        return problem
    if not bad:
        return None
    n_chunks = -(-nbytes // CHUNK_BYTES)
    shown = ", ".join(f"{begin}-{min(begin + CHUNK_BYTES, nbytes) - 1}" for begin in bad[:4])
    more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
    detail = f"{len(bad)} of {n_chunks} chunks are not what was saved: bytes {shown}{more}"
    return FileProblem(name, FileProblemKind.FLIPPED, detail, tuple(bad))


def _verify_pieces(
    store: CheckpointStore, state: StateId, shard: Shard, blocks: bytearray
) -> FileProblem | None:
    name = pieces_file_name(shard)
    try:
        if store.read_piece_hashes(state, shard, 0, len(blocks) + 1) == blocks:
            return None
    except CheckpointError as exc:
        return FileProblem(name, FileProblemKind.UNREADABLE, str(exc))
    detail = "it is not what was saved; the shard is intact, and is read in whole chunks"
    return FileProblem(name, FileProblemKind.FLIPPED, detail)


def _printable(name: str) -> str:
    """Return a file's untrusted *name* as text that is safe to print."""
    return "".join(char if char.isprintable() else "?" for char in name)


AUTO = "auto"  # its key in the metadata saved with the parts
_Seconds = Annotated[float, Limit(1e9)]


@dataclass(frozen=True, slots=True)
class _IntervalMessage(Message):
    steps: Annotated[int, Limit(10**9)] | None
    step_s: _Seconds | None
    stall_s: _Seconds | None
    restore_s: _Seconds | None
    n_nodes: Annotated[int, Limit(10**6)]
    failures: Annotated[int, Limit(10**9)]
    node_hours: Annotated[float, Limit(1e12)] | None


@dataclass(frozen=True, slots=True)
class ChosenInterval:
    """Measured medians, in seconds; None: not measured yet.

    ``steps`` None: the first saves came before there were measurements.
    """

    steps: int | None
    step_s: float | None
    stall_s: float | None
    restore_s: float | None
    n_nodes: int
    failures: FailureRate

    @property
    def interval_s(self) -> float | None:
        """Return the time between two saves."""
        if self.steps is None or self.step_s is None:
            return None
        return self.steps * self.step_s

    @classmethod
    def from_json(cls, values: object) -> Self:
        """Parse *values*; raises MessageFormatError where they are invalid."""
        found = _IntervalMessage.from_json(values)
        return cls(
            steps=found.steps,
            step_s=found.step_s,
            stall_s=found.stall_s,
            restore_s=found.restore_s,
            n_nodes=found.n_nodes,
            failures=FailureRate(found.failures, found.node_hours or 0.0),
        )


def read_chosen_interval(
    store: CheckpointStore, state: StateId, layout: ImageLayout
) -> ChosenInterval | None:
    """Return the interval saved with the shard of *layout*; None where there is none.

    It is not verified: that would read the whole shard.
    """
    begin, end = layout.metadata_blob.begin, layout.metadata_blob.end
    try:
        stored = json.loads(parse_metadata_blob(store.read_bytes(state, layout.shard, begin, end)))
        return ChosenInterval.from_json(stored[AUTO])
    except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
        return None
