"""Read what ``torch.distributed.checkpoint.save`` wrote, without running anything in it."""

import io
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.dcp_metadata import DcpChunk, DcpIndex, DcpTensor, FileRange, read_index
from gpuops.convert.export import EXPORT_KEY
from gpuops.convert.import_source import FillTensor, ImportSource, TensorRegion, combine_fills
from gpuops.convert.to_nested import dicts_to_lists, load_value, set_nested


def read_dcp(directory: Path, *, trust: bool) -> ImportSource:
    """Return what is in the DCP *directory*.

    Raises:
        RefusedPickleError: Its metadata names classes that DCP does not write; not with *trust*.
        CorruptError: It is not what DCP writes, or not all of it is there.
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
    """Refuse what cannot be, before room is made for it."""
    for piece in tensor.chunks:
        size = _size(directory / piece.file_range.file, name)
        if piece.file_range.offset + piece.file_range.nbytes > size:
            raise CorruptError(
                f"{name!r:.200} ends at byte {piece.file_range.offset + piece.file_range.nbytes} "
                "of "
                f"{piece.file_range.file}, which has {size}"
            )
        if prod(piece.shape) * dtype.itemsize > piece.file_range.nbytes:
            raise CorruptError(
                f"{piece.file_range.nbytes} bytes of {piece.file_range.file} cannot be a "
                f"{tensor.dtype} of "
                f"shape {list(piece.shape)} ({name!r:.200})"
            )


def _size(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise CorruptError(f"{name!r:.200} is in {path}: {exc.strerror}") from exc


def _read_range(directory: Path, file_range: FileRange, name: str) -> bytes:
    path = directory / file_range.file
    if file_range.offset + file_range.nbytes > _size(path, name):
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
        except Exception as exc:  # boundary: whatever hostile bytes make torch raise
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
    except Exception as exc:  # boundary: whatever the pickle makes torch raise
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
