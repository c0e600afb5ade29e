"""One rank's shard of a state as one image: a byte-exact safetensors file.

An image is the length of its header (8 bytes, little endian), the header (JSON, padded with spaces
so that the data begin at a multiple of 4096) and the tensors, sorted by item size (the widest
first), then single items, small tensors and others: each is aligned, and there are no holes, which
the format forbids. The header also has what torch's own reader needs to load the images of one
world into another (``DCP_SHARDING_INFO``). Everything that is not a tensor is in the metadata blob:
one more tensor, of bytes, of fixed capacity.

A tensor that ranks of a node hold alike may be in the image of one of them, its owner
(`gpuops.checkpoint.sharing`). The header of the others' images names the owner, and one more tensor
of bytes has the digest of what they had. The format of such an image is 2.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any

from blake3 import blake3

from gpuops.checkpoint import sharing
from gpuops.checkpoint.agreement import replicated
from gpuops.checkpoint.header_json import (
    DIM_MAX,
    N_DIMS_MAX,
    abbreviate,
    as_mapping,
    as_numbers,
    check_cost,
    compact,
    parse_header,
    parse_json,
    text_of,
)
from gpuops.checkpoint.sharing import DIGEST_BYTES, SharedTensors
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError, CorruptError, Shard
from gpuops.host.gc_pause import paused_gc

METADATA_PREFIX = "__gpuops_extra__/"
FORMAT, SHARED_FORMAT = 1, 2
ALIGN_BYTES = 4096
SMALL_TENSOR_BYTES = 2**20
HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library
NAME_BYTES_MAX = 4096

ITEMSIZE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

_METADATA = "__metadata__"
_SHARDING = "DCP_SHARDING_INFO"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a shard: its name, its dtype in safetensors' notation, and which part it is.

    ``shape`` is this rank's part; it begins at ``offsets`` of the tensor of ``global_shape``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, and its bytes in the image: from ``begin`` up to ``end``."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The layout of an image of ``nbytes`` bytes.

    ``tensors`` are in the order of their data, without the metadata blob and ``digests``.
    ``header`` is everything before the data: the length, the JSON and the padding. ``header_hash``
    (BLAKE3 of the header, 64 hexadecimal digits) identifies the layout. ``shared``: what it shares
    with others on its node, with ``digests`` of `DIGEST_BYTES` each.
    """

    shard: Shard
    tensors: tuple[PlacedTensor, ...]
    metadata_blob: PlacedTensor
    header: bytes
    nbytes: int
    header_hash: str
    shared: tuple[SharedTensors, ...] = ()
    digests: PlacedTensor | None = None

    @property
    def owner_by_name(self) -> dict[str, int]:
        """Return the rank whose image has the tensor, for each that is in another's, in order."""
        return {
            name: owner
            for each in self.shared
            for name, owner in each.owner_by_name(self.shard.rank).items()
        }

    @property
    def metadata_capacity_bytes(self) -> int:
        """How many bytes `write_metadata_blob` accepts."""
        return self.metadata_blob.spec.nbytes - _LENGTH_BYTES


def metadata_blob_name(rank: int) -> str:
    """Return the name of the tensor that holds the metadata blob."""
    return f"{METADATA_PREFIX}rank{rank:05d}"


def digests_name(rank: int) -> str:
    """Return the name of the tensor that holds the digests of shared tensors."""
    return f"{metadata_blob_name(rank)}.digests"


