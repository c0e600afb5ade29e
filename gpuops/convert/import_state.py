"""Make a state from other formats: with digests and a manifest, like one of a job of one rank."""

# ruff: noqa: ANN401 imported values have any type

import mmap
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import ImageLayout, TensorSpec, plan_image, write_metadata_blob
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.persist import StateOrigin, persist
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    STEP_MAX,
    BadRequestError,
    CheckpointError,
    CorruptError,
    Shard,
    StateId,
)
from gpuops.convert.export import EXPORT_KEY, ConvertFormat
from gpuops.convert.import_source import ImportSource
from gpuops.convert.nested import (
    FlatState,
    NestedState,
    from_nested,
    parse_metadata_blobs,
    to_nested,
)
from gpuops.convert.read_dcp import read_dcp
from gpuops.convert.safetensors_files import read_safetensors
from gpuops.convert.state_reader import scratch_file
from gpuops.convert.tensors import DTYPE_NAMES, as_storable, check_storable, view_of

_STEP_KEYS = ("step", "global_step", "iteration")
_SHARD = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The imported state, and notes for the user."""

    state: StateId
    nbytes: int
    n_tensors: int
    notes: tuple[str, ...]


def open_import_source(path: Path, input_format: ConvertFormat, *, trust: bool) -> ImportSource:
    """Open *path*; its tensors are not read yet.

    Raises:
        CheckpointError: It cannot be read; or only by running code that it contains, and *trust* is
            false.
    """
    if not path.exists():
        raise BadRequestError(f"there is no {path}")
    match input_format:
        case ConvertFormat.DCP:
            return read_dcp(path, trust=trust)
        case ConvertFormat.SAFETENSORS:
            return read_safetensors(path)
        case ConvertFormat.TORCH:
            return read_torch(path, trust=trust)


def import_state(  # noqa: PLR0913 source, target, and what the source may lack
    source: ImportSource,
    store: CheckpointStore,
    scratch: Path,
    *,
    step: int | None = None,
    epoch: int | None = None,
    part: str | None = None,
    advance: Callable[[int], object] = lambda _nbytes: None,
) -> ImportResult:
    """Write *source* to *store* as a state.

    Args:
        source: What to write.
        store: Where to.
        scratch: A folder with room for all of it once more.
        step: The optimizer steps completed; None: taken from the source.
        epoch: None: newer than all existing states.
        part: The part that a flat set of tensors is the state of, such as ``model``.
        advance: Called with the bytes of tensors that were read.

    Raises:
        CorruptError: The source contradicts its own index.
        CheckpointError: The step is unknown; something cannot be stored; no room; the state exists
            already.
    """
    state = StateId(_epoch(epoch, store), _step(step, source))
    if any(stored.state == state for stored in store.list_states()):
        raise CheckpointError(
            f"{store.address} has {state} already: give another --epoch or --step"
        )
    flat = _flatten(source, state.step, part)
    specs = {name: _spec(name, tensor) for name, tensor in flat.tensors.items()}
    layout = plan_image(_SHARD, list(specs.values()), len(flat.metadata_blob))
    with scratch_file(scratch, layout.nbytes) as fd:
        image = memoryview(mmap.mmap(fd, layout.nbytes))
        _write_image(image, layout, flat, source, advance)
        digest = compute_digest(image)
        persist(store, state, {_SHARD: (fd, digest)}, origin=StateOrigin("import", 0))
    return ImportResult(state, layout.nbytes, len(specs), (*source.notes, *flat.notes))


def _epoch(given: int | None, store: CheckpointStore) -> int:
    if given is None:
        given = max((stored.state.epoch for stored in store.list_states()), default=-1) + 1
    if not 0 <= given <= EPOCH_MAX:
        raise BadRequestError(f"invalid epoch {given}: at most {EPOCH_MAX}")
    return given


def _step(given: int | None, source: ImportSource) -> int:
    stated: Any = given
    if stated is None and source.gpuops_metadata is not None:
        stated = source.gpuops_metadata.get("step")
    for key in _STEP_KEYS:
        if stated is None:
            stated = source.tree.get(key)
    if isinstance(stated, torch.Tensor) and stated.numel() == 1 and not stated.is_meta:
        stated = stated.item()
    if type(stated) is not int or not 0 < stated <= STEP_MAX:
        raise BadRequestError("the number of completed steps is unknown: give --step N")
    return stated


def _flatten(source: ImportSource, step: int, part: str | None) -> FlatState:
    gpuops_metadata = source.gpuops_metadata
    if part is not None:
        return from_nested({part: source.tree}, step)
    if gpuops_metadata is None:
        return from_nested({"model": source.tree} if source.is_flat else source.tree, step)
    blobs = gpuops_metadata.get("extra")
    if not isinstance(blobs, list) or not all(type(text) is str for text in blobs):
        raise CorruptError("the metadata of its gpuops export is incomplete")
    if source.is_flat:
        flat = FlatState(dict(source.tree))
        names = set(flat.tensors)
    else:
        flat = from_nested(source.tree, step)
        names = set(map(str, gpuops_metadata.get("names", ())))
    if len(blobs) == 1 and names <= flat.tensors.keys() and gpuops_metadata.get("step") == step:
        tensors = {name: tensor for name, tensor in flat.tensors.items() if name in names}
        return FlatState(tensors, blobs[0].encode(), flat.notes)
    if source.is_flat:
        flat = from_nested(_build_nested(source, blobs), step)
    flat.notes.append(
        f"it was saved by {len(blobs)} ranks: of each rank's own values (random states, positions "
        "in data), that of the lowest is used, or none"
    )
    return flat


def _build_nested(source: ImportSource, blobs: list[str]) -> NestedState:
    def tensor_of(name: str, _dtype: str | None) -> torch.Tensor:
        if name not in source.tree:
            raise CorruptError(f"the metadata names a tensor {name!r:.200}, which is not there")
        found: torch.Tensor = source.tree[name]
        return found

    return to_nested(
        parse_metadata_blobs([text.encode() for text in blobs]), source.tree, tensor_of
    )


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    if not tensor.is_meta:
        check_storable(tensor, name)
    stored = as_storable(tensor)
    if stored.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name!r:.200} has the unsupported dtype {tensor.dtype}")
    shape = tuple(stored.shape)
    nbytes = stored.numel() * stored.element_size()
    return TensorSpec(name, DTYPE_NAMES[stored.dtype], shape, nbytes, (0,) * len(shape), shape)


def _write_image(
    image: memoryview,
    layout: ImageLayout,
    flat: FlatState,
    import_source: ImportSource,
    advance: Callable[[int], object],
) -> None:
    image[: len(layout.header)] = layout.header
    write_metadata_blob(image, layout, flat.metadata_blob)
    for placed in layout.tensors:
        source = flat.tensors[placed.spec.name]
        target = view_of(image, placed)
        if source.dtype is torch.complex128:
            target = torch.view_as_complex(target)
        elif target.dtype is not source.dtype:
            target = target.view(source.dtype)
        import_source.fill(source, target)
        advance(placed.end - placed.begin)


_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,200})")


def read_torch(path: Path, *, trust: bool) -> ImportSource:
    """Return the content of the file *path*, a dict; its tensors are mapped, not read.

    Raises:
        CheckpointError: torch loads it only by running code, and *trust* is false; it cannot be
            read; or it is not a dict.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty")
    loaded = _load(path, trust=trust)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}, not a dict of states: save "
            "model.state_dict(), or a dict of several"
        )
    tree = dict(loaded)
    if tree and all(isinstance(value, torch.Tensor) for value in tree.values()):
        return ImportSource(tree=tree, is_flat=True)
    gpuops_metadata = tree.pop(EXPORT_KEY, None)
    return ImportSource(
        tree=tree, gpuops_metadata=gpuops_metadata if isinstance(gpuops_metadata, Mapping) else None
    )


def _load(path: Path, *, trust: bool) -> Any:
    for is_mapped in (True, False):  # files in the format before torch 1.6 cannot be mapped
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch refuses what it does not support
                return torch.load(path, map_location="cpu", weights_only=not trust, mmap=is_mapped)
        except Exception as exc:  # noqa: BLE001 boundary: hostile bytes make torch raise anything
            failed: Exception = exc
    if trust:
        raise CheckpointError(f"cannot load {path}: {failed!r:.300}") from failed
    raise CheckpointError(
        f"{path} is refused: torch loads it only by running code that it contains, or not at all"
        f"{_refusal_reason(failed)}. If you trust its author, give --trust"
    ) from failed


def _refusal_reason(exc: Exception) -> str:
    """Return the part of torch's message about the file: the rest advises to disable the check."""
    matched = _GLOBAL.search(str(exc))
    return f": it names {matched[1]}" if matched else ""
