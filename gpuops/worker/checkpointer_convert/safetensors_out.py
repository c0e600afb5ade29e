"""A state as one safetensors file, or as a set of them with an index."""

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.checkpoint.image import ITEMSIZE_BYTES
from gpuops.checkpoint.inventory_view import WholeTensor
from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer_convert.assemble import StateReader

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXTRA_KEY = "gpuops_extra"
EXTRA_BYTES_MAX = 8 * 2**20  # the whole header is at most 100 MB, and loaders parse it
HEADER_BYTES_MAX = 100_000_000
_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its header, and its tensors in the order of their data."""

    name: str
    header: bytes
    tensors: tuple[WholeTensor, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_files(
    tensors: Mapping[str, WholeTensor],
    metadata: Mapping[str, str],
    max_shard_bytes: int | None,
) -> tuple[FilePlan, ...]:
    """Return the files for *tensors*: one, or as many as *max_shard_bytes* of data each need.

    A tensor larger than that has a file of its own. *metadata* goes into the first file.

    Raises:
        CheckpointError: A header would be longer than a safetensors file may have.
    """
    groups = list(_groups(list(tensors.values()), max_shard_bytes))
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


def _groups(
    tensors: Sequence[WholeTensor], max_shard_bytes: int | None
) -> Iterator[list[WholeTensor]]:
    group: list[WholeTensor] = []
    held = 0
    for tensor in tensors:
        if group and max_shard_bytes is not None and held + tensor.nbytes > max_shard_bytes:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += tensor.nbytes
    yield group


def _plan(name: str, tensors: Sequence[WholeTensor], metadata: Mapping[str, str]) -> FilePlan:
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
    return FilePlan(name, padded.to_bytes(8, "little") + text.ljust(padded), tuple(order))


def index_of(files: Sequence[FilePlan]) -> bytes:
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
    plan: FilePlan, state: StateReader, folder: Path, advance: Callable[[int], object]
) -> None:
    """Write one file into *folder* and sync it; *advance* is told the bytes of each tensor.

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
                # Without it a full disk would end us with SIGBUS while we write to the mapping.
                os.posix_fallocate(file.fileno(), 0, plan.nbytes)
                _fill(plan, state, memoryview(mmap.mmap(file.fileno(), plan.nbytes)), advance)
            os.fsync(file.fileno())
    except OSError as exc:
        raise CheckpointError(f"cannot write {path}: {exc.strerror or exc}") from exc


def _fill(
    plan: FilePlan, state: StateReader, whole: memoryview, advance: Callable[[int], object]
) -> None:
    at = len(plan.header)
    for tensor in plan.tensors:
        state.fill(tensor, whole[at : at + tensor.nbytes])
        at += tensor.nbytes
        advance(tensor.nbytes)
