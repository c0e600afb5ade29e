"""A state that was written while the device copied it is not saved, and training goes on."""

import pytest
import torch
from support.fake_cuda import FakeCuda
from torch import nn

from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.staging.pending_copy import PendingCopy


class TwoWeights(torch.optim.SGD):
    """Trains one set of weights and evaluates another, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.lerp_(torch.zeros_like(parameter), 0.1)


class Job:
    """Trains a model with an embedding on the device, which copies behind the computing."""

    def __init__(self, node):
        self.model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 1))
        self.optimizer = TwoWeights(self.model.parameters(), lr=0.1, momentum=0.9)
        self.ck = Checkpointer(
            model=self.model, optimizer=self.optimizer, every=1, keeper=node.connect()
        )
        self.ck.restore()
        self.n_steps = 0

    def train(self, between=lambda: None, indexes=()):
        """Make a step of the optimizer, save the state, and do *between* the steps."""
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.n_steps += 1
        self.ck.step(self.n_steps)
        if indexes:
            self.model(torch.tensor(indexes))
        between()

    def fence(self):
        """Begin a step of the optimizer, which on a device waits for the copy."""
        self.optimizer.zero_grad()
        self.optimizer.step()

    @torch.no_grad()
    def clamp(self):
        self.model[1].weight.clamp_(-0.01, 0.01)

    @torch.no_grad()
    def merge_adapter(self):
        self.model[1].weight += torch.ones(1, 1) @ torch.ones(1, 3)


WRITERS = {
    "max_norm": lambda job: job.train(indexes=[0, 1, 2]),
    "schedule-free": lambda job: job.train(job.optimizer.eval),
    "clamp": lambda job: job.train(job.clamp),
    "adapter": lambda job: job.train(job.merge_adapter),
}


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda(monkeypatch)
    fake.hold_tensors(monkeypatch)
    return fake


@pytest.fixture
def job(cuda, node):
    job = Job(node)
    for _ in range(2):  # memory is reserved
        job.train()
        cuda.catch_up()
    yield job
    job.ck.close(save=False)


def test_what_only_the_optimizer_changes_is_copied_beside_the_training(job, cuda):
    job.train()
    saved = job.ck.stats["saved"]

    job.train()
    assert job.ck.stats["saved"] == saved, "the device has not copied yet"
    cuda.catch_up()
    job.train()

    assert job.ck.stats["saved"] == saved + 1
    assert job.ck.stats["off"] is None


@pytest.mark.parametrize("writer", WRITERS)
def test_a_state_that_is_written_while_it_is_copied_is_not_saved(job, cuda, warnings, writer):
    WRITERS[writer](job)
    saved = job.ck.stats["saved"]
    cuda.catch_up()
    job.train()
    cuda.catch_up()

    assert job.ck.stats["skipped"]["tensors were written while they were copied"] == 1
    assert job.ck.stats["saved"] == saved
    (text,) = warnings()
    assert f"the state after step {job.n_steps - 1} is not saved: model." in text
    job.train()
    assert job.ck.stats["saved"] == saved + 1, "the next state, which nothing wrote, is saved"


@pytest.mark.parametrize("writer", WRITERS)
def test_after_two_torn_copies_training_waits_for_each_and_all_are_saved(
    job, cuda, warnings, writer
):
    for _ in range(6):
        WRITERS[writer](job)
        cuda.catch_up()

    skipped = job.ck.stats["skipped"]
    assert skipped["tensors were written while they were copied"] == 2
    (text,) = warnings()
    assert "if that happens again, the training waits for each copy" in text
    before = job.ck.stats["saved"]
    WRITERS[writer](job)
    cuda.catch_up()
    WRITERS[writer](job)
    assert job.ck.stats["saved"] == before + 2
    assert job.ck.stats["off"] is None


@pytest.mark.parametrize(
    ("deeds", "step"),
    [
        ("fence, copy", 3),
        ("copy, fence", 3),
        ("fence", 2),
        ("copy", 2),  # it may be torn, and its rank can no longer be asked
        ("clamp, fence, copy", 2),
        ("clamp, copy", 2),
    ],
)
def test_a_rank_that_is_killed_loses_its_last_state_only_where_it_may_be_torn(
    job, node, cuda, deeds, step
):
    saved = {2: [p.detach().clone() for p in job.model.parameters()]}
    job.train()
    saved[3] = [p.detach().clone() for p in job.model.parameters()]
    assert job.ck.stats["keeper"]["newest"][1] == 2
    for deed in deeds.split(", "):
        {"fence": job.fence, "copy": cuda.catch_up, "clamp": job.clamp}[deed]()
    node.kill()
    cuda.catch_up()
    again = Job(node)

    assert again.ck.stats["restored"]["step"] == step
    assert all(map(torch.equal, again.model.parameters(), saved[step]))


def test_a_write_after_the_fence_comes_after_the_copy():
    weight = torch.zeros(3)
    pending = PendingCopy(sources=[("weight", (weight.detach(),))])
    pending.wait_before_step()
    weight.add_(1)

    assert pending.written() == []


def test_the_memory_of_a_parameter_that_gets_other_memory_is_kept(job):
    weight = job.model[1].weight
    job.train()
    address = weight.data_ptr()
    weight.data = torch.zeros(1, 3)

    kept = [part.data_ptr() for _, tensors in job.ck._saver._pending._sources for part in tensors]
    assert address in kept
    assert weight.data_ptr() not in kept
