"""One rank's shard of a state as one image: a byte-exact safetensors file.

An image is the length of its header (8 bytes, little endian), the header (JSON, padded with spaces
so that the data begin at a multiple of 4096) and the tensors, sorted by item size (the widest
first), then by name: each is aligned, and there are no holes, which the format forbids. The header
also has what torch's own reader needs to load the images of one world into another
(``DCP_SHARDING_INFO``). Everything that is not a tensor is in the metadata blob: one more tensor,
of bytes, of fixed capacity.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from blake3 import blake3

from gpuops.checkpoint.agreement import replicated
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError, CorruptError, Shard

METADATA_PREFIX = "__gpuops_extra__/"
FORMAT = 1
ALIGN_BYTES = 4096
HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library
NAME_BYTES_MAX = 4096
N_DIMS_MAX = 64  # NumPy's limit, and more than a model's tensors have
DIM_MAX = 2**63 - 1
# Bounds on what json makes of a header: at most a few hundred bytes for each of these characters.
N_BRACKETS_MAX = 2_500_000
N_COMMAS_MAX = 8_000_000

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

    ``tensors`` are in the order of their data, without the metadata blob. ``header`` is everything
    before the data: the length, the JSON and the padding. ``header_hash`` (BLAKE3 of the header, 64
    hexadecimal digits) identifies the layout.
    """

    shard: Shard
    tensors: tuple[PlacedTensor, ...]
    metadata_blob: PlacedTensor
    header: bytes
    nbytes: int
    header_hash: str

    @property
    def metadata_capacity_bytes(self) -> int:
        """How many bytes `write_metadata_blob` accepts."""
        return self.metadata_blob.spec.nbytes - _LENGTH_BYTES


def metadata_blob_name(rank: int) -> str:
    """Return the name of the tensor that holds the metadata blob."""
    return f"{METADATA_PREFIX}rank{rank:05d}"


def plan_image(
    shard: Shard,
    specs: Sequence[TensorSpec],
    metadata_capacity_bytes: int,
    replicas_by_name: Mapping[str, tuple[int, ...]] | None = None,
) -> ImageLayout:
    """Return the layout of an image of *specs* and a metadata blob of that capacity.

    *replicas_by_name*: the ranks on which a tensor must be bitwise equal, by its name.

    Raises:
        CheckpointError: Two tensors have one name, a name, dtype, shape or size is invalid, or a
            limit of the image or its header is exceeded; the message names the tensor.
    """
    if not 0 <= metadata_capacity_bytes <= IMAGE_BYTES_MAX:
        raise CheckpointError(f"a metadata blob cannot have {metadata_capacity_bytes} bytes")
    for spec in specs:
        if spec.name.startswith(METADATA_PREFIX) or spec.name == _METADATA:
            raise CheckpointError(f"the tensor name {_abbreviate(spec.name)} is reserved")
        _check_spec(spec, CheckpointError)
    _check_names(specs)
    n = metadata_capacity_bytes + _LENGTH_BYTES
    metadata_blob = TensorSpec(metadata_blob_name(shard.rank), "U8", (n,), n, (0,), (n,))
    order = sorted(
        [*specs, metadata_blob], key=lambda spec: (-ITEMSIZE_BYTES[spec.dtype], spec.name)
    )
    header = _encode_header(shard, order, replicas_by_name or {})
    placed = tuple(_assign_offsets(order, len(header)))
    nbytes = placed[-1].end
    if nbytes > IMAGE_BYTES_MAX:
        raise CheckpointError(f"{nbytes} bytes of tensors; an image has at most {IMAGE_BYTES_MAX}")
    return _make_layout(shard, placed, header, nbytes)


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
    entries = _parse(header[_LENGTH_BYTES:])
    metadata = entries.pop(_METADATA, None)
    shard, offsets, shapes = _read_metadata(metadata, entries.keys())
    placed = [_read_entry(name, entry, begin, offsets, shapes) for name, entry in entries.items()]
    placed.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_contiguous(placed, begin, total_bytes)
    return _make_layout(shard, tuple(placed), header, total_bytes)


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
    data_begin = begin + _LENGTH_BYTES
    view[begin:data_begin] = len(data).to_bytes(_LENGTH_BYTES, "little")
    view[data_begin : data_begin + len(data)] = data
    view[data_begin + len(data) : end] = bytes(capacity_bytes - len(data))


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
    shard: Shard, placed: tuple[PlacedTensor, ...], header: bytes, nbytes: int
) -> ImageLayout:
    name = metadata_blob_name(shard.rank)
    metadata_blob = next((tensor for tensor in placed if tensor.spec.name == name), None)
    if (
        metadata_blob is None
        or metadata_blob.spec.dtype != "U8"
        or metadata_blob.spec.nbytes < _LENGTH_BYTES
    ):
        raise CorruptError(f"the image has no byte tensor {name}")
    tensors = tuple(tensor for tensor in placed if tensor is not metadata_blob)
    return ImageLayout(shard, tensors, metadata_blob, header, nbytes, blake3(header).hexdigest())


