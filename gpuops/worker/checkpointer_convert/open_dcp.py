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

from gpuops.checkpoint.states import CheckpointError, CorruptError
from gpuops.worker.checkpointer_convert.dcp_index import (
    DcpIndex,
    DcpTensor,
    Piece,
    Place,
    read_index,
)
from gpuops.worker.checkpointer_convert.export import OWN_KEY
from gpuops.worker.checkpointer_convert.incoming import Box, Fill, Incoming, fill_of
from gpuops.worker.checkpointer_convert.unfold import lists_of, put, safe_value


def open_dcp(directory: Path, *, trust: bool) -> Incoming:
    """Return what is in the DCP *directory*.

    Raises:
        RefusedPickleError: Its metadata names classes that DCP does not write; not with *trust*.
        CorruptError: It is not what DCP writes, or not all of it is there.
        CheckpointError: A value is of a class that torch does not load without running code, and
            *trust* is false; or something cannot be read.
    """
    index = _trusted_index(directory) if trust else read_index(directory)
    made = Incoming()
    tree: dict[Any, Any] = {}
    for name, tensor in index.tensors.items():
        dtype = getattr(torch, tensor.dtype)
        boxes = [
            Box(piece.offsets, piece.shape, _reader(directory, name, piece, dtype))
            for piece in tensor.pieces
        ]
        _check_sizes(directory, name, tensor, dtype)
        fill = fill_of(name, tensor.shape, boxes)
        put(tree, index.paths.get(name, (name,)), made.stand_in(tensor.shape, dtype, fill))
    for name, place in index.values.items():
        value = safe_value(_bytes_at(directory, place, name), name, trust=trust)
        put(tree, index.paths.get(name, (name,)), value)
    made.tree = {key: lists_of(value) for key, value in tree.items()}
    own = made.tree.pop(OWN_KEY, None)
    made.own = own if isinstance(own, Mapping) else None
    return made


def _check_sizes(directory: Path, name: str, tensor: DcpTensor, dtype: torch.dtype) -> None:
    """Refuse what cannot be, before room is made for it."""
    for piece in tensor.pieces:
        size = _size(directory / piece.place.file, name)
        if piece.place.offset + piece.place.nbytes > size:
            raise CorruptError(
                f"{name!r:.200} ends at byte {piece.place.offset + piece.place.nbytes} of "
                f"{piece.place.file}, which has {size}"
            )
        if prod(piece.shape) * dtype.itemsize > piece.place.nbytes:
            raise CorruptError(
                f"{piece.place.nbytes} bytes of {piece.place.file} cannot be a {tensor.dtype} of "
                f"shape {list(piece.shape)} ({name!r:.200})"
            )


def _size(path: Path, name: str) -> int:
    try:
        return path.stat().st_size
    except OSError as exc:
        raise CorruptError(f"{name!r:.200} is in {path}: {exc.strerror}") from exc


def _bytes_at(directory: Path, place: Place, name: str) -> bytes:
    path = directory / place.file
    if place.offset + place.nbytes > _size(path, name):
        raise CorruptError(f"{path} ends before {name!r:.200} does")
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), place.nbytes, place.offset)
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}: {exc.strerror}") from exc


def _reader(directory: Path, name: str, piece: Piece, dtype: torch.dtype) -> Fill:
    def fill(target: torch.Tensor) -> None:
        data = _bytes_at(directory, piece.place, name)
        try:
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as exc:  # boundary: whatever hostile bytes make torch raise
            raise CorruptError(f"{name!r:.200} cannot be read: {exc!r:.200}") from exc
        if not isinstance(loaded, torch.Tensor) or loaded.is_sparse or loaded.dtype is not dtype:
            raise CorruptError(f"{name!r:.200} is not the {dtype} that the metadata says")
        if tuple(loaded.shape) != piece.shape:
            raise CorruptError(
                f"{name!r:.200} has the shape {list(loaded.shape)}, not {list(piece.shape)}"
            )
        target.copy_(loaded)

    return fill


def _trusted_index(directory: Path) -> DcpIndex:
    """Return the index as torch itself unpickles it."""
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except Exception as exc:  # boundary: whatever the pickle makes torch raise
        raise CheckpointError(f"cannot read the metadata of {directory}: {exc!r:.300}") from exc
    storage: Mapping[MetadataIndex, Any] = metadata.storage_data
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): Place(
            info.relative_path, info.offset, info.length
        )
        for index, info in storage.items()
    }
    tensors, values = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            values[name] = places[name, None]
            continue
        pieces = tuple(
            Piece(tuple(c.offsets), tuple(c.sizes), places[name, tuple(c.offsets)])
            for c in entry.chunks
        )
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = DcpTensor(dtype, tuple(entry.size), pieces)
    return DcpIndex(tensors, values, metadata.planner_data or {})
