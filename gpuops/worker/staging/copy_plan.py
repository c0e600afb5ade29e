"""Which tensors of a state are copied, which are digested, and where each goes in the image."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, is_
from typing import NamedTuple

import torch

from gpuops.checkpoint.agreement.replicated import read_replicated
from gpuops.checkpoint.image import ImageLayout, image_order, plan_image
from gpuops.checkpoint.sharing import group_key, plan_sharing
from gpuops.checkpoint.types import Shard
from gpuops.convert.tensors import (
    TensorPlacements,
    check_storable,
    is_dtensor,
    local_tensor,
    needs_carrier,
)
from gpuops.worker.staging import pinned_buffer
from gpuops.worker.state.adapter import AdapterSnapshot, StateAdapter
from gpuops.worker.state.optimizer import OptimizerAdapter
from gpuops.worker.state.resharding import replicated_by_name

METADATA_STEP_BYTES = 64 * 1024

_N_SHOWN = 3
_SHAPE = attrgetter("shape")
_DTYPE = attrgetter("dtype")


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The layout of an image, and which tensor of a capture goes where in it.

    ``device`` is that of the tensors that are not on the host, None where all are. ``copied`` and
    ``digested`` (with names, and whether the optimizers own them) are places in what the parts of
    the state have.
    """

    layout: ImageLayout
    names: tuple[str, ...]
    device: torch.device | None
    optimizer_owned: tuple[int, ...]
    others: tuple[int, ...]
    copied: tuple[int, ...]
    digested: tuple[tuple[str, int, bool], ...]


class SharedTensor(NamedTuple):
    """A tensor whose digest is saved: this rank's part of ``given``.

    ``is_fenced``: only the optimizers change it.
    """

    name: str
    part: torch.Tensor
    given: torch.Tensor
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The tensors to copy into a slot of the plan's layout.

    ``tensors`` are this rank's parts of ``given``, in the order of ``plan.names``; those of
    ``plan.optimizer_owned`` are changed by the optimizers alone, unless the script does it.
    ``digested``: tensors that ranks of the node share, in the order of their digests.
    """

    plan: CopyPlan
    tensors: Sequence[torch.Tensor]
    metadata_blob: bytes
    given: Sequence[torch.Tensor]
    digested: Sequence[SharedTensor] = ()


class StateShape:
    """What a plan was made for: the names, shapes, dtypes and places of all tensors."""

    def __init__(
        self, readings: Sequence[AdapterSnapshot], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._names = [reading.names for reading in readings]
        self._shapes = list(map(_SHAPE, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        self._types = list(map(type, tensors))
        self._devices = _first_devices(readings)
        self._placements = _placements_of(tensors)
        self.needs_local = any(
            is_dtensor(tensor) or needs_carrier(tensor.dtype) for tensor in tensors
        )

    def matches(self, readings: Sequence[AdapterSnapshot], tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a state has the same shape."""
        if len(self._names) != len(readings):
            return False
        if any(a.names is not b for a, b in zip(readings, self._names, strict=True)):
            return False
        # The compared values are not stored: many thousand new objects would trigger garbage
        # collections of the job's whole memory, again and again.
        return (
            len(tensors) == len(self._shapes)
            and all(map(eq, map(_SHAPE, tensors), self._shapes))
            and all(map(is_, map(_DTYPE, tensors), self._dtypes))
            and all(map(is_, map(type, tensors), self._types))
            and _first_devices(readings) == self._devices
            and (not self._placements or _placements_of(tensors) == self._placements)
        )


def plan_copy(
    adapters: Sequence[StateAdapter],
    readings: Sequence[AdapterSnapshot],
    tensors: Sequence[torch.Tensor],
    shard: Shard,
    node_ranks: Sequence[int],
    metadata_bytes: int,
) -> CopyPlan:
    """Return the plan for the state *readings* of *adapters*, all of whose tensors are *tensors*.

    The metadata may grow to twice *metadata_bytes*.

    Raises:
        CheckpointError: A tensor cannot be stored; the message names it.
    """
    names = tuple(name for reading in readings for name in reading.names)
    for name, tensor in zip(names, tensors, strict=True):
        check_storable(tensor, name)
    placements = TensorPlacements()
    specs = [
        placements.spec_of(tensor, local_tensor(tensor), name)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    replicas_by_name = replicated_by_name(adapters, names, tensors, shard.rank)
    device = pinned_buffer.first_cuda_device(tensors)
    shared = plan_sharing(
        shard,
        image_order(specs),
        replicas_by_name,
        node_ranks,
        {name for name, each in zip(names, tensors, strict=True) if each.device == device},
    )
    capacity_bytes = -(-2 * metadata_bytes // METADATA_STEP_BYTES) * METADATA_STEP_BYTES
    layout = plan_image(shard, specs, capacity_bytes, replicas_by_name, shared)
    owned_flags = _optimizer_owned_flags(adapters, readings, tensors)
    places = {name: place for place, name in enumerate(names)}
    foreign = layout.owner_by_name
    copied = [place for name, place in places.items() if name not in foreign]
    fenced = [owned_flags[place] for place in copied]
    return CopyPlan(
        layout,
        tuple(names[place] for place in copied),
        device,
        tuple(i for i, is_fenced in enumerate(fenced) if is_fenced),
        tuple(i for i, is_fenced in enumerate(fenced) if not is_fenced),
        tuple(copied),
        tuple(
            (name, places[name], owned_flags[places[name]])
            for each in shared
            for name in each.stored_names
        ),
    )


def replica_groups(layout: ImageLayout) -> dict[tuple[int, ...], str]:
    """Return for each set of ranks that hold tensors alike what is equal on all of them.

    That is a `group_key` of these tensors.
    """
    shard, tensors = layout.shard, layout.tensors
    keys = {
        each.ranks: group_key(shard.world, each.ranks, [tensors[n].spec for n in each.tensors])
        for each in read_replicated(layout.header, shard, len(tensors))
    }
    return keys | {each.ranks: each.key for each in layout.shared}


def changed_tensors(old: CopyPlan, new: CopyPlan) -> str:
    """Return the names of a few tensors that made another layout necessary."""
    known, wanted = ({tensor.spec for tensor in plan.layout.tensors} for plan in (old, new))
    names = sorted({spec.name for spec in known ^ wanted})
    return some_names(names) if names else "the values that are not tensors grew"


def some_names(names: Sequence[str]) -> str:
    """Return a few of *names* as text."""
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return ", ".join(names[:_N_SHOWN]) + more


def _optimizer_owned_flags(
    adapters: Sequence[StateAdapter],
    readings: Sequence[AdapterSnapshot],
    tensors: Sequence[torch.Tensor],
) -> list[bool]:
    """Return whether only the optimizers change it, for each of *tensors*."""
    owned = {
        id(each)
        for part in adapters
        if isinstance(part, OptimizerAdapter)
        for group in part.optimizer.param_groups
        for each in group["params"]
    }
    owned_flags = [id(tensor) in owned for tensor in tensors]
    begin = 0
    for reading in readings:
        n_owned = reading.n_optimizer_owned
        owned_flags[begin : begin + n_owned] = [True] * n_owned
        begin += len(reading.tensors)
    return owned_flags


def _first_devices(readings: Sequence[AdapterSnapshot]) -> list[object]:
    """Return where the parts are; a part is moved as a whole."""
    return [reading.tensors[0].device if reading.tensors else None for reading in readings]


def _placements_of(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [
        (tensor.placements, tensor.to_local().shape) for tensor in tensors if is_dtensor(tensor)
    ]
