"""Optimizers of which each rank has a part of the state: saved by rank, loaded by any number."""

import contextlib

import pytest
import torch
from support.in_process_keeper import InProcessNode
from support.placed import as_rank
from torch import nn

from gpuops.checkpoint.types import ArgumentError
from gpuops.worker.checkpointer import Checkpointer

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
WORLD, STEPS = 2, (1, 2)  # the first is skipped: not all ranks have reserved memory


def zero(params, kind, **options):
    """Return torch's own, whose module warns when it is imported."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, kind, **options)


class OSS(torch.optim.Optimizer):
    """As fairscale's: not torch's own class, and with the parts of this rank in ``optim``."""

    def __init__(self, params, kind, **options):
        super().__init__(params, options)
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = self.param_groups[0]["params"][rank::world]
        self.optim = kind([{"params": own}], **options)
        self.consolidate_state_dict = self.state_dict = lambda: pytest.fail("it sends all parts")


class Job:
    """Parameters of one shape, so that any state of one fits another one."""

    def __init__(self, kind, folder, node, rank, world, *, is_named):
        self.rank, self.world = rank, world
        self.parameters = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
        self.optimizer = kind(self.parameters, torch.optim.AdamW, lr=0.5)
        model = nn.ParameterList(self.parameters) if is_named else nn.Linear(1, 1)
        keeper = node.connect(rank=rank, world=world, local_rank=rank, local_world=world)
        self.checkpointer = Checkpointer(
            model=model,
            optimizer=self.optimizer,
            every=1,
            directory=folder,
            persist_every=0,
            keeper=keeper,
        )

    def step(self, n):
        for number, parameter in enumerate(self.parameters):
            parameter.grad = torch.full((3,), 1.0 + number)
        self.optimizer.optim.step()
        self.optimizer.param_groups[0]["lr"] = 0.25  # as schedulers do
        self.checkpointer.step(n)
        assert self.checkpointer.stats["off"] is None

    def averages(self):
        """Return the average of the gradient of each parameter of this rank, by its number."""
        numbers = {id(each): number for number, each in enumerate(self.parameters)}
        state = self.optimizer.optim.state
        return {numbers[id(each)]: entry["exp_avg"][0].item() for each, entry in state.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("is_named", [True, False], ids=["in the model", "in no model"])
@pytest.mark.parametrize("kind", [zero, OSS], ids=["torch", "fairscale"])
def test_each_rank_gets_the_state_of_its_part(tmp_path, kind, is_named, world):
    with contextlib.closing(InProcessNode()) as node:
        jobs = []
        for rank in range(WORLD):
            with as_rank(rank, WORLD):
                jobs.append(Job(kind, tmp_path, node, rank, WORLD, is_named=is_named))
                assert jobs[-1].checkpointer.restore() == 0
        for n in STEPS:
            for job in jobs:
                with as_rank(job.rank, WORLD):
                    job.step(n)
        saved = jobs[0].averages() | jobs[1].averages()
        for job in jobs:
            job.checkpointer.close(save=False)
    assert len(saved) == len(set(saved.values())) == 4

    loaded = []
    for rank in range(world):
        with contextlib.closing(InProcessNode()) as node, as_rank(rank, world):
            job = Job(kind, tmp_path, node, rank, world, is_named=is_named)
            assert job.checkpointer.restore() == STEPS[-1]
            assert job.optimizer.param_groups[0]["lr"] == 0.25
            loaded += job.averages().items()
            job.checkpointer.close(save=False)
    assert sorted(loaded) == sorted(saved.items())


def test_a_part_that_ddp_makes_in_its_first_steps_is_refused():
    with as_rank(0, 2):
        parameters = [nn.Parameter(torch.zeros(3))]
        optimizer = zero(parameters, torch.optim.AdamW, overlap_with_ddp=True)
        with pytest.raises(ArgumentError, match="optimizer is a ZeroRedundancyOptimizer whose"):
            Checkpointer(optimizer=optimizer)
