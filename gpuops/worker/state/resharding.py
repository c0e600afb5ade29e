"""Load tensors that were saved in other parts than are requested: torch does the work.

torch's checkpoint planner determines which pieces of which saved parts are needed; this reader
copies them from images that are mapped into memory. Its assumption is checked before: the parts of
a tensor cover it exactly once.
"""

import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gpuops.convert.tensors import DTYPES, is_dtensor, view_of
from gpuops.worker.state.adapter import StateAdapter
from gpuops.worker.state.model import ModelAdapter
from gpuops.worker.state.optimizer import OptimizerAdapter
from gpuops.worker.state.saved_state import SavedPiece, box_ranges, check_complete

_log = logging.getLogger(__name__)

Ranks = tuple[int, ...]

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_SUMMING_HOOKS = frozenset({"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"})


def replicated_by_name(
    adapters: Sequence[StateAdapter],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    rank: int,
) -> dict[str, Ranks]:
    """Return the ranks on which a tensor must equal that of this *rank*, by its name in *names*.

    They are sorted, and include this rank. Never raises: on an error nothing is compared.
    """
    try:
        by_id = _by_id(adapters)
    except Exception:  # noqa: BLE001 boundary: saving does not depend on it
        _log.debug("cannot determine which tensors are replicated", exc_info=True)
        return {}
    found = {
        name: by_id[id(tensor)]
        for name, tensor in zip(names, tensors, strict=True)
        if id(tensor) in by_id
    }
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1 and rank in ranks}


def _by_id(adapters: Sequence[StateAdapter]) -> dict[int, Ranks]:
    modules = [m for part in adapters if isinstance(part, ModelAdapter) for m in part.modules]
    optimizers = [part for part in adapters if isinstance(part, OptimizerAdapter)]
    of_ddp = _ddp_ranks(modules)
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    found: dict[int, Ranks] = {}
    for optimizer in optimizers:
        for parameter in optimizer.parameters:
            if not parameter.requires_grad or id(parameter) not in known:
                continue
            ranks = _replicas_of(parameter) if is_dtensor(parameter) else of_ddp.get(id(parameter))
            if ranks is None:
                continue
            found[id(parameter)] = ranks
            if optimizer.is_replicated:
                state = optimizer.optimizer.state.get(parameter, {})
                found |= {
                    id(value): ranks for value in _with_same_placement(state.values(), parameter)
                }
    # DDP broadcasts frozen parameters when it is made, and nothing trains them.
    frozen = (p for module in modules for p in module.parameters() if not p.requires_grad)
    return found | {id(p): of_ddp[id(p)] for p in frozen if optimizers and id(p) in of_ddp}


def _ddp_ranks(modules: Iterable[nn.Module]) -> dict[int, Ranks]:
    """Return the ranks that train a parameter together, by its `id`."""
    found: dict[int, Ranks] = {}
    inner = chain.from_iterable(module.modules() for module in modules)
    for ddp in (each for each in inner if isinstance(each, DistributedDataParallel)):
        if not _has_same_gradients(ddp):
            continue
        ranks = tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group)))
        ignored = ddp.parameters_to_ignore
        for name, parameter in ddp.module.named_parameters():
            if name not in ignored and not getattr(parameter, "_ddp_ignored", False):
                found[id(parameter)] = ranks
    return found


def _has_same_gradients(ddp: DistributedDataParallel) -> bool:
    """Return whether all ranks get the same gradients: a custom hook may give each its own.

    That of post-local SGD does so by design. Torch's own that only change the format do not.
    """
    hooks = getattr(ddp, "_comm_hooks", None)
    if hooks is None:
        return False
    return all(
        getattr(hook, "__module__", "") == _HOOKS
        and getattr(hook, "__name__", "") in _SUMMING_HOOKS
        for hook, _state in hooks
    )


def _replicas_of(parameter: torch.Tensor) -> Ranks | None:
    """Return the ranks that have the same part of a DTensor as this one, None without any."""
    assert is_dtensor(parameter)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or not any(place.is_replicate() for place in parameter.placements):
        return None
    along = tuple(
        slice(None) if place.is_replicate() else coordinate_in_dim
        for place, coordinate_in_dim in zip(parameter.placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[along].flatten().tolist()))


def _with_same_placement(
    values: Iterable[object], parameter: torch.Tensor
) -> Iterable[torch.Tensor]:
    """Return those of an optimizer's *values* that are sharded like *parameter*."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        placements = getattr(parameter, "placements", None)
        if not is_dtensor(value) or tuple(value.placements) == placements:
            yield value


class ShardImageReader(StorageReader):
    """A reader for ``torch.distributed.checkpoint.load`` over the pieces of each tensor."""

    def __init__(self, pieces: Mapping[str, Sequence[SavedPiece]]) -> None:
        """Take the pieces by the names of their tensors; see `saved_state.distinct_pieces`."""
        self._pieces = {
            (name, placed.spec.offsets): (opened, placed)
            for name, parts in pieces.items()
            for opened, placed in parts
        }
        self._metadata = Metadata({name: _metadata(parts) for name, parts in pieces.items()})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is one checkpoint."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:  # noqa: ANN401 torch's
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,  # noqa: ANN401 torch's
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: everything is set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each piece that *plan* names to where *planner* has it."""
        for item in plan.items:
            offsets = item.storage_index.offset
            assert offsets is not None
            opened, placed = self._pieces[item.storage_index.fqn, tuple(offsets)]
            ends = [b + n for b, n in zip(item.storage_offsets, item.lengths, strict=True)]
            opened.ensure(box_ranges(placed, item.storage_offsets, ends))
            place = tuple(
                slice(begin, end) for begin, end in zip(item.storage_offsets, ends, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(view_of(opened.view, placed)[place])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return False: no path names this source."""
        return False


def load_resharded(
    targets: Mapping[str, torch.Tensor], pieces: Mapping[str, Sequence[SavedPiece]]
) -> None:
    """Fill the tensors of *targets*, DTensors or not, from the *pieces* of the same names.

    Raises:
        CheckpointError: The pieces of one do not cover it, or it is of another shape.
    """
    for name, parts in pieces.items():
        check_complete(name, [placed.spec for _, placed in parts])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(dict(targets), storage_reader=ShardImageReader(pieces), planner=planner, no_dist=True)


def _metadata(parts: Sequence[SavedPiece]) -> TensorStorageMetadata:
    spec = parts[0][1].spec
    chunks = [
        ChunkStorageMetadata(torch.Size(placed.spec.offsets), torch.Size(placed.spec.shape))
        for _, placed in parts
    ]
    properties = TensorProperties(dtype=DTYPES[spec.dtype])
    return TensorStorageMetadata(properties, torch.Size(spec.global_shape), chunks)
