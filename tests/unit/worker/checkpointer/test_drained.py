"""A drain of a script that never asks: the state of the step at which all ranks stop is saved."""

import contextlib

import pytest
import torch
from support.rings import connected
from torch import nn

from gpuops.wire.ring import STEP_UNKNOWN, WorkerFlag
from gpuops.worker import api
from gpuops.worker.checkpointer import Checkpointer

STOP = 7
SAVES, SAVED = WorkerFlag.SAVES_AT_STOP, WorkerFlag.SAVED_AT_STOP


@pytest.fixture
def ring():
    with connected() as ring:
        yield ring


class Job:
    """A training that saves into a directory, seldom or never by itself."""

    def __init__(self, node, directory=None, every=1000, generation=0):
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ck = Checkpointer(
            model=self.model,
            optimizer=self.optimizer,
            every=every,
            directory=directory,
            keeper=node.connect(generation=generation),
        )
        self.start = self.ck.restore()

    def train(self, *steps):
        for n in steps:
            self.optimizer.zero_grad()
            self.model(torch.ones(2)).sum().backward()
            self.optimizer.step()
            self.ck.step(n)

    def weights(self):
        return self.model.weight.detach().clone()


def resumed(node):
    """Return the step and the weights from which the next start goes on."""
    job = Job(node, generation=1)
    with contextlib.closing(job.ck):
        return job.start, job.weights()


@pytest.mark.parametrize("every", [1000, 3])
def test_the_state_of_the_stop_step_is_saved_and_none_after_it(node, ring, tmp_path, every):
    job = Job(node, tmp_path, every=every)
    job.train(*range(1, 5))
    assert ring.flags & (SAVES | SAVED) == SAVES
    ring.drain(STOP)
    job.train(5, 6)
    assert not ring.flags & SAVED
    job.train(STOP)
    assert ring.flags & SAVED
    saved = job.weights()
    job.train(*range(STOP + 1, STOP + 5))
    node.kill()

    start, weights = resumed(node)
    assert start == STOP
    assert torch.equal(weights, saved)


def test_a_script_that_asks_ends_with_the_same_state(node, ring, tmp_path):
    job = Job(node, tmp_path)
    ring.drain(STOP)
    for n in range(1, 100):
        job.train(n)
        if api.should_stop():
            break
    job.ck.close()

    start, weights = resumed(node)
    assert (n, start) == (STOP, STOP)
    assert torch.equal(weights, job.weights())


def test_a_script_that_asks_less_often_ends_with_its_own_last_step(node, ring, tmp_path):
    job = Job(node, tmp_path)
    ring.drain(STOP)
    job.train(*range(1, STOP + 4))
    job.ck.close()

    start, weights = resumed(node)
    assert start == STOP + 3
    assert torch.equal(weights, job.weights())


def test_where_no_common_step_is_known_the_next_one_is_saved(node, ring, tmp_path):
    job = Job(node, tmp_path)
    ring.drain(STEP_UNKNOWN)
    job.train(1)
    assert ring.flags & SAVED
    node.kill()

    assert resumed(node)[0] == 1


def test_without_a_directory_nobody_waits_for_a_state_that_memory_alone_would_hold(node, ring):
    job = Job(node)
    ring.drain(1)
    job.train(1, 2)

    assert not ring.flags & (SAVES | SAVED)


def test_workers_that_are_ended_for_a_failure_save_nothing(node, ring, tmp_path):
    job = Job(node, tmp_path)
    job.train(1)
    ring.end()
    job.train(2)

    assert not ring.flags & SAVED


def test_a_state_that_cannot_be_saved_is_said_and_the_agent_waits_no_longer(
    node, ring, tmp_path, warnings
):
    job = Job(node, tmp_path)
    job.train(1)
    node.kill()
    job.ck._saver.turn_off(ValueError("broken"))
    ring.drain(2)
    job.train(2)

    assert ring.flags & SAVED
    assert any("the state after step 2, the last one, is not saved" in text for text in warnings())
