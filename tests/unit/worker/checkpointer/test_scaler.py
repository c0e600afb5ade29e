"""A gradient scaler is saved without waiting for its device."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpuops.worker.checkpointer import Checkpointer


class Calls(TorchDispatchMode):
    """Records what is called, such as the reading of a number, for which a device is awaited."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


class Plain:
    """The same state as numbers, as it was saved before."""

    def __init__(self, scaler):
        self.state_dict, self.load_state_dict = scaler.state_dict, scaler.load_state_dict


def scaler_of(n_steps):
    """Return a scaler that has made so many steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(n_steps):
        scaler.scale(model(torch.ones(1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("n_steps", [0, 3])
def test_a_save_reads_no_number_from_the_device(node, n_steps):
    with Checkpointer(scaler=scaler_of(n_steps), every=1, keeper=node.connect()) as ck:
        ck.restore()
        with Calls() as calls:
            ck.step(1)
        assert ck.stats["last_step"] == 1

    assert "_foreach_copy_" in calls.names
    assert "_local_scalar_dense" not in calls.names


@pytest.mark.parametrize("saved_as", [lambda scaler: scaler, Plain])
@pytest.mark.parametrize("n_steps", [0, 3])
def test_a_scaler_comes_back_also_from_numbers(node, saved_as, n_steps):
    given = scaler_of(n_steps)
    with Checkpointer(scaler=saved_as(given), every=1, keeper=node.connect()) as ck:
        ck.restore()
        ck.step(1)
    for other in (scaler_of(0), scaler_of(1)):
        with Checkpointer(scaler=other, every=1, keeper=node.connect()) as ck:
            assert ck.restore() == 1
        assert other.state_dict() == given.state_dict()
        assert all(type(value) in {int, float} for value in other.state_dict().values())


def test_the_first_use_of_a_scaler_needs_no_other_memory(node):
    scaler = torch.amp.GradScaler("cpu")
    with Checkpointer(scaler=scaler, every=1, keeper=node.connect()) as ck:
        ck.restore()
        planned = ck._saver._copier
        scaler.scale(torch.ones(1))
        ck.step(1)

        assert ck._saver._copier is planned
