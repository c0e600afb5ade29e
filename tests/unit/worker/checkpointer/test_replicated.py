"""What a rank declares as held alike by others: what torch keeps equal, and nothing else."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardDim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpuops.checkpoint.agreement.replicated import read_replicated
from gpuops.checkpoint.types import Shard
from gpuops.worker.assemble import StateAssembler
from gpuops.worker.staging.capture import StateCapturer

WORLD, RANK = 8, 3


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    yield
    dist.destroy_process_group()


def declared(model, optimizer=None, **given):
    """Return {names: ranks} as the header of the image of this rank says it."""
    parts = StateAssembler(allow_pickle=False, warn=pytest.fail)
    parts.add_model(model)
    parts.add_optimizer(optimizer)
    for kind, value in given.items():
        parts.add_values(kind, value)
    shard = Shard(RANK, WORLD)
    layout = StateCapturer(parts.adapters, shard, allow_pickle=False).capture(1).plan.layout
    return {
        tuple(sorted(layout.tensors[number].spec.name for number in each.tensors)): each.ranks
        for each in read_replicated(layout.header, shard, len(layout.tensors))
    }


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def trained(model, optimizer):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def adam(model):
    return trained(model, torch.optim.AdamW(model.parameters()))


NAMES = ("0.bias", "0.weight", "1.bias", "1.weight")
STATE = tuple(f"optimizer.state.{n}.{f}" for n in NAMES for f in ("exp_avg", "exp_avg_sq", "step"))
OF_NET = tuple(f"model.{name}" for name in NAMES)
ALL = tuple(range(WORLD))


def test_ddp_declares_its_trained_parameters_and_their_state_and_no_buffers():
    model = DistributedDataParallel(net())

    assert declared(model, adam(model)) == {(*OF_NET, *STATE): ALL}


def test_ddp_is_found_in_the_model_and_in_a_group_of_its_own():
    group = dist.new_group([1, 3, 5])
    inner = DistributedDataParallel(net(), process_group=group)
    model = nn.Sequential(nn.Linear(1, 1), inner)

    found = declared(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert found == {tuple(f"model.1.{name}" for name in NAMES): (1, 3, 5)}


def test_plain_modules_declare_nothing():
    model = net()

    assert declared(model, adam(model)) == {}


def test_a_group_of_one_declares_nothing():
    model = DistributedDataParallel(net(), process_group=dist.new_group([RANK]))

    assert declared(model, adam(model)) == {}


def test_without_an_optimizer_nothing_is_trained():
    assert declared(DistributedDataParallel(net())) == {}


def test_frozen_parameters_are_declared_and_ignored_ones_and_averages_are_left_out():
    inner = net()
    inner[0].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["1.bias"])
    model = DistributedDataParallel(inner)
    average = AveragedModel(inner)

    found = declared(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=average)

    assert found == {("model.0.bias", "model.0.weight", "model.1.weight"): ALL}


def test_tied_weights_are_declared_once():
    inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    inner[1].weight = inner[0].weight
    model = DistributedDataParallel(inner)

    assert declared(model, torch.optim.SGD(model.parameters(), lr=0.1)) == {
        ("model.0.weight",): ALL
    }


class Own(torch.optim.AdamW):
    """An optimizer of somebody's own: its state may be on one rank only."""


def test_the_state_of_an_optimizer_that_is_not_torch_s_may_differ():
    model = DistributedDataParallel(net())

    assert declared(model, trained(model, Own(model.parameters()))) == {OF_NET: ALL}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("rank", [RANK, 0])
def test_a_part_of_a_zero_optimizer_s_state_is_of_one_rank_and_its_parameters_of_all(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    optimizer.optim.param_groups[0]["params"] = list(model.parameters())[rank : rank + 1]
    trained(model, optimizer)

    assert declared(model, optimizer) == {OF_NET: ALL}
    optimizer.broadcast_fp16 = True  # of fairscale's: others get rounded parameters
    assert declared(model, optimizer) == {}


@pytest.mark.parametrize(
    ("hook", "is_alike"),
    [
        (default_hooks.fp16_compress_hook, True),
        (default_hooks.allreduce_hook, True),
        (default_hooks.fp16_compress_wrapper(post_localSGD_hook.post_localSGD_hook), False),
        (post_localSGD_hook.post_localSGD_hook, False),
        (functools.partial(default_hooks.allreduce_hook), False),
    ],
    ids=["fp16", "allreduce", "wrapped", "post-local", "partial"],
)
def test_a_hook_that_may_give_each_rank_gradients_of_its_own_ends_it(hook, is_alike):
    model = DistributedDataParallel(net())
    model._comm_hooks.append((hook, None))  # to register one takes signatures that torch checks

    found = declared(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert found == ({OF_NET: ALL} if is_alike else {})


def test_hsdp_declares_along_the_dimension_that_replicates():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)

    assert declared(model, adam(model)) == {(*OF_NET, *STATE): (3, 7)}


def test_fsdp_alone_has_no_replicas():
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))

    assert declared(model, adam(model)) == {}


def test_tensor_parallel_parameters_that_are_replicated_and_such_that_are_not():
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.norm = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [ShardDim(0)]))

    found = declared(model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert found == {("model.norm",): (2, 3)}
