"""The state after the last step is saved where it is sure to be that, and else it is said."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.final_save import LastStepTracker

LAST = 23


class Pair:
    """Two models that are trained beside each other, or in turns."""

    def __init__(self, momentum=0.9):
        self.models = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)}
        self.optimizers = {
            name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
            for name, model in self.models.items()
        }

    def loss(self, name):
        self.optimizers[name].zero_grad()
        return self.models[name](torch.ones(2)).sum()

    def step(self, name):
        self.loss(name).backward()
        self.optimizers[name].step()

    def given(self):
        return {"model": self.models, "optimizer": self.optimizers}

    def weights(self):
        return [model.weight.detach().clone() for model in self.models.values()]


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def begin(node, tmp_path):
    """Return a function that begins to save what it is given, never before the end."""

    def begin(**given):
        place = tmp_path / "states"
        ck = Checkpointer(**given, every=1000, directory=place, keeper=node.connect())
        assert ck.restore() == 0
        return ck

    return begin


@pytest.fixture
def is_last(node):
    """Return a function that says whether the next start goes on from a pair's last state."""

    def is_last(pair):
        other = Pair()
        with Checkpointer(**other.given(), keeper=node.connect()) as ck:
            return ck.restore() == LAST and all(map(torch.equal, other.weights(), pair.weights()))

    return is_last


@pytest.fixture
def missed(warnings):
    """Return a function that returns what was said of a last state that is not saved."""
    return lambda: [text for text in warnings() if "the last one, is not saved" in text]


def trained_steps(pair, ck, each):
    """Yield the numbers of steps that were made and told; one optimizer steps at each *each*."""
    for n in range(1, LAST + 1):
        pair.step("d")
        if n % each == 0:
            pair.step("g")
        ck.step(n)
        yield n


@pytest.mark.parametrize("each", [1, 5, LAST])
def test_an_optimizer_need_not_step_at_each_step(pair, begin, is_last, missed, each):
    with begin(**pair.given()) as ck:
        list(trained_steps(pair, ck, each))

    assert is_last(pair)
    assert not missed()


def test_a_scaler_may_leave_the_last_step_out(pair, begin, is_last, missed):
    scaler = torch.amp.GradScaler("cpu")
    with begin(**pair.given()) as ck:
        for n in range(1, LAST + 1):
            for name, optimizer in pair.optimizers.items():
                scaler.scale(pair.loss(name)).backward()
                if n == LAST:
                    pair.models[name].weight.grad.fill_(float("inf"))
                scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            ck.step(n)
        assert scaler.get_scale() < before

    assert is_last(pair)
    assert not missed()


@pytest.mark.parametrize("who", ["d", "g"])
def test_a_step_after_the_last_that_was_told_of_is_said(pair, begin, is_last, missed, who):
    with begin(**pair.given()) as ck:
        list(trained_steps(pair, ck, 5))
        pair.step(who)

    assert not is_last(pair)
    assert ["an optimizer has stepped since" in text for text in missed()] == [True]


def save_and_load_with_torch(pair, name):
    """Before it does so torch makes a step of an optimizer without state: with a rate of 0."""
    model, optimizer = pair.models[name], pair.optimizers[name]
    optimizer.zero_grad()
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


@pytest.mark.parametrize("each", [1, 5])
@pytest.mark.parametrize("after", [LAST - 1, LAST])
def test_the_step_with_which_torch_makes_an_optimizers_state_is_none(
    begin, node, missed, each, after
):
    pair = Pair(momentum=0)
    with begin(**pair.given()) as ck:
        for n in trained_steps(pair, ck, each):
            if n == after:
                save_and_load_with_torch(pair, "g")

    other = Pair(momentum=0)
    with Checkpointer(**other.given(), keeper=node.connect()) as ck:
        assert ck.restore() == LAST
    assert all(map(torch.equal, other.weights(), pair.weights()))
    assert not missed()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("compiled_after", [LAST - 2, LAST])
def test_a_compiled_step_is_not_taken_for_none(pair, begin, is_last, missed, compiled_after):
    """It calls no hook, though those before it have."""

    def compiled():
        pair.loss("g").backward()
        torch.compile(pair.optimizers["g"].step, backend="eager")()

    with begin(**pair.given()) as ck:
        for n in range(1, LAST + 1):
            pair.step("d")
            if n < LAST - 1:
                pair.step("g")
            elif n == compiled_after + 1:
                compiled()
            ck.step(n)
        if compiled_after == LAST:
            compiled()

    assert not is_last(pair)
    assert ["may have stepped since" in text for text in missed()] == [True]


def adamw(parameters, **how):
    return torch.optim.AdamW(parameters, lr=0.1, **how)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize(("how", "n_frozen"), [({"fused": True}, 0), ({}, 20)])
def test_a_compiled_step_of_which_nothing_tells_is_not_taken_for_none(
    begin, node, missed, how, n_frozen
):
    """A fused one counts nothing up, and another nothing of parameters that are not trained."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(n_frozen // 2 + 1))
    optimizer = adamw(layers.parameters(), **how)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    with begin(model=layers, optimizer=optimizer) as ck:
        for n in range(1, 5):
            layers[-1](torch.ones(2)).sum().backward()
            (optimizer.step if n == 1 else compiled)()
            if n < 4:
                ck.step(n)

    assert ["may have stepped since" in text for text in missed()] == [True]
    with Checkpointer(model=layers, optimizer=optimizer, keeper=node.connect()) as ck:
        assert ck.restore() == 0


def test_after_a_capture_only_what_has_just_told_of_a_step_is_trusted(pair):
    last = LastStepTracker(list(pair.optimizers.values()), is_persistent=True)
    for name in ("g", "d"):
        pair.loss(name).backward()
        last.on_optimizer_step(pair.optimizers[name])
    last.record(1)
    last.record(2)
    assert last.unsafe_reason() == ""

    last.on_graph_capture()
    last.record(3)
    assert "CUDA graph" in last.unsafe_reason()
    for name in ("g", "d"):
        last.on_optimizer_step(pair.optimizers[name])
    last.record(4)
    assert last.unsafe_reason() == ""


@pytest.mark.parametrize("stepping", ["d", "no optimizer"])
def test_where_no_step_was_ever_seen_it_is_said(pair, begin, is_last, missed, stepping):
    given = pair.given() if stepping == "d" else {"model": pair.models}
    with begin(**given) as ck:
        for n in range(1, LAST + 1):
            pair.step("d")
            ck.step(n)

    assert not is_last(pair)
    assert ["no optimizer step was observed" in text for text in missed()] == [True]


@pytest.mark.parametrize(("named", "every"), [(True, 1), (False, 1000)])
def test_nothing_is_said_where_it_is_saved_or_does_not_persist(
    node, tmp_path, missed, named, every
):
    place = tmp_path / "states" if named else None
    with Checkpointer(
        model=nn.Linear(1, 1), every=every, directory=place, keeper=node.connect()
    ) as ck:
        ck.step(1)
        ck.step(2)

    assert not missed()