def image_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return *specs* in the order of their data in an image."""

    def key(spec: TensorSpec) -> tuple[int, bool, bool, str, str]:
        n, item = spec.nbytes, ITEMSIZE_BYTES[spec.dtype]
        return -item, n > item, n >= SMALL_TENSOR_BYTES, spec.dtype, spec.name

    return sorted(specs, key=key)


def plan_image(
    shard: Shard,
    specs: Sequence[TensorSpec],
    metadata_capacity_bytes: int,
    replicas_by_name: Mapping[str, tuple[int, ...]] | None = None,
    shared: tuple[SharedTensors, ...] = (),
) -> ImageLayout:
    """Return the layout of an image of *specs* and a metadata blob of that capacity.

    *replicas_by_name*: the ranks on which a tensor must be bitwise equal, by its name. *shared*: by
    whom on the node tensors of *specs* are saved; those of other owners are not in the image.

    Raises:
        CheckpointError: Two tensors have one name, a name, dtype, shape or size is invalid, or a
            limit of the image or its header is exceeded; the message names the tensor.
    """
    if not 0 <= metadata_capacity_bytes <= IMAGE_BYTES_MAX:
        raise CheckpointError(f"a metadata blob cannot have {metadata_capacity_bytes} bytes")
    for spec in specs:
        if spec.name.startswith(METADATA_PREFIX) or spec.name == _METADATA:
            raise CheckpointError(f"the tensor name {abbreviate(spec.name)} is reserved")
        _check_spec(spec, CheckpointError)
    _check_names(specs)
    reserved = [_byte_spec(metadata_blob_name(shard.rank), metadata_capacity_bytes + _LENGTH_BYTES)]
    if shared:
        n_digests = sum(len(each.stored) for each in shared)
        reserved.append(_byte_spec(digests_name(shard.rank), n_digests * DIGEST_BYTES))
    foreign = {name for each in shared for name in each.owner_by_name(shard.rank)}
    order = image_order([*(spec for spec in specs if spec.name not in foreign), *reserved])
    header = _encode_header(shard, order, replicas_by_name or {}, shared)
    placed = tuple(_assign_offsets(order, len(header)))
    nbytes = placed[-1].end
    if nbytes > IMAGE_BYTES_MAX:
        raise CheckpointError(f"{nbytes} bytes of tensors; an image has at most {IMAGE_BYTES_MAX}")
    return _make_layout(shard, placed, header, nbytes, shared)


@paused_gc()
def read_layout(view: memoryview | bytes, *, nbytes: int | None = None) -> ImageLayout:
    """Return the layout that the image *view* describes; the bytes need not be trusted.

    With *nbytes*, the size of the complete image, *view* may end where the data begin.

    Raises:
        CorruptError: It is not a valid image, or is truncated; the message says what is wrong.
    """
    with memoryview(view).cast("B") as flat:
        total_bytes = len(flat) if nbytes is None else nbytes
        n_json = int.from_bytes(flat[:_LENGTH_BYTES], "little")
        begin = _LENGTH_BYTES + n_json
        if n_json > HEADER_BYTES_MAX or not _LENGTH_BYTES + 2 <= begin <= min(
            len(flat), total_bytes
        ):
            raise CorruptError(
                f"the image of {total_bytes} bytes declares a header of {n_json} bytes"
            )
        if begin % ALIGN_BYTES:
            raise CorruptError(f"the data of the image begin at {begin}, not at a page boundary")
        header = bytes(flat[:begin])
    entries = parse_header(header[_LENGTH_BYTES:])
    metadata = entries.pop(_METADATA, None)
    shard, offsets, shapes, shared = _read_metadata(metadata, entries.keys())
    placed = [_read_entry(name, entry, begin, offsets, shapes) for name, entry in entries.items()]
    placed.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_contiguous(placed, begin, total_bytes)
    return _make_layout(shard, tuple(placed), header, total_bytes, shared)


def read_owners(image: memoryview | mmap) -> frozenset[int]:
    """Return the ranks whose images have tensors that the complete *image* shares with them.

    Raises:
        CorruptError: Its header is invalid.
    """
    n_header = _LENGTH_BYTES + int.from_bytes(image[:_LENGTH_BYTES], "little")
    header = bytes(image[: min(n_header, _LENGTH_BYTES + HEADER_BYTES_MAX)])
    if sharing.MARK not in header:
        return frozenset()  # reading all of 20,000 tensors takes a tenth of a second
    return frozenset(read_layout(header, nbytes=len(image)).owner_by_name.values())


def write_metadata_blob(view: memoryview, layout: ImageLayout, data: bytes) -> None:
    """Write *data* into the metadata blob of the image *view*, and zeros over the rest of it.

    Raises:
        CheckpointError: *data* exceeds the capacity of the layout.
    """
    capacity_bytes = layout.metadata_capacity_bytes
    if len(data) > capacity_bytes:
        raise CheckpointError(
            f"the state has {len(data)} bytes of metadata; the capacity is {capacity_bytes}"
        )
    begin, end = layout.metadata_blob.begin, layout.metadata_blob.end
    length = len(data).to_bytes(_LENGTH_BYTES, "little")
    view[begin:end] = length + data.ljust(capacity_bytes, b"\0")


def write_digests(view: memoryview, layout: ImageLayout, digests: Iterable[bytes]) -> None:
    """Write the *digests* of shared tensors, in order, into the image *view*."""
    if layout.digests is not None:
        view[layout.digests.begin : layout.digests.end] = b"".join(digests)


def read_metadata_blob(view: memoryview, layout: ImageLayout) -> bytes:
    """Return what `write_metadata_blob` wrote into the image *view*.

    Raises:
        CorruptError: The image is truncated, or the length of the metadata blob is invalid.
    """
    begin, end = layout.metadata_blob.begin, layout.metadata_blob.end
    if view.nbytes < end:
        raise CorruptError(f"the image ends at {view.nbytes}, its metadata blob at {end}")
    return parse_metadata_blob(view[begin:end])


def parse_metadata_blob(blob: memoryview | bytes) -> bytes:
    """Return the metadata in *blob*, all bytes of the metadata blob of an image.

    Raises:
        CorruptError: Its length exceeds its capacity.
    """
    capacity_bytes = len(blob) - _LENGTH_BYTES
    length = int.from_bytes(blob[:_LENGTH_BYTES], "little")
    if length > capacity_bytes:
        raise CorruptError(f"the metadata blob declares {length} bytes of {capacity_bytes}")
    return bytes(blob[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _make_layout(
    shard: Shard,
    placed: tuple[PlacedTensor, ...],
    header: bytes,
    nbytes: int,
    shared: tuple[SharedTensors, ...],
) -> ImageLayout:
    by_name = {tensor.spec.name: tensor for tensor in placed}
    name = metadata_blob_name(shard.rank)
    metadata_blob = by_name.get(name)
    if (
        metadata_blob is None
        or metadata_blob.spec.dtype != "U8"
        or metadata_blob.spec.nbytes < _LENGTH_BYTES
    ):
        raise CorruptError(f"the image has no byte tensor {name}")
    digests = by_name.get(digests_name(shard.rank)) if shared else None
    _check_shared(shard, shared, by_name, digests)
    tensors = tuple(
        tensor for tensor in placed if tensor is not metadata_blob and tensor is not digests
    )
    header_hash = blake3(header).hexdigest()
    return ImageLayout(shard, tensors, metadata_blob, header, nbytes, header_hash, shared, digests)


def _check_shared(
    shard: Shard,
    shared: Sequence[SharedTensors],
    by_name: Mapping[str, PlacedTensor],
    digests: PlacedTensor | None,
) -> None:
    n_digests = sum(len(each.stored) for each in shared)
    if shared and (digests is None or digests.spec.nbytes != n_digests * DIGEST_BYTES):
        raise CorruptError(f"the image has no {n_digests} digests of shared tensors")
    for each in shared:
        for name, owner in zip(each.names, each.owners, strict=True):
            if (name in by_name) != (owner == shard.rank):
                raise CorruptError(
                    f"{abbreviate(name)} is shared, and is not in the image of its owner alone"
                )


def _byte_spec(name: str, nbytes: int) -> TensorSpec:
    return TensorSpec(name, "U8", (nbytes,), nbytes, (0,), (nbytes,))


def _assign_offsets(order: Iterable[TensorSpec], begin: int) -> Iterable[PlacedTensor]:
    for spec in order:
        yield PlacedTensor(spec, begin, begin + spec.nbytes)
        begin += spec.nbytes


def _check_names(specs: Sequence[TensorSpec]) -> None:
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise CheckpointError(f"two tensors have the name {abbreviate(spec.name)}")
        names.add(spec.name)


def _check_spec(spec: TensorSpec, error: type[CheckpointError]) -> None:
    try:
        n_name = len(spec.name.encode())
    except UnicodeEncodeError as exc:
        raise error(f"the tensor name {abbreviate(spec.name)} is not Unicode text") from exc
    if n_name > NAME_BYTES_MAX:
        raise error(
            f"the tensor name {abbreviate(spec.name)} has {n_name} bytes, at most {NAME_BYTES_MAX}"
        )
    if why := _why_invalid(spec):
        raise error(f"{abbreviate(spec.name)}{why}")


def _why_invalid(spec: TensorSpec) -> str:
    """Return what follows the name in a message on *spec*; "" for a valid one."""
    if spec.dtype not in ITEMSIZE_BYTES:
        return f" has the dtype {abbreviate(spec.dtype)}, which images do not support"
    if not len(spec.shape) == len(spec.offsets) == len(spec.global_shape) <= N_DIMS_MAX:
        return ": shape, offsets and global shape differ in length, or are too long"
    for size, offset, full in zip(spec.shape, spec.offsets, spec.global_shape, strict=True):
        if not (0 <= size <= size + offset <= full <= DIM_MAX):
            return f": {size} items from {offset} on exceed a dimension of {full}"
    if spec.nbytes != prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype]:
        return f": {spec.nbytes} bytes are not {spec.dtype} of shape {spec.shape}"
    return ""


def _encode_header(
    shard: Shard,
    order: Sequence[TensorSpec],
    replicas_by_name: Mapping[str, tuple[int, ...]],
    shared: Sequence[SharedTensors],
) -> bytes:
    sharding = {spec.name: {"saved_offsets": spec.offsets} for spec in order}
    own_metadata = {
        "rank": shard.rank,
        "world": shard.world,
        "format": SHARED_FORMAT if shared else FORMAT,
        "shapes": {s.name: s.global_shape for s in order if s.global_shape != s.shape},
    }
    if shared:
        own_metadata[sharing.KEY] = sharing.to_json(shared)
    known = {name for each in shared for name in each.names}
    rest = {name: ranks for name, ranks in replicas_by_name.items() if name not in known}
    if rest:
        names = [spec.name for spec in order if not spec.name.startswith(METADATA_PREFIX)]
        own_metadata[replicated.KEY] = replicated.to_json(names, rest)
    entries: dict[str, Any] = {
        _METADATA: {
            "format": "pt",
            "DCP_VERSION": "1.0",
            _SHARDING: compact(sharding),
            "gpuops": compact(own_metadata),
        }
    }
    for placed in _assign_offsets(order, 0):
        entries[placed.spec.name] = {
            "dtype": placed.spec.dtype,
            "shape": placed.spec.shape,
            "data_offsets": (placed.begin, placed.end),
        }
    json_text = compact(entries)
    check_cost(json_text, CheckpointError)
    text = json_text.encode()
    if len(text) > HEADER_BYTES_MAX - ALIGN_BYTES:
        raise CheckpointError(
            f"a header of {len(text)} bytes for {len(order)} tensors: at most {HEADER_BYTES_MAX}"
        )
    padded = -(-(_LENGTH_BYTES + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def _read_metadata(
    metadata: object, names: Iterable[str]
) -> tuple[Shard, dict[str, Any], dict[str, Any], tuple[SharedTensors, ...]]:
    found = as_mapping(metadata, "the header's metadata")
    if not all(isinstance(value, str) for value in found.values()):
        raise CorruptError("the header's metadata has a value that is not text")
    own_metadata = as_mapping(parse_json(text_of(found, "gpuops")), "the header's gpuops")
    image_format = own_metadata.get("format")
    if image_format not in (FORMAT, SHARED_FORMAT):
        raise CorruptError(
            f"the image has the format {abbreviate(image_format)}, this gpuops "
            f"reads {FORMAT} and {SHARED_FORMAT}"
        )
    rank, world = own_metadata.get("rank"), own_metadata.get("world")
    if type(rank) is not int or type(world) is not int:
        raise CorruptError(f"the image is of rank {abbreviate(rank)} of {abbreviate(world)}")
    try:
        shard = Shard(rank, world)
        is_shared = image_format == SHARED_FORMAT
        shared = sharing.from_json(own_metadata.get(sharing.KEY), shard) if is_shared else ()
    except ValueError as exc:
        raise CorruptError(f"the image's header is wrong: {exc}") from exc
    shapes = as_mapping(own_metadata.get("shapes"), "the header's shapes")
    offsets = as_mapping(parse_json(text_of(found, _SHARDING)), f"the header's {_SHARDING}")
    if offsets.keys() != set(names) or not shapes.keys() <= offsets.keys():
        raise CorruptError(f"{_SHARDING} or the shapes list other tensors than the header has")
    return shard, offsets, shapes, shared


def _read_entry(
    name: str, entry: object, begin: int, offsets: Mapping[str, Any], shapes: Mapping[str, Any]
) -> PlacedTensor:
    if not isinstance(entry, dict) or not isinstance(offsets[name], dict):
        raise CorruptError(f"the entry of {abbreviate(name)}, or its offsets, is not an object")
    dtype = entry.get("dtype")
    shape = as_numbers(entry.get("shape"), "shape", name)
    span = as_numbers(entry.get("data_offsets"), "data offsets", name)
    saved_offsets = as_numbers(offsets[name].get("saved_offsets"), "offsets", name)
    global_shape = as_numbers(shapes[name], "global shape", name) if name in shapes else shape
    if not isinstance(dtype, str) or len(span) != 2:
        raise CorruptError(f"the entry of {abbreviate(name)} is incomplete")
    spec = TensorSpec(name, dtype, shape, span[1] - span[0], saved_offsets, global_shape)
    _check_spec(spec, CorruptError)
    itemsize = ITEMSIZE_BYTES[dtype]
    if span[0] % itemsize:
        raise CorruptError(f"{abbreviate(name)} is not aligned to its items of {itemsize} bytes")
    return PlacedTensor(spec, begin + span[0], begin + span[1])


def _check_contiguous(placed: Sequence[PlacedTensor], begin: int, nbytes: int) -> None:
    end = begin
    for tensor in placed:
        if tensor.begin != end:
            raise CorruptError(
                f"{abbreviate(tensor.spec.name)} begins at {tensor.begin}, the data before it end "
                f"at {end}"
            )
        end = tensor.end
    if end != nbytes:
        raise CorruptError(f"the image has {nbytes} bytes, its header describes {end}")
