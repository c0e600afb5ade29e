"""What a rank finds damaged while it reads memory is loaded from elsewhere, or is an error."""

import pytest
import torch
from torch import nn

from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError
from gpuops.worker.checkpointer import Checkpointer

pytestmark = pytest.mark.torch


class Job:
    """A model with all kinds of tensors, over two chunks of an image, and its optimizer."""

    def __init__(self):
        self.model = model = nn.Module()
        model.long = nn.Parameter(torch.zeros(23 * 10**5))
        model.tied = nn.Linear(300, 7)
        model.second = model.tied
        model.strided = nn.Parameter(torch.zeros(600, 301).t())
        model.empty = nn.Parameter(torch.zeros(0, 3))
        model.one = nn.Parameter(torch.zeros(()))
        model.low = nn.Parameter(torch.zeros(2**17 + 1, dtype=torch.bfloat16))
        model.register_buffer("flags", torch.zeros(10**5, dtype=torch.bool))
        model.register_buffer("waves", torch.zeros(10**4, dtype=torch.complex64))
        model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.extra = {"shared": self.model.long.detach()[:70_000], "n": 0}

    def advance(self, step):
        for parameter in self.model.parameters():
            numbers = torch.arange(parameter.numel(), dtype=torch.float32).mul_(step)
            parameter.grad = numbers.view(parameter.shape).to(parameter.dtype)
        self.optimizer.step()
        self.model.flags.fill_(step % 2 == 0)
        self.model.waves.fill_(complex(step, -step))
        self.model.count.fill_(step)
        self.extra["n"] = step

    def values(self):
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        tensors = [*self.model.state_dict().values(), *momenta, self.extra["shared"]]
        return [tensor.clone() for tensor in tensors], self.extra["n"]

    def checkpointer(self, node, directory=None):
        return Checkpointer(
            model=self.model,
            optimizer=self.optimizer,
            extra=self.extra,
            every=1,
            directory=directory,
            persist_every=0,
            keeper=node.connect(),
        )

    def restore(self, node, directory=None):
        with self.checkpointer(node, directory) as ck:
            step = ck.restore()
            return step, ck.stats["restored"]["tier"]


def same(a, b):
    return a[1] == b[1] and all(map(torch.equal, a[0], b[0]))


def saved(node, steps, directory=None):
    """Save *steps*; return the values of each."""
    job, found = Job(), {}
    with job.checkpointer(node, directory) as ck:
        ck.restore()
        for step in steps:
            job.advance(step)
            ck.step(step)
            found[step] = job.values()
        assert ck.stats["saved"] == len(steps)
    return found


def newest_memory(node):
    memory = node.core.memory
    (shard,) = memory.complete_shards(memory.complete_states()[0]).values()
    return shard.memory


# Of the header, of a long tensor that is in both chunks, and of the metadata.
AT = [4000, CHUNK_BYTES - 1, CHUNK_BYTES, -1]


@pytest.mark.parametrize("at", AT[2:])
def test_a_directory_refills_what_is_damaged_in_memory(node, tmp_path, at):
    directory = str(tmp_path / "states")
    values = saved(node, [1, 2], directory)
    newest_memory(node).view[at] ^= 1
    node.events()
    job = Job()

    assert job.restore(node, directory) == (2, "persistent")
    assert same(job.values(), values[2])
    (told,) = [event for event in node.events() if event["kind"] == "corrupt"]
    assert (told["state"], told["tier"]) == ([0, 2], "memory")


@pytest.mark.parametrize("at", AT[:2])
def test_without_another_copy_the_state_before_is_loaded_whole(node, warnings, at):
    values = saved(node, [1, 2])
    newest_memory(node).view[at] ^= 1
    job = Job()

    assert job.restore(node) == (1, "memory")
    assert same(job.values(), values[1])
    assert any("step 2" in each and "corrupt in 1 of 2 pieces" in each for each in warnings())


def test_where_nothing_is_intact_that_is_an_error_and_the_next_workers_begin_anew(node):
    saved(node, [1])
    newest_memory(node).view[100] ^= 1

    with pytest.raises(CheckpointError, match=r"step 1 .* is damaged, and there is no older"):
        Job().restore(node)
    with Job().checkpointer(node) as ck:
        assert ck.restore() == 0


def test_what_was_damaged_only_when_it_was_read_is_read_again(node):
    values = saved(node, [1, 2])
    memory = newest_memory(node)
    keeper = node.connect()
    open_shard, n_opened = keeper.open_shard, []

    def open_once_damaged(point, shard):
        image = open_shard(point, shard)
        memory.view[CHUNK_BYTES] ^= not n_opened
        n_opened.append(1)
        return image

    def reject(point, why, **kwargs):
        memory.view[CHUNK_BYTES] ^= 1
        type(keeper).reject(keeper, point, why, **kwargs)

    keeper.open_shard, keeper.reject = open_once_damaged, reject
    job = Job()
    with Checkpointer(
        model=job.model, optimizer=job.optimizer, extra=job.extra, every=1, keeper=keeper
    ) as ck:
        assert ck.restore() == 2
        assert ck.stats["restored"]["tier"] == "memory"
    assert same(job.values(), values[2])
    assert len(n_opened) == 2


def test_intact_memory_is_loaded_at_once(node):
    values = saved(node, [1, 2])
    job = Job()

    assert job.restore(node) == (2, "memory")
    assert same(job.values(), values[2])
