"""Write a state in another format: a DCP directory, safetensors files, a torch.save file.

The result appears complete or not at all: it is written under a temporary name and renamed.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from gpuops.checkpoint.storage.inspection import StoredTensor
from gpuops.checkpoint.types import BadRequestError, CheckpointError, CorruptError
from gpuops.convert.nested import NestedState, parse_metadata_blobs, to_nested
from gpuops.convert.safetensors_files import (
    INDEX_FILE,
    METADATA_BYTES_MAX,
    METADATA_KEY,
    encode_index,
    plan_files,
    write_file,
)
from gpuops.convert.state_reader import StateReader
from gpuops.convert.tensors import DTYPES

EXPORT_KEY = "gpuops"  # the key of the metadata from which an import rebuilds the same state
EXPORT_FORMAT = 1
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class ConvertFormat(StrEnum):
    """Formats of other tools."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was written. ``omitted``: not supported by the format, or not requested."""

    files: tuple[Path, ...]
    nbytes: int
    n_tensors: int
    omitted: tuple[str, ...]


def export_state(
    state: StateReader,
    to: Path,
    output_format: ConvertFormat,
    *,
    part: str | None = None,
    max_shard_bytes: int | None = None,
    advance: Callable[[int], object] = lambda _nbytes: None,
) -> ExportResult:
    """Write *state* to *to*, which must not exist yet.

    Args:
        state: The state, open.
        to: A file for safetensors and torch; a directory for dcp, and for safetensors where
            *max_shard_bytes* is given.
        output_format: The format.
        part: Only this part (``model``), its tensors by their names without the part's.
        max_shard_bytes: The approximate bytes of tensors in each safetensors file.
        advance: Called with the bytes of tensors written, for a progress bar.

    Raises:
        CorruptError: A shard is not what was saved.
        BadRequestError: *to* exists, or its parent does not; the state has no such part.
        CheckpointError: *to* cannot be written.
    """
    if to.exists() or to.is_symlink():
        raise BadRequestError(f"{to} exists already: give a path that does not")
    if not to.parent.is_dir():
        raise BadRequestError(f"there is no directory {to.parent} to write {to.name} into")
    if output_format is ConvertFormat.SAFETENSORS:
        return _export_safetensors(state, to, part, max_shard_bytes, advance)
    nested = _build_nested(state, part)
    advance(sum(tensor.nbytes for tensor in state.tensors.values()))
    if output_format is ConvertFormat.TORCH:
        with _temporary_file(to) as file:
            torch.save(dict(nested), file)
        files: tuple[Path, ...] = (to,)
    else:
        with _temporary_directory(to) as folder:
            _save_dcp(nested, folder)
        files = tuple(sorted(to.iterdir()))
    return _exported(files, len(_select_part(state.tensors, part)), nested.omitted)


def _exported(files: Sequence[Path], n_tensors: int, omitted: Sequence[str]) -> ExportResult:
    nbytes = sum(file.stat().st_size for file in files)
    return ExportResult(tuple(files), nbytes, n_tensors, tuple(omitted))


