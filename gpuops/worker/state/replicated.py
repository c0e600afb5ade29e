"""Which tensors of a state several ranks must hold bit for bit alike.

Those are the parameters that a given optimizer trains and torch itself keeps equal: of a module in
`DistributedDataParallel`, and DTensors that are replicated along a dimension of their mesh; and
what torch's own optimizers remember of them, which follows from the same gradients. Nothing else:
buffers, averages, parameters that are not trained, and the state of anybody else's optimizer may
differ from rank to rank by right.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpuops.convert.tensors import is_dtensor
from gpuops.worker.state.adapter import StateAdapter
from gpuops.worker.state.model import ModelAdapter
from gpuops.worker.state.optimizer import OptimizerAdapter

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
    """Return the ranks that must hold a tensor as this *rank* does, by its name in *names*.

    They ascend, and this rank is among them. Never raises: what cannot be told is not compared.
    """
    try:
        by_id = _by_id(adapters)
    except Exception:  # noqa: BLE001 boundary: what is compared is no part of what is saved
        _log.debug("which tensors are replicated cannot be told", exc_info=True)
        return {}
    found = {
        name: by_id[id(tensor)]
        for name, tensor in zip(names, tensors, strict=True)
        if id(tensor) in by_id
    }
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1 and rank in ranks}


def _by_id(adapters: Sequence[StateAdapter]) -> dict[int, Ranks]:
    modules = [m for part in adapters if isinstance(part, ModelAdapter) for m in part.modules]
    optimizers = [part.optimizer for part in adapters if isinstance(part, OptimizerAdapter)]
    of_ddp = _ddp_ranks(modules)
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    found: dict[int, Ranks] = {}
    for optimizer in optimizers:
        is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim.")
        for parameter in _parameters(optimizer):
            if not parameter.requires_grad or id(parameter) not in known:
                continue
            ranks = _replicas_of(parameter) if is_dtensor(parameter) else of_ddp.get(id(parameter))
            if ranks is None:
                continue
            found[id(parameter)] = ranks
            if is_torch_optimizer:
                state = optimizer.state.get(parameter, {})
                found |= {
                    id(value): ranks for value in _with_same_placement(state.values(), parameter)
                }
    return found


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


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
    """Say whether all ranks get the same gradients: a hook of somebody's may give each its own.

    That of post-local SGD does, by design. Torch's own that only change the format do not.
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
    """Return of an optimizer's *values* those that are spread over ranks as *parameter* is."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        placements = getattr(parameter, "placements", None)
        if not is_dtensor(value) or tuple(value.placements) == placements:
            yield value
