"""What a state will have once each optimizer has stepped, which most make in their first step.

Memory for a state is reserved before training, by the shapes of its tensors. A step with stand-ins
for the parameters (tensors of the meta device, which have no memory) shows those that will be made.
Where the result is wrong (a parameter gets no gradient), memory is reserved anew at the first save.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gpuops.convert.tensors import is_dtensor
from gpuops.worker.state.adapter import AdapterSnapshot, StateAdapter
from gpuops.worker.state.objects import ObjectAdapter

# Torch's kernels for these need a real device; they change only where `step` is.
_DEVICE_SETTINGS: Mapping[str, object] = {"fused": None, "foreach": False, "capturable": False}


def read_ahead(part: StateAdapter) -> AdapterSnapshot:
    """Return what *part* has before training; of a data loader nothing, which has no tensors.

    The state dict of a loader that has not begun may start its workers and draw random numbers.
    """
    if isinstance(part, ObjectAdapter) and part.is_iterable:
        return AdapterSnapshot((), (), b"null")
    return part.read()


@contextmanager
def expected_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context, *optimizer* has the state that its first step will make.

    Its tensors have shape, dtype, device and sharding, and no memory. Optimizers that have a state,
    and others than torch's, are left as they are.
    """
    if optimizer.state or not type(optimizer).__module__.startswith("torch.optim."):
        yield
        return
    try:
        state = _state_of_a_step(optimizer)
    except Exception:  # noqa: BLE001 boundary: it cannot step without real tensors
        state = {}
    optimizer.state.update(state)
    try:
        yield
    finally:
        optimizer.state.clear()


@torch.no_grad()
def _state_of_a_step(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    stand_in = copy.copy(optimizer)  # with the settings, and without the hooks
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = []
    pairs = []
    for group in optimizer.param_groups:
        made = [_meta_parameter(parameter) for parameter in group["params"]]
        fixed = {key: value for key, value in _DEVICE_SETTINGS.items() if key in group}
        stand_in.param_groups.append({**group, **fixed, "params": made})
        pairs += [(group, *pair) for pair in zip(group["params"], made, strict=True)]
    inspect.unwrap(type(optimizer).step)(stand_in)  # without the hooks of all optimizers
    return {
        parameter: _without_memory(stand_in.state[meta], parameter, group)
        for group, parameter, meta in pairs
        if meta in stand_in.state
    }


def _meta_parameter(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter without memory; with a gradient where *parameter* will get one."""
    local = parameter.to_local() if is_dtensor(parameter) else parameter
    meta = _sharded_like(torch.empty_like(local, device="meta"), parameter)
    made = torch.nn.Parameter(meta, requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        made.grad = torch.zeros_like(meta)
    return made


def _without_memory(
    state: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]
) -> dict[str, Any]:
    is_on_device = bool(group.get("fused") or group.get("capturable"))
    found: dict[str, Any] = {}
    for field, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[field] = value
            continue
        local = value.to_local() if is_dtensor(value) else value
        device = parameter.device if local.is_meta or is_on_device else local.device
        dtype = torch.float32 if group.get("fused") and not local.dim() else local.dtype
        expanded = torch.empty((), dtype=dtype, device=device).expand(local.shape)
        found[field] = _sharded_like(expanded, value)
    return found


def _sharded_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return *local* as the part of a DTensor where *like* is one."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