def _assign_offsets(order: Iterable[TensorSpec], begin: int) -> Iterable[PlacedTensor]:
    for spec in order:
        yield PlacedTensor(spec, begin, begin + spec.nbytes)
        begin += spec.nbytes


def _check_names(specs: Sequence[TensorSpec]) -> None:
    names: set[str] = set()
    for spec in specs:
        if spec.name in names:
            raise CheckpointError(f"two tensors have the name {_abbreviate(spec.name)}")
        names.add(spec.name)


def _check_spec(spec: TensorSpec, error: type[CheckpointError]) -> None:
    name = _abbreviate(spec.name)
    try:
        n_name = len(spec.name.encode())
    except UnicodeEncodeError as exc:
        raise error(f"the tensor name {name} is not Unicode text") from exc
    if n_name > NAME_BYTES_MAX:
        raise error(f"the tensor name {name} has {n_name} bytes, at most {NAME_BYTES_MAX}")
    if spec.dtype not in ITEMSIZE_BYTES:
        raise error(f"{name} has the dtype {_abbreviate(spec.dtype)}, which images do not support")
    if not len(spec.shape) == len(spec.offsets) == len(spec.global_shape) <= N_DIMS_MAX:
        raise error(f"{name}: shape, offsets and global shape differ in length, or are too long")
    for size, offset, full in zip(spec.shape, spec.offsets, spec.global_shape, strict=True):
        if not (0 <= size <= size + offset <= full <= DIM_MAX):
            raise error(f"{name}: {size} items from {offset} on exceed a dimension of {full}")
    if spec.nbytes != prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype]:
        raise error(f"{name}: {spec.nbytes} bytes are not {spec.dtype} of shape {spec.shape}")


