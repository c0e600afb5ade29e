"""Read safetensors files: one, a set with an index, or the shards that DCP writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpuops.checkpoint.states import CheckpointError, CorruptError
from gpuops.worker.checkpointer.tensors import DTYPES
from gpuops.worker.checkpointer_convert.incoming import Box, Fill, Incoming, fill_of
from gpuops.worker.checkpointer_convert.safetensors_out import EXTRA_KEY, INDEX_FILE

INDEX_BYTES_MAX = 256 * 2**20
_SHARDING = "DCP_SHARDING_INFO"


def open_safetensors(path: Path) -> Incoming:
    """Return what is in the file *path*, or in the directory: all files that its index names.

    Without an index all ``*.safetensors`` of the directory belong together. Where they tell of
    parts (``DCP_SHARDING_INFO``), the parts of a tensor are put together.

    Raises:
        CorruptError: A file is no safetensors file; parts are missing, or disagree.
        CheckpointError: There is none, or a dtype that no state can hold.
    """
    made = Incoming(flat=True)
    found: dict[str, tuple[str, list[Box]]] = {}
    for file in _files(path):
        _add_file(file, found, made)
    for name, (dtype, boxes) in sorted(found.items()):
        shape = tuple(
            max(box.offsets[dim] + box.shape[dim] for box in boxes)
            for dim in range(len(boxes[0].shape))
        )
        fill = fill_of(name, shape, boxes)
        made.tree[name] = made.stand_in(shape, DTYPES[dtype], fill)
    if not made.tree:
        raise CheckpointError(f"{path} has no tensors")
    return made


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX_FILE
    if index.is_file():
        return _indexed(index)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors")
    return files


def _indexed(index: Path) -> list[Path]:
    if index.stat().st_size > INDEX_BYTES_MAX:
        raise CorruptError(f"{index} has more than {INDEX_BYTES_MAX} bytes")
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CorruptError(f"{index} is no index: {exc!r:.200}") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CorruptError(f"{index} names a file outside of its directory: {name!r:.200}")
        if not (index.parent / name).is_file():
            raise CorruptError(f"{index} names {name}, which is not there")
    return sorted(index.parent / name for name in names)


def _add_file(file: Path, found: dict[str, tuple[str, list[Box]]], made: Incoming) -> None:
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            sharding = _json(metadata.get(_SHARDING), file)
            if EXTRA_KEY in metadata:
                made.own = _json(metadata[EXTRA_KEY], file)
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                part = opened.get_slice(name)
                _add_part(file, name, part.get_dtype(), tuple(part.get_shape()), sharding, found)
    except (SafetensorError, OSError) as exc:
        raise CorruptError(f"{file} is no safetensors file: {str(exc)[:200]}") from exc


def _add_part(
    file: Path,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    sharding: Mapping[str, Any] | None,
    found: dict[str, tuple[str, list[Box]]],
) -> None:
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{name!r:.200} in {file} has the dtype {dtype}, which no state holds"
        )
    offsets = (0,) * len(shape)
    if sharding is not None:
        offsets = _offsets(sharding.get(name), len(shape), name, file)
    known, boxes = found.setdefault(name, (dtype, []))
    if known != dtype or (boxes and len(boxes[0].shape) != len(shape)):
        raise CorruptError(f"{name!r:.200} is in several files, and differs")
    if sharding is None and boxes:
        raise CorruptError(
            f"{name!r:.200} is in several files, and nothing says where its parts lie"
        )
    boxes.append(Box(offsets, shape, _reader(file, name)))


def _offsets(entry: Any, n_dims: int, name: str, file: Path) -> tuple[int, ...]:  # noqa: ANN401
    saved = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if (
        not isinstance(saved, list)
        or len(saved) != n_dims
        or not all(type(each) is int and 0 <= each < 2**62 for each in saved)
    ):
        raise CorruptError(f"{file} does not say where its part of {name!r:.200} lies")
    return tuple(saved)


def _reader(file: Path, name: str) -> Fill:
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
        raise CorruptError(f"the metadata of {file} is no mapping")
    return value
