"""On a GPU: what is saved is the state of its step, though training goes on at once."""

import statistics
import time

import pytest
import torch
from support.in_process_keeper import InProcessNode
from torch import nn

from gpuops.worker.checkpointer import Checkpointer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
N_TENSORS, N_EACH = 64, 4 * 2**20


def big_model():
    return nn.ParameterList(
        nn.Parameter(torch.randn(N_EACH, device="cuda")) for _ in range(N_TENSORS)
    )


def await_copy(ck):
    end_s = time.monotonic() + 30
    while ck._saver._pending is not None:
        ck._saver.poll()
        assert time.monotonic() < end_s


def test_what_is_saved_is_the_state_of_its_step_while_training_goes_on():
    node = InProcessNode()
    model = big_model()
    model.register_buffer("average", torch.zeros(2**20, device="cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    with Checkpointer(model=model, optimizer=optimizer, every=1, keeper=node.connect()) as ck:
        ck.restore()
        for step in range(1, 9):
            optimizer.step()
            model.average.fill_(step)
            wanted = [parameter.detach().clone() for parameter in model]
            saved = ck.stats["saved"]
            ck.step(step)
            model.average.fill_(-1)
            optimizer.step()
            await_copy(ck)
            assert ck.stats["saved"] == saved + 1, ck.stats
        assert ck.stats["off"] is None
    other = big_model()
    other.register_buffer("average", torch.zeros(2**20, device="cuda"))
    with Checkpointer(
        model=other, optimizer=torch.optim.SGD(other.parameters()), keeper=node.connect()
    ) as ck:
        assert ck.restore() == 8

    assert all(torch.equal(a, b) for a, b in zip(other, wanted, strict=True))
    assert torch.equal(other.average, torch.full_like(other.average, 8))


def test_an_optimizer_in_a_cuda_graph_is_not_copied_beside():
    node = InProcessNode()
    model = big_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Checkpointer(model=model, optimizer=optimizer, every=1, keeper=node.connect()) as ck:
        ck.restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for step in range(1, 6):
            graph.replay()
            wanted = [parameter.detach().clone() for parameter in model]
            ck.step(step)
            graph.replay()
            await_copy(ck)
        assert ck.stats["saved"] == 5, ck.stats
    other = big_model()
    with Checkpointer(
        model=other, optimizer=torch.optim.SGD(other.parameters()), keeper=node.connect()
    ) as ck:
        ck.restore()

    assert all(torch.equal(a, b) for a, b in zip(other, wanted, strict=True))


def test_after_a_capture_nothing_is_certain_of_an_optimizer_that_tells_of_no_step():
    model = nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    keeper = InProcessNode().connect()
    with Checkpointer(model=model, optimizer=optimizer, every=100, keeper=keeper) as ck:
        ck.restore()
        optimizer.step()
        ck.step(1)
        ck.step(2)
        assert ck._last_step.unsafe_reason() == ""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        graph.replay()
        ck.step(3)
        assert "CUDA graph" in ck._last_step.unsafe_reason()


def test_the_host_does_not_wait_for_the_copy():
    node = InProcessNode()
    model = big_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    calls_s, copies_s = [], []
    with Checkpointer(model=model, optimizer=optimizer, every=1, keeper=node.connect()) as ck:
        ck.restore()
        for step in range(1, 12):
            optimizer.step()
            torch.cuda.synchronize()
            begun_s = time.monotonic()
            ck.step(step)
            calls_s.append(time.monotonic() - begun_s)
            torch.cuda.synchronize()
            copies_s.append(time.monotonic() - begun_s)
            await_copy(ck)

    assert statistics.median(calls_s[3:]) < statistics.median(copies_s[3:])