def _encode_header(
    shard: Shard, order: Sequence[TensorSpec], replicas_by_name: Mapping[str, tuple[int, ...]]
) -> bytes:
    sharding = {spec.name: {"saved_offsets": spec.offsets} for spec in order}
    own_metadata = {
        "rank": shard.rank,
        "world": shard.world,
        "format": FORMAT,
        "shapes": {s.name: s.global_shape for s in order if s.global_shape != s.shape},
    }
    if replicas_by_name:
        names = [spec.name for spec in order if not spec.name.startswith(METADATA_PREFIX)]
        own_metadata[replicated.KEY] = replicated.to_json(names, replicas_by_name)
    entries: dict[str, Any] = {
        _METADATA: {
            "format": "pt",
            "DCP_VERSION": "1.0",
            _SHARDING: _compact(sharding),
            "gpuops": _compact(own_metadata),
        }
    }
    begin = 0
    for spec in order:
        end = begin + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (begin, end),
        }
        begin = end
    json_text = _compact(entries)
    _check_header(json_text, CheckpointError)
    text = json_text.encode()
    if len(text) > HEADER_BYTES_MAX - ALIGN_BYTES:
        raise CheckpointError(
            f"a header of {len(text)} bytes for {len(order)} tensors: at most {HEADER_BYTES_MAX}"
        )
    padded = -(-(_LENGTH_BYTES + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _check_header(text: str, error: type[CheckpointError]) -> None:
    """Bound what parsing *text* can cost, before it is parsed; `plan_image` applies it, too."""
    n_brackets = text.count("{") + text.count("[")
    n_commas = text.count(",")
    if n_brackets > N_BRACKETS_MAX or n_commas > N_COMMAS_MAX:
        raise error(f"the header has {n_brackets} brackets and {n_commas} commas: too many")


def _parse(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CorruptError("the header does not begin with a brace")
    try:
        return _mapping(_json(text.rstrip(b" ").decode()), "the header")
    except UnicodeDecodeError as exc:
        raise CorruptError(f"the header is not UTF-8: {exc.reason} at {exc.start}") from exc


def _json(text: str) -> object:
    _check_header(text, CorruptError)
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except RecursionError as exc:
        raise CorruptError("the header is nested too deeply") from exc
    except ValueError as exc:
        raise CorruptError(f"the header cannot be read: {str(exc)[:200]}") from exc


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a valid number")


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not an object")
    return value


def _text(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise CorruptError(f"the header's {key} is not text")
    return value


def _numbers(value: object, what: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > N_DIMS_MAX
        or any(type(item) is not int or not 0 <= item <= DIM_MAX for item in value)
    ):
        raise CorruptError(f"{what} is not a list of whole numbers")
    return tuple(value)


def _read_metadata(
    metadata: object, names: Iterable[str]
) -> tuple[Shard, dict[str, Any], dict[str, Any]]:
    found = _mapping(metadata, "the header's metadata")
    if not all(isinstance(value, str) for value in found.values()):
        raise CorruptError("the header's metadata has a value that is not text")
    own_metadata = _mapping(_json(_text(found, "gpuops")), "the header's gpuops")
    if own_metadata.get("format") != FORMAT:
        raise CorruptError(
            f"the image has the format {_abbreviate(own_metadata.get('format'))}, this gpuops "
            f"reads {FORMAT}"
        )
    rank, world = own_metadata.get("rank"), own_metadata.get("world")
    if type(rank) is not int or type(world) is not int:
        raise CorruptError(f"the image is of rank {_abbreviate(rank)} of {_abbreviate(world)}")
    try:
        shard = Shard(rank, world)
    except ValueError as exc:
        raise CorruptError(f"the image's header is wrong: {exc}") from exc
    shapes = _mapping(own_metadata.get("shapes"), "the header's shapes")
    offsets = _mapping(_json(_text(found, _SHARDING)), f"the header's {_SHARDING}")
    if offsets.keys() != set(names) or not shapes.keys() <= offsets.keys():
        raise CorruptError(f"{_SHARDING} or the shapes list other tensors than the header has")
    return shard, offsets, shapes


def _read_entry(
    name: str, entry: object, begin: int, offsets: Mapping[str, Any], shapes: Mapping[str, Any]
) -> PlacedTensor:
    short = _abbreviate(name)
    found = _mapping(entry, f"the entry of {short}")
    dtype = found.get("dtype")
    shape = _numbers(found.get("shape"), f"the shape of {short}")
    span = _numbers(found.get("data_offsets"), f"the data offsets of {short}")
    part = _mapping(offsets[name], f"{_SHARDING} of {short}")
    saved_offsets = _numbers(part.get("saved_offsets"), f"the offsets of {short}")
    global_shape = (
        _numbers(shapes[name], f"the global shape of {short}") if name in shapes else shape
    )
    if not isinstance(dtype, str) or len(span) != 2:
        raise CorruptError(f"the entry of {short} is incomplete")
    spec = TensorSpec(name, dtype, shape, span[1] - span[0], saved_offsets, global_shape)
    _check_spec(spec, CorruptError)
    itemsize = ITEMSIZE_BYTES[dtype]
    if span[0] % itemsize:
        raise CorruptError(f"{short} is not aligned to its items of {itemsize} bytes")
    return PlacedTensor(spec, begin + span[0], begin + span[1])


def _check_contiguous(placed: Sequence[PlacedTensor], begin: int, nbytes: int) -> None:
    end = begin
    for tensor in placed:
        if tensor.begin != end:
            raise CorruptError(
                f"{_abbreviate(tensor.spec.name)} begins at {tensor.begin}, the data before it end "
                f"at {end}"
            )
        end = tensor.end
    if end != nbytes:
        raise CorruptError(f"the image has {nbytes} bytes, its header describes {end}")


def _abbreviate(value: object) -> str:
    """Return *value*, which may be anything, shortened for a message."""
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:80] + "…")
    return repr(value) if type(value) is int and abs(value) <= DIM_MAX else type(value).__name__
