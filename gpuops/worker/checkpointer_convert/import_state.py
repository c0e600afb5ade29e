"""Make a state of what others saved: with digests and a manifest, as a job of one rank has it."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.digest import digest_of
from gpuops.checkpoint.image import ImageLayout, TensorSpec, plan_image, write_extra
from gpuops.checkpoint.persist import Origin, persist
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import (
    EPOCH_MAX,
    STEP_MAX,
    BadRequestError,
    CheckpointError,
    CorruptError,
    Shard,
    StateId,
)
from gpuops.worker.checkpointer.tensors import NAMES, carried, check
from gpuops.worker.checkpointer.views import view_of
from gpuops.worker.checkpointer_convert.assemble import scratch_file
from gpuops.worker.checkpointer_convert.export import Format
from gpuops.worker.checkpointer_convert.fold import Folded, fold
from gpuops.worker.checkpointer_convert.incoming import Incoming
from gpuops.worker.checkpointer_convert.open_dcp import open_dcp
from gpuops.worker.checkpointer_convert.open_safetensors import open_safetensors
from gpuops.worker.checkpointer_convert.open_torch import open_torch
from gpuops.worker.checkpointer_convert.unfold import Unfolded, read_extras, unfold

_STEPS = ("step", "global_step", "iteration")
_SHARD = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class Imported:
    """The state that was made, and what the user should know of it."""

    state: StateId
    nbytes: int
    n_tensors: int
    notes: tuple[str, ...]


def open_incoming(path: Path, form: Format, *, trust: bool) -> Incoming:
    """Return what is at *path*, before its tensors are read.

    Raises:
        CheckpointError: It cannot be read, or only by running what it contains and *trust* is
            false.
    """
    if not path.exists():
        raise BadRequestError(f"there is no {path}")
    match form:
        case Format.DCP:
            return open_dcp(path, trust=trust)
        case Format.SAFETENSORS:
            return open_safetensors(path)
        case Format.TORCH:
            return open_torch(path, trust=trust)


def import_state(  # noqa: PLR0913 what, where to, and what nobody else says
    incoming: Incoming,
    store: CheckpointStore,
    scratch: Path,
    *,
    step: int | None = None,
    epoch: int | None = None,
    part: str | None = None,
    advance: Callable[[int], object] = lambda _nbytes: None,
) -> Imported:
    """Write *incoming* to *store* as a state.

    Args:
        incoming: What to write.
        store: Where to.
        scratch: A folder with room for all of it once more.
        step: The optimizer steps completed; None: what was saved with it says.
        epoch: None: newer than all states that are there.
        part: What a flat set of tensors is the state of, such as ``model``.
        advance: Is told the bytes of tensors that were read.

    Raises:
        CorruptError: What is read is not what its own index says.
        CheckpointError: Nobody says the step; something cannot be stored; no room; the state is
            there already.
    """
    state = StateId(_epoch(epoch, store), _step(step, incoming))
    if any(stored.state == state for stored in store.list()):
        raise CheckpointError(
            f"{store.address} has {state} already: give another --epoch or --step"
        )
    folded = _folded(incoming, state.step, part)
    specs = {name: _spec(name, tensor) for name, tensor in folded.tensors.items()}
    layout = plan_image(_SHARD, list(specs.values()), len(folded.extra))
    with scratch_file(scratch, layout.nbytes) as fd:
        image = memoryview(mmap.mmap(fd, layout.nbytes))
        _write_image(image, layout, folded, incoming, advance)
        digest = digest_of(image)
        persist(store, state, {_SHARD: (fd, digest)}, origin=Origin("import", 0))
    return Imported(state, layout.nbytes, len(specs), (*incoming.notes, *folded.notes))


def _epoch(given: int | None, store: CheckpointStore) -> int:
    if given is None:
        given = max((stored.state.epoch for stored in store.list()), default=-1) + 1
    if not 0 <= given <= EPOCH_MAX:
        raise BadRequestError(f"no state has the epoch {given}: at most {EPOCH_MAX}")
    return given


def _step(given: int | None, incoming: Incoming) -> int:
    told: Any = given
    if told is None and incoming.own is not None:
        told = incoming.own.get("step")
    for key in _STEPS:
        if told is None:
            told = incoming.tree.get(key)
    if isinstance(told, torch.Tensor) and told.numel() == 1 and not told.is_meta:
        told = told.item()
    if type(told) is not int or not 0 < told <= STEP_MAX:
        raise BadRequestError("nothing says how many steps were completed by then: give --step N")
    return told


def _folded(incoming: Incoming, step: int, part: str | None) -> Folded:
    own = incoming.own
    if part is not None:
        return fold({part: incoming.tree}, step)
    if own is None:
        return fold({"model": incoming.tree} if incoming.flat else incoming.tree, step)
    texts = own.get("extra")
    if not isinstance(texts, list) or not all(type(text) is str for text in texts):
        raise CorruptError("what gpuops exported with it is not whole: it has no extras")
    if incoming.flat:
        folded = Folded(dict(incoming.tree))
        names = set(folded.tensors)
    else:
        folded = fold(incoming.tree, step)
        names = set(map(str, own.get("names", ())))
    if len(texts) == 1 and names <= folded.tensors.keys() and own.get("step") == step:
        kept = {name: tensor for name, tensor in folded.tensors.items() if name in names}
        return Folded(kept, texts[0].encode(), folded.notes)
    if incoming.flat:
        folded = fold(_nested(incoming, texts), step)
    folded.notes.append(
        f"it was saved by {len(texts)} ranks: what each had of its own (random states, positions "
        "in data) is that of the lowest, or not kept"
    )
    return folded


def _nested(incoming: Incoming, texts: list[str]) -> Unfolded:
    def tensor_of(name: str, _dtype: str | None) -> torch.Tensor:
        if name not in incoming.tree:
            raise CorruptError(f"the extras tell of a tensor {name!r:.200}, which is not there")
        found: torch.Tensor = incoming.tree[name]
        return found

    return unfold(read_extras([text.encode() for text in texts]), incoming.tree, tensor_of)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    if not tensor.is_meta:
        check(tensor, name)
    held = carried(tensor)
    if held.dtype not in NAMES:
        raise CheckpointError(f"{name!r:.200} has the dtype {tensor.dtype}, which no state holds")
    shape = tuple(held.shape)
    nbytes = held.numel() * held.element_size()
    return TensorSpec(name, NAMES[held.dtype], shape, nbytes, (0,) * len(shape), shape)


def _write_image(
    image: memoryview,
    layout: ImageLayout,
    folded: Folded,
    incoming: Incoming,
    advance: Callable[[int], object],
) -> None:
    image[: len(layout.header)] = layout.header
    write_extra(image, layout, folded.extra)
    for placed in layout.tensors:
        source = folded.tensors[placed.spec.name]
        target = view_of(image, placed)
        if source.dtype is torch.complex128:
            target = torch.view_as_complex(target)
        elif target.dtype is not source.dtype:
            target = target.view(source.dtype)
        incoming.fill(source, target)
        advance(placed.end - placed.begin)