def _save_dcp(nested: Mapping[str, Any], folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(dict(nested), storage_writer=FileSystemWriter(folder), no_dist=True)
    except CheckpointException as exc:  # not an Exception; it has those of all ranks
        failed = [failure for failure, _ in exc.failures.values()]
        if any(map(_is_interrupt, failed)):
            raise KeyboardInterrupt from exc
        why = getattr(failed[0], "strerror", None) or str(failed[0]) if failed else str(exc)
        raise CheckpointError(f"cannot write {folder}: {why[:200]}") from exc
    except OSError as exc:
        raise CheckpointError(f"cannot write {folder}: {exc.strerror or exc}") from exc


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused *error*: closing an incomplete file raises another error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _build_nested(state: StateReader, part: str | None) -> NestedState:
    """Return the state as nested dicts, with the metadata from which an import rebuilds it."""
    blobs = [state.metadata_blob_of(layout) for layout in state.layouts]
    cache: dict[tuple[str, str | None], torch.Tensor] = {}

    def tensor_of(name: str, dtype: str | None) -> torch.Tensor:
        if (name, dtype) not in cache:
            if name not in state.tensors:
                raise CorruptError(
                    f"the state names a tensor {name!r:.200} and does not contain it"
                )
            cache[name, dtype] = _as_torch(state, state.tensors[name], dtype)
        return cache[name, dtype]

    if part is None:
        made = to_nested(parse_metadata_blobs(blobs), state.tensors, tensor_of)
        made[EXPORT_KEY] = _gpuops_metadata(state, blobs)
        return made
    wanted = [name for name in state.tensors if name.startswith(f"{part}.")]
    extras = [_only(extra, part) for extra in parse_metadata_blobs(blobs)]
    found = to_nested(extras, wanted, tensor_of)
    if part in found:
        chosen = found[part]
    elif wanted:
        chosen = {name.removeprefix(f"{part}."): found[name] for name in wanted}
    else:
        raise BadRequestError(f"the state has no part {part!r}: {_parts_of(state, blobs)}")
    made = NestedState(chosen if isinstance(chosen, dict) else {part: chosen})
    made.omitted = [*found.omitted, *_other_parts(blobs, part)]
    return made


def _only(extra: Mapping[str, Any], part: str) -> dict[str, Any]:
    parts = extra.get("parts")
    return {"parts": {part: parts[part]} if isinstance(parts, dict) and part in parts else {}}


def _part_keys(blobs: Sequence[bytes]) -> list[str]:
    return list(
        dict.fromkeys(k for extra in parse_metadata_blobs(blobs) for k in extra.get("parts", {}))
    )


def _other_parts(blobs: Sequence[bytes], part: str) -> list[str]:
    return [f"{key}: only {part} was asked for" for key in _part_keys(blobs) if key != part]


def _parts_of(state: StateReader, blobs: Sequence[bytes]) -> str:
    known = _part_keys(blobs) or sorted({name.partition(".")[0] for name in state.tensors})
    return f"it has {', '.join(known) or 'none'}"


def _as_torch(state: StateReader, tensor: StoredTensor, dtype_name: str | None) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    data = state.bytes_of(tensor)
    found = torch.frombuffer(data, dtype=dtype) if data.nbytes else torch.empty(0, dtype=dtype)
    found = found.reshape(tensor.shape)
    held_as = getattr(torch, dtype_name, None) if dtype_name else dtype
    if held_as is torch.complex128:
        return torch.view_as_complex(found)
    return found.view(held_as) if isinstance(held_as, torch.dtype) else found


def _gpuops_metadata(state: StateReader, blobs: Sequence[bytes]) -> dict[str, Any]:
    manifest = state.manifest
    return {
        "format": EXPORT_FORMAT,
        "step": manifest.state.step,
        "epoch": manifest.state.epoch,
        "world": manifest.world,
        "names": list(state.tensors),
        "extra": [text.decode("utf-8", "replace") for text in blobs],
    }


def _export_safetensors(
    state: StateReader,
    to: Path,
    part: str | None,
    max_shard_bytes: int | None,
    advance: Callable[[int], object],
) -> ExportResult:
    tensors = _select_part(state.tensors, part)
    blobs = [state.metadata_blob_of(layout) for layout in state.layouts]
    metadata, omitted = _metadata(state, blobs, part)
    if not tensors:
        raise BadRequestError(f"the state has no part {part!r}: {_parts_of(state, blobs)}")
    plans = plan_files(tensors, metadata, max_shard_bytes)
    with _temporary_directory(to, is_published=max_shard_bytes is not None) as folder:
        for plan in plans:
            write_file(plan, state, folder, advance)
        if len(plans) > 1:
            _write_synced(folder / INDEX_FILE, encode_index(plans))
        if max_shard_bytes is None:
            _publish(folder / plans[0].name, to)
    files = (to,) if max_shard_bytes is None else tuple(sorted(to.iterdir()))
    return _exported(files, len(tensors), omitted)


def _select_part(tensors: Mapping[str, StoredTensor], part: str | None) -> dict[str, StoredTensor]:
    if part is None:
        return dict(tensors)
    return {
        name.removeprefix(f"{part}."): dataclasses.replace(
            tensor, name=name.removeprefix(f"{part}.")
        )
        for name, tensor in tensors.items()
        if name.startswith(f"{part}.")
    }


def _metadata(
    state: StateReader, blobs: Sequence[bytes], part: str | None
) -> tuple[dict[str, str], list[str]]:
    if part is not None:
        return {}, ["what is not a tensor", *_other_parts(blobs, part)]
    gpuops_metadata = _gpuops_metadata(state, blobs)
    del gpuops_metadata["names"]
    text = json.dumps(gpuops_metadata)
    if len(text) > METADATA_BYTES_MAX:
        return {}, [
            f"what is not a tensor: {len(text)} bytes; the header has room for {METADATA_BYTES_MAX}"
        ]
    return {METADATA_KEY: text}, []


@contextlib.contextmanager
def _temporary_directory(to: Path, *, is_published: bool = True) -> Iterator[Path]:
    """Yield a new directory that then *is_published* the directory *to*, or is removed."""
    folder = _temporary_path(to)
    try:
        folder.mkdir()
        yield folder
        if is_published:
            _sync_directory(folder)
            folder.rename(to)
            _sync_directory(to.parent)
    except OSError as exc:
        raise CheckpointError(f"cannot write {to}: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _temporary_file(to: Path) -> Iterator[Any]:
    """Yield a new open file that becomes *to*, unless something fails."""
    path = _temporary_path(to)
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _publish(path, to)
    except OSError as exc:
        raise CheckpointError(f"cannot write {to}: {exc.strerror or exc}") from exc
    except RuntimeError as exc:  # torch's error for a short write
        if _is_interrupt(exc):
            raise KeyboardInterrupt from exc
        raise CheckpointError(f"cannot write {to}: {str(exc)[:200]}") from exc
    finally:
        path.unlink(missing_ok=True)


def _temporary_path(to: Path) -> Path:
    return to.with_name(f".{to.name}.{secrets.token_hex(4)}.tmp")


def _publish(path: Path, to: Path) -> None:
    """Rename the file *path* to *to* and sync it; never replaces another file."""
    try:
        os.link(path, to)
    except OSError as exc:
        if exc.errno not in _NO_HARD_LINKS or to.exists():
            raise
        path.rename(to)
    _sync_directory(to.parent)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
