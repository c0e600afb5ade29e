"""What was given is put back where the script sees it, each value to its own; or it is refused."""

import copy

import pytest
import torch
from support.in_process_keeper import InProcessNode
from torch import nn

from gpuops.checkpoint.types import ArgumentError, CheckpointError
from gpuops.worker.checkpointer import Checkpointer


@pytest.fixture
def node():
    node = InProcessNode()
    yield node
    node.close()


def checkpointer(node, **given):
    return Checkpointer(keeper=node.connect(), every=1, **given)


def save(node, **given):
    with checkpointer(node, **given) as ck:
        ck.restore()
        ck.step(1)
        assert (ck.stats["saved"], ck.stats["off"]) == (1, None)


def load(node, **given):
    with checkpointer(node, **given) as ck:
        assert ck.restore() == 1


def ones(n=3):
    return torch.full((n,), 1.0)


def twos(n=3):
    return torch.full((n,), 2.0)


class Buffers(nn.Module):
    """A module with the tensors it is given as buffers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


KEYS = {
    "numbers and text": {1: ones(), "1": twos(), 2: "x"},
    "dots": {"a.b": ones(), "a": {"b": twos()}},
    "pairs": {("a", 1): ones(), ("a", 2): twos(), None: [ones(), (twos(), 2**70)]},
    "a number that is free": {("a",): ones(), ("b",): twos(), "#2": ones(5)},
}


@pytest.mark.parametrize("name", KEYS)
def test_any_keys_of_a_mapping_tell_its_tensors_apart(node, name):
    saved = copy.deepcopy(KEYS[name])
    save(node, extra={"x": saved, 7: 5})
    there = copy.deepcopy(saved)
    for tensor in (value for value in there.values() if isinstance(value, torch.Tensor)):
        tensor.zero_()
    extra = {"x": there, 7: 0}

    load(node, extra=extra)

    assert extra["x"] is there
    assert extra[7] == 5
    assert repr(there) == repr(saved)


def test_averages_that_begin_as_the_weights_themselves_are_not_loaded_into_them(node):
    save(node, model=Buffers(w=ones()), ema={"w": twos()}, extra={"best": 3 * ones(), "n": 1})
    model = Buffers(w=torch.zeros(3))
    ema, extra = {"w": model.w.detach()}, {"best": model.w, "n": 0}

    load(node, model=model, ema=ema, extra=extra)

    assert model.w.tolist() == [1.0] * 3
    assert ema["w"].tolist() == [2.0] * 3
    assert extra["best"].tolist() == [3.0] * 3


def test_a_tensor_that_is_given_twice_stays_one_where_it_was_one(node):
    weight = ones()
    save(node, model=Buffers(w=weight), extra={"again": {"w": weight}, "n": 1})
    model = Buffers(w=torch.zeros(3))
    extra = {"again": {"w": model.w}, "n": 0}

    load(node, model=model, extra=extra)

    assert model.w.tolist() == [1.0] * 3
    assert extra["again"]["w"] is model.w


@pytest.mark.parametrize("how", ["two modules", "tied weights"])
def test_what_is_one_now_and_was_not_is_refused_where_it_cannot_come_apart(node, how):
    def given(a, b):
        return Buffers(a=a, b=b) if how == "tied weights" else [Buffers(a=a), Buffers(b=b)]

    save(node, model=given(ones(), twos()))
    weight = torch.zeros(3)

    with pytest.raises(CheckpointError, match=r"model\.b and model\.a are one tensor here"):
        load(node, model=given(weight, weight))
    assert weight.tolist() == [0.0] * 3


def test_what_was_made_in_inference_mode_is_named_before_anything_is_changed(node):
    save(node, model=Buffers(a=ones(), b=ones()))
    with torch.inference_mode():
        made = torch.zeros(3)
    model = Buffers(a=torch.zeros(3), b=made)

    with pytest.raises(CheckpointError, match=r"model\.b was made in inference mode"):
        load(node, model=model)
    assert model.a.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"extra": [1, 2]}, r"extra\.0 is a int"),
        ({"extra": "text"}, r"extra is a str"),
        ({"extra": 5}, r"extra is a int"),
        ({"ema": [ones(), None]}, r"ema\.1 is a NoneType"),
        ({"extra": {1: 5, "1": 6}}, r"two things are called extra\.1"),
    ],
)
def test_what_could_not_be_given_back_is_refused_at_once(node, given, message):
    with pytest.raises(ArgumentError, match=message):
        checkpointer(node, **given)


def test_tensors_without_a_mapping_are_filled_or_refused(node):
    save(node, ema=[ones(), twos(2)], extra=ones())
    ema, extra = [torch.zeros(3), torch.zeros(2)], torch.zeros(3)

    load(node, ema=ema, extra=extra)

    assert [each.tolist() for each in (*ema, extra)] == [[1.0] * 3, [2.0] * 2, [1.0] * 3]
    with pytest.raises(CheckpointError, match=r"ema\.1 has another shape"):
        load(node, ema=[torch.zeros(3), torch.zeros(5)], extra=extra)


def test_a_name_that_is_taken_out_of_extra_is_said(node):
    extra = {"a": 1, "b": 2}
    with checkpointer(node, extra=extra) as ck:
        ck.restore()
        ck.step(1)
        del extra["b"]
        ck.step(2)
        assert ck.stats["off"] == "extra.b was given, and is no longer in its mapping"
