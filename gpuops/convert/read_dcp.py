"""Read the files of ``torch.distributed.checkpoint.save`` without running code in them."""

# ruff: noqa: ANN401 saved values have any type

import io
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.export import EXPORT_KEY
from gpuops.convert.import_source import FillTensor, ImportSource, TensorRegion, combine_fills
from gpuops.convert.nested import dicts_to_lists, load_value, set_nested
from gpuops.convert.pickle_reader import PickleCall, PickleDict, PickleGlobal, read_pickle

METADATA = ".metadata"
METADATA_BYTES_MAX = 4 * 2**30
_DIMS_MAX = 64
_PATH_MAX = 100
_SIZE_MAX = 2**62

_DCP = "torch.distributed.checkpoint"
_METADATA = f"{_DCP}.metadata"
_ALLOWED_NAMES = frozenset(
    [
        *(
            f"{_METADATA}.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
                "MetadataIndex",
                "StorageMeta",
            )
        ),
        f"{_DCP}.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        *(f"pathlib.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
        *(f"pathlib._local.{name}" for name in ("PosixPath", "PurePosixPath", "WindowsPath")),
    ]
)
_DTYPES = frozenset(
    f"torch.{name}"
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
        "float4_e2m1fn_x2",
    )
)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes in a file of the directory."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """One saved piece of a tensor: its position in the tensor, and where it is stored."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file_range: FileRange


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor of the directory. ``dtype`` is torch's name, ``"float32"``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpIndex:
    """The content of a DCP directory. ``paths`` has each name's keys in the nested state dict."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, FileRange]
    paths: Mapping[str, tuple[str | int, ...]]


def read_index(directory: Path) -> DcpIndex:
    """Read the index of the DCP *directory*.

    Raises:
        RefusedPickleError: Its ``.metadata`` names classes that DCP does not write.
        CorruptError: It is not what DCP writes.
        CheckpointError: It is missing, too large, or written without rank coordination.
    """
    path = directory / METADATA
    try:
        if path.stat().st_size > METADATA_BYTES_MAX:
            raise CheckpointError(f"{path} has more than {METADATA_BYTES_MAX} bytes")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(_missing_message(directory)) from None
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        return parse_index(data)
    except CheckpointError as exc:
        raise type(exc)(f"cannot read {path} as DCP's metadata: {exc}") from exc


def _missing_message(directory: Path) -> str:
    if any(directory.glob("__*.metadata")):
        return (
            f"{directory} was saved without rank coordination (use_collectives=False), which "
            "has no global layout: save it again with dcp.save"
        )
    return f"{directory} is not a DCP directory: it has no {METADATA}"


def parse_index(data: bytes) -> DcpIndex:
    """Return the index in the pickle *data*; see `read_index`."""
    metadata = read_pickle(data, _ALLOWED_NAMES, is_allowed=_DTYPES.__contains__)
    fields = _fields(metadata, f"{_METADATA}.Metadata")
    ranges = _file_ranges(_as_dict(fields.get("storage_data"), "storage_data"))
    tensors, values = {}, {}
    for name, entry in _as_dict(fields.get("state_dict_metadata"), "state_dict_metadata").items:
        if not isinstance(name, str):
            raise CorruptError("the name of an entry is not text")
        if isinstance(entry, PickleCall) and entry.kind == f"{_METADATA}.TensorStorageMetadata":
            tensors[name] = _tensor(name, entry, ranges)
        else:
            _fields(entry, f"{_METADATA}.BytesStorageMetadata")
            values[name] = _lookup_range(ranges, name, None)
    return DcpIndex(tensors, values, _paths(fields.get("planner_data")))


def _tensor(
    name: str, entry: PickleCall, ranges: Mapping[tuple[str, tuple[int, ...] | None], FileRange]
) -> DcpTensor:
    fields = _fields(entry, entry.kind)
    shape = _size(fields.get("size"), name)
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, PickleCall) else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], PickleGlobal):
        raise CorruptError(f"the tensor {name!r} has no dtype")
    dtype = state[0].name
    if dtype not in _DTYPES:
        raise CorruptError(f"the tensor {name!r} has the dtype {dtype}")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise CorruptError(f"the tensor {name!r} has no list of chunks")
    dcp_chunks = []
    for chunk in chunks:
        part = _fields(chunk, f"{_METADATA}.ChunkStorageMetadata")
        offsets, sizes = _size(part.get("offsets"), name), _size(part.get("sizes"), name)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(f"a chunk of {name!r} has other dimensions than the tensor")
        dcp_chunks.append(DcpChunk(offsets, sizes, _lookup_range(ranges, name, offsets)))
    return DcpTensor(dtype.removeprefix("torch."), shape, tuple(dcp_chunks))


def _lookup_range(
    ranges: Mapping[tuple[str, tuple[int, ...] | None], FileRange],
    name: str,
    offsets: tuple[int, ...] | None,
) -> FileRange:
    try:
        return ranges[(name, offsets)]
    except KeyError:
        raise CorruptError(f"no file is named for {name!r} at {offsets}") from None


def _file_ranges(storage: PickleDict) -> dict[tuple[str, tuple[int, ...] | None], FileRange]:
    found = {}
    for index, info in storage.items:
        key = _fields(index, f"{_METADATA}.MetadataIndex")
        name, offset = key.get("fqn"), key.get("offset")
        if not isinstance(name, str):
            raise CorruptError("an entry of storage_data has no name")
        where = _fields(info, f"{_DCP}.filesystem._StorageInfo")
        if where.get("transform_descriptors"):
            raise CheckpointError(
                f"{name!r} was written through an extension "
                f"({_describe(where['transform_descriptors'])}); save it again without"
            )
        found[(name, None if offset is None else _size(offset, name))] = _file_range(name, where)
    return found


def _file_range(name: str, where: Mapping[str, Any]) -> FileRange:
    file, offset, length = (where.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or not _is_count(offset) or not _is_count(length):
        raise CorruptError(f"the location of {name!r} is not a file, an offset and a length")
    parts = PurePosixPath(file).parts
    if not parts or PurePosixPath(file).is_absolute() or ".." in parts or "\0" in file:
        raise CorruptError(f"{name!r} would be outside of the directory, in {file[:200]!r}")
    return FileRange(file, offset, length)


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(planner_data, PickleDict):
        return {}
    return {
        name: path
        for name, path in planner_data.by_name().items()
        if isinstance(path, tuple)
        and 0 < len(path) <= _PATH_MAX
        and all(type(key) in (str, int) for key in path)
    }


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, PickleCall) or value.kind != kind:
        raise CorruptError(f"expected a {kind}")
    return value.state.by_name() if isinstance(value.state, PickleDict) else {}


def _as_dict(value: Any, what: str) -> PickleDict:
    if isinstance(value, PickleCall) and value.kind == "collections.OrderedDict":
        value = value.state or PickleDict()
    if not isinstance(value, PickleDict):
        raise CorruptError(f"{what} is not a dict")
    return value


def _size(value: Any, name: str) -> tuple[int, ...]:
    sizes = value.args[0] if isinstance(value, PickleCall) and value.kind == "torch.Size" else None
    if (
        isinstance(sizes, tuple | list)
        and len(sizes) <= _DIMS_MAX
        and all(map(_is_count, sizes))
        and math.prod(sizes) <= _SIZE_MAX
    ):
        return tuple(sizes)
    raise CorruptError(f"{name!r} has an invalid size")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _SIZE_MAX


def _describe(value: Any) -> str:
    texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
    return ", ".join(texts)[:200] or "unknown"


def read_dcp(directory: Path, *, trust: bool) -> ImportSource:
    """Open the DCP *directory*.

    Raises:
        RefusedPickleError: Its metadata names classes that DCP does not write; not with *trust*.
        CorruptError: It is not what DCP writes, or incomplete.
        CheckpointError: A value is of a class that torch does not load without running code, and
            *trust* is false; or something cannot be read.
    """
    index = _unpickled_index(directory) if trust else read_index(directory)
    source = ImportSource()
    tree: dict[Any, Any] = {}
    for name, tensor in index.tensors.items():
        dtype = getattr(torch, tensor.dtype)
        regions = [
            TensorRegion(piece.offsets, piece.shape, _chunk_reader(directory, name, piece, dtype))
            for piece in tensor.chunks
        ]
        _check_sizes(directory, name, tensor, dtype)
        fill = combine_fills(name, tensor.shape, regions)
        set_nested(
            tree, index.paths.get(name, (name,)), source.placeholder(tensor.shape, dtype, fill)
        )
    for name, file_range in index.values.items():
        value = load_value(_read_range(directory, file_range, name), name, trust=trust)
        set_nested(tree, index.paths.get(name, (name,)), value)
    source.tree = {key: dicts_to_lists(value) for key, value in tree.items()}
    gpuops_metadata = source.tree.pop(EXPORT_KEY, None)
    source.gpuops_metadata = gpuops_metadata if isinstance(gpuops_metadata, Mapping) else None
    return source


def _check_sizes(directory: Path, name: str, tensor: DcpTensor, dtype: torch.dtype) -> None:
    """Refuse impossible sizes before memory is allocated for them."""
    for piece in tensor.chunks:
        size = _file_size(directory / piece.file_range.file, name)
        if piece.file_range.offset + piece.file_range.nbytes > size:
            raise CorruptError(
                f"{name!r:.200} ends at byte {piece.file_range.offset + piece.file_range.nbytes} "
                f"of {piece.file_range.file}, which has {size}"
            )
        if prod(piece.shape) * dtype.itemsize > piece.file_range.nbytes:
            raise CorruptError(
                f"{piece.file_range.nbytes} bytes of {piece.file_range.file} cannot be a "
                f"{tensor.dtype} of shape {list(piece.shape)} ({name!r:.200})"
            )


def _file_size(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise CorruptError(f"{name!r:.200} is in {path}: {exc.strerror}") from exc


def _read_range(directory: Path, file_range: FileRange, name: str) -> bytes:
    path = directory / file_range.file
    if file_range.offset + file_range.nbytes > _file_size(path, name):
        raise CorruptError(f"{path} ends before {name!r:.200} does")
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), file_range.nbytes, file_range.offset)
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}: {exc.strerror}") from exc


def _chunk_reader(directory: Path, name: str, chunk: DcpChunk, dtype: torch.dtype) -> FillTensor:
    def fill(target: torch.Tensor) -> None:
        data = _read_range(directory, chunk.file_range, name)
        try:
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as exc:  # boundary: hostile bytes make torch raise anything
            raise CorruptError(f"{name!r:.200} cannot be read: {exc!r:.200}") from exc
        if not isinstance(loaded, torch.Tensor) or loaded.is_sparse or loaded.dtype is not dtype:
            raise CorruptError(f"{name!r:.200} is not the {dtype} that the metadata says")
        if tuple(loaded.shape) != chunk.shape:
            raise CorruptError(
                f"{name!r:.200} has the shape {list(loaded.shape)}, not {list(chunk.shape)}"
            )
        target.copy_(loaded)

    return fill


def _unpickled_index(directory: Path) -> DcpIndex:
    """Return the index as torch itself unpickles it."""
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except Exception as exc:  # boundary: the pickle makes torch raise anything
        raise CheckpointError(f"cannot read the metadata of {directory}: {exc!r:.300}") from exc
    storage: Mapping[MetadataIndex, Any] = metadata.storage_data
    ranges = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): FileRange(
            info.relative_path, info.offset, info.length
        )
        for index, info in storage.items()
    }
    tensors, values = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            values[name] = ranges[name, None]
            continue
        chunks = tuple(
            DcpChunk(tuple(c.offsets), tuple(c.sizes), ranges[name, tuple(c.offsets)])
            for c in entry.chunks
        )
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = DcpTensor(dtype, tuple(entry.size), chunks)
    return DcpIndex(tensors, values, metadata.planner_data or {})
