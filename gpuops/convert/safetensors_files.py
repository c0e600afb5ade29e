"""A state as one safetensors file, or as a set of them with an index.

Read safetensors files: one, a set with an index, or the shards that DCP writes.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpuops.checkpoint.image import ITEMSIZE_BYTES
from gpuops.checkpoint.storage.inspection import StoredTensor
from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.import_source import FillTensor, ImportSource, TensorRegion, combine_fills
from gpuops.convert.state_reader import StateReader
from gpuops.convert.tensors import DTYPES

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
METADATA_KEY = "gpuops_extra"
METADATA_BYTES_MAX = 8 * 2**20  # the whole header is at most 100 MB, and loaders parse it
HEADER_BYTES_MAX = 100_000_000
_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class SafetensorsFilePlan:
    """One file: its header, and its tensors in the order of their data."""

    name: str
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_files(
    tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], max_shard_bytes: int | None
) -> tuple[SafetensorsFilePlan, ...]:
    """Return the files for *tensors*: one, or as many as *max_shard_bytes* of data each need.

    A tensor larger than that has a file of its own. *metadata* goes into the first file.

    Raises:
        CheckpointError: A header would exceed the limit of a safetensors file.
    """
    groups = list(_group_by_size(list(tensors.values()), max_shard_bytes))
    names = [SINGLE_FILE]
    if len(groups) > 1:
        names = [
            f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            for number in range(1, len(groups) + 1)
        ]
    return tuple(
        _plan(name, group, metadata if number == 0 else {})
        for number, (name, group) in enumerate(zip(names, groups, strict=True))
    )


def _group_by_size(
    tensors: Sequence[StoredTensor], max_shard_bytes: int | None
) -> Iterator[list[StoredTensor]]:
    group: list[StoredTensor] = []
    group_bytes = 0
    for tensor in tensors:
        if group and max_shard_bytes is not None and group_bytes + tensor.nbytes > max_shard_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(tensor)
        group_bytes += tensor.nbytes
    yield group


def _plan(
    name: str, tensors: Sequence[StoredTensor], metadata: Mapping[str, str]
) -> SafetensorsFilePlan:
    order = sorted(tensors, key=lambda tensor: (-ITEMSIZE_BYTES[tensor.dtype], tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for tensor in order:
        end = at + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (at, end),
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-len(text) // _ALIGN_BYTES) * _ALIGN_BYTES
    if padded > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{name} would have a header of {padded} bytes for {len(order)} tensors, more than "
            f"{HEADER_BYTES_MAX}: give a smaller --max-shard-size"
        )
    return SafetensorsFilePlan(
        name, padded.to_bytes(8, "little") + text.ljust(padded), tuple(order)
    )


def encode_index(files: Sequence[SafetensorsFilePlan]) -> bytes:
    """Return the content of ``model.safetensors.index.json`` for *files*."""
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for file in files for tensor in file.tensors)},
        "weight_map": {
            tensor.name: file.name
            for file in files
            for tensor in sorted(file.tensors, key=lambda tensor: tensor.name)
        },
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def write_file(
    plan: SafetensorsFilePlan, state: StateReader, folder: Path, advance: Callable[[int], object]
) -> None:
    """Write one file into *folder* and sync it; *advance* is called with the bytes of each tensor.

    Raises:
        CorruptError: A shard is not what was saved.
        CheckpointError: The file cannot be written.
    """
    path = folder / plan.name
    try:
        with path.open("xb+") as file:
            file.write(plan.header)
            file.flush()
            if plan.nbytes > len(plan.header):
                # Without it a write to the mapping on a full disk would raise SIGBUS.
                os.posix_fallocate(file.fileno(), 0, plan.nbytes)
                _write_tensors(
                    plan, state, memoryview(mmap.mmap(file.fileno(), plan.nbytes)), advance
                )
            os.fsync(file.fileno())
    except OSError as exc:
        raise CheckpointError(f"cannot write {path}: {exc.strerror or exc}") from exc


def _write_tensors(
    plan: SafetensorsFilePlan,
    state: StateReader,
    whole: memoryview,
    advance: Callable[[int], object],
) -> None:
    at = len(plan.header)
    for tensor in plan.tensors:
        state.fill(tensor, whole[at : at + tensor.nbytes])
        at += tensor.nbytes
        advance(tensor.nbytes)


INDEX_BYTES_MAX = 256 * 2**20
_SHARDING = "DCP_SHARDING_INFO"


def read_safetensors(path: Path) -> ImportSource:
    """Open the file *path*, or all files that the index of the directory *path* names.

    Without an index all ``*.safetensors`` of the directory belong together. Where they are parts of
    tensors (``DCP_SHARDING_INFO``), the parts are joined.

    Raises:
        CorruptError: A file is not a safetensors file; parts are missing, or disagree.
        CheckpointError: There is none, or a dtype is not supported.
    """
    source = ImportSource(is_flat=True)
    found: dict[str, tuple[str, list[TensorRegion]]] = {}
    for file in _files(path):
        _add_file(file, found, source)
    for name, (dtype, regions) in sorted(found.items()):
        shape = tuple(
            max(box.offsets[dim] + box.shape[dim] for box in regions)
            for dim in range(len(regions[0].shape))
        )
        fill = combine_fills(name, shape, regions)
        source.tree[name] = source.placeholder(shape, DTYPES[dtype], fill)
    if not source.tree:
        raise CheckpointError(f"{path} has no tensors")
    return source


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors")
    return files


def _indexed_files(index: Path) -> list[Path]:
    if index.stat().st_size > INDEX_BYTES_MAX:
        raise CorruptError(f"{index} has more than {INDEX_BYTES_MAX} bytes")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CorruptError(f"{index} is not an index: {exc!r:.200}") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CorruptError(f"{index} names a file outside of its directory: {name!r:.200}")
        if not (index.parent / name).is_file():
            raise CorruptError(f"{index} names {name}, which is not there")
    return sorted(index.parent / name for name in names)


def _add_file(
    file: Path, found: dict[str, tuple[str, list[TensorRegion]]], source: ImportSource
) -> None:
    try:
        with safe_open(file, framework="pt") as file_reader:
            metadata = file_reader.metadata() or {}
            sharding = _json(metadata.get(_SHARDING), file)
            if METADATA_KEY in metadata:
                source.gpuops_metadata = _json(metadata[METADATA_KEY], file)
            for name in file_reader.keys():  # noqa: SIM118 it is not a mapping
                part = file_reader.get_slice(name)
                _add_part(file, name, part.get_dtype(), tuple(part.get_shape()), sharding, found)
    except (SafetensorError, OSError) as exc:
        raise CorruptError(f"{file} is not a safetensors file: {str(exc)[:200]}") from exc


def _add_part(
    file: Path,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    sharding: Mapping[str, Any] | None,
    found: dict[str, tuple[str, list[TensorRegion]]],
) -> None:
    if dtype not in DTYPES:
        raise CheckpointError(f"{name!r:.200} in {file} has the unsupported dtype {dtype}")
    offsets = (0,) * len(shape)
    if sharding is not None:
        offsets = _offsets(sharding.get(name), len(shape), name, file)
    known, regions = found.setdefault(name, (dtype, []))
    if known != dtype or (regions and len(regions[0].shape) != len(shape)):
        raise CorruptError(f"{name!r:.200} is in several files, and differs")
    if sharding is None and regions:
        raise CorruptError(f"{name!r:.200} is in several files, without the positions of its parts")
    regions.append(TensorRegion(offsets, shape, _tensor_reader(file, name)))


def _offsets(entry: Any, n_dims: int, name: str, file: Path) -> tuple[int, ...]:  # noqa: ANN401
    saved = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if (
        not isinstance(saved, list)
        or len(saved) != n_dims
        or not all(type(each) is int and 0 <= each < 2**62 for each in saved)
    ):
        raise CorruptError(f"{file} has no position of its part of {name!r:.200}")
    return tuple(saved)


def _tensor_reader(file: Path, name: str) -> FillTensor:
    def fill(target: torch.Tensor) -> None:
        with safe_open(file, framework="pt") as opened:
            target.copy_(opened.get_tensor(name))

    return fill


def _json(text: str | None, file: Path) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise CorruptError(f"the metadata of {file} cannot be read: {str(exc)[:200]}") from exc
    if not isinstance(value, dict):
        raise CorruptError(f"the metadata of {file} is not an object")
    return value
