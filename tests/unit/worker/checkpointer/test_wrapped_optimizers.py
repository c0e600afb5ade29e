"""Optimizers that frameworks wrap: what is saved is that of torch's optimizers inside."""

import contextlib

import pytest
import torch
from torch import nn

from gpuops.checkpoint.types import CheckpointError
from gpuops.worker.assemble import StateAssembler

pytestmark = pytest.mark.torch


class Wrapper(torch.optim.Optimizer):
    """As accelerate's and torchft's: without the attributes that torch's constructor makes."""

    def __init__(self, name, inner):
        setattr(self, name, inner)


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer that steps several."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})


def parts_of(model, optimizer):
    parts = StateAssembler(allow_pickle=False, warn=pytest.fail)
    parts.add_model(model)
    parts.add_optimizer(optimizer)
    return parts


def adam(part):
    return torch.optim.AdamW(part.parameters())


@pytest.mark.parametrize("name", ["optimizer", "optim"])
def test_a_wrappers_own_optimizer_is_saved_and_hooked(name):
    model = nn.Linear(2, 2)
    inner = adam(model)

    parts = parts_of(model, Wrapper("optim", Wrapper(name, inner)))

    assert parts.optimizers == [inner]
    assert [part.key for part in parts.adapters] == ["model", "optimizer"]


def test_a_containers_optimizers_are_saved_apart():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    both = [adam(part) for part in model]

    parts = parts_of(model, {"main": Container(both)})

    assert parts.optimizers == both
    assert [part.key for part in parts.adapters][1:] == ["optimizer.main.0", "optimizer.main.1"]


def test_a_wrapper_that_hides_its_optimizer_is_refused_with_its_name():
    with pytest.raises(CheckpointError, match="optimizer is a Wrapper, which wraps"):
        parts_of(nn.Linear(2, 2), Wrapper("hidden", None))


@pytest.fixture
def group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(dist.destroy_process_group)
        yield


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_of_a_sharded_optimizer_the_settings_that_schedulers_change_are_saved(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5)
    parts = parts_of(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25  # after a step, which is when a scheduler acts

    parts.adapters[1].read()

    assert parts.optimizers == [optimizer.optim]
    assert optimizer.optim.param_groups[0]["lr"] == 0.25
