"""What can be saved comes back bit for bit; what cannot is named, and training goes on."""

import contextlib
import copy
import json
import random
import shutil
from contextlib import closing, suppress

import numpy as np
import pytest
import torch
from support.in_process_keeper import InProcessNode
from support.same_state import same
from torch import nn

from gpuops.checkpoint.image import read_layout, read_metadata_blob
from gpuops.checkpoint.keeper.messages import Skipped
from gpuops.checkpoint.storage.inspection import AUTO, ChosenInterval
from gpuops.checkpoint.types import CheckpointError, KeeperError, Shard, StructureError
from gpuops.plan.failure_rate import FailureRate
from gpuops.resources import data_dir
from gpuops.rules import load_rules
from gpuops.wire.ring import RING_BYTES, RingHeader, WorkerPhase, read_beats, write_header
from gpuops.worker.api import connect
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.heartbeat import Heartbeat
from gpuops.worker.schedule import DEFAULT_RESTORE_S, WARMUP_STEPS
from gpuops.worker.staging.pending_copy import PendingCopy


def checkpointer(node, **given):
    given = {"every": 1, **given}
    return Checkpointer(keeper=node.connect(), **given)


def save(node, steps=(1,), **given):
    """Save the state of what is *given*, and be killed."""
    with checkpointer(node, **given) as ck:
        ck.restore()
        for step in steps:
            ck.step(step)
        stats = ck.stats
    assert stats["off"] is None, stats
    assert stats["saved"] == len(steps), stats
    return stats


def load(node, **given):
    with checkpointer(node, **given) as ck:
        return ck.restore()


def bits(tensor):
    return (
        tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()
        if tensor.numel()
        else []
    )


class Buffers(nn.Module):
    """A module with the tensors it is given as buffers."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "one": torch.ones(1, 1, 1),
    "int8": torch.arange(-4, 3, dtype=torch.int8),
    "uint16": torch.arange(5, dtype=torch.int32).to(torch.uint16),
    "uint64": torch.tensor([2**63 - 1]).to(torch.uint64),
    "half": torch.randn(3, 5).half(),
    "bf16": torch.randn(7).bfloat16(),
    "complex64": torch.randn(4, dtype=torch.complex64),
    "complex128": torch.randn(2, 3, dtype=torch.complex128),
    "chalf": torch.arange(4, dtype=torch.int32),  # made complex32 in the test: torch warns of it
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    "fp8": torch.randn(9).to(torch.float8_e4m3fn),
    "fp8_wide": torch.randn(9).to(torch.float8_e5m2),
    "fp8_scale": torch.ones(5).to(torch.float8_e8m0fnu),
    "fp8_fnuz": torch.randn(9).to(torch.float8_e4m3fnuz),
    "transposed": torch.randn(4, 6).t(),
    "strided": torch.randn(20)[::3],
    "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
    "many dims": torch.randn((1,) * 12),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_kind_comes_back_bit_for_bit(node, name):
    tensor = TENSORS[name]
    if name == "chalf":
        tensor = tensor.view(torch.complex32)
    before = bits(tensor.clone())
    save(node, model=Buffers(x=tensor.clone(), pad=torch.zeros(3, dtype=torch.uint8)))
    model = Buffers(x=torch.zeros_like(tensor), pad=torch.ones(3, dtype=torch.uint8))
    target = model.x

    assert load(node, model=model) == 1
    assert model.x is target
    assert bits(model.x) == before
    assert model.x.dtype == tensor.dtype
    assert model.x.stride() == torch.zeros_like(tensor).stride()


def test_an_expanded_tensor_is_filled_without_its_repeats(node):
    save(node, model=Buffers(x=torch.tensor([[2.0], [3.0]]).expand(2, 4)))
    model = Buffers(x=torch.zeros(2, 1).expand(2, 4))

    load(node, model=model)

    assert model.x.tolist() == [[2.0] * 4, [3.0] * 4]


class Tied(nn.Module):
    """Two layers with one weight, or not."""

    def __init__(self, is_tied=True):
        super().__init__()
        self.a = nn.Linear(64, 64, bias=False)
        self.b = nn.Linear(64, 64, bias=False)
        if is_tied:
            self.b.weight = self.a.weight


def test_tied_weights_are_stored_once_and_load_tied_or_not(node):
    model = Tied()
    stats = save(node, model=model)
    with closing(InProcessNode()) as other:
        apart = save(other, model=Tied(is_tied=False))
    assert apart["nbytes"] - stats["nbytes"] == 64 * 64 * 4

    tied, loose = Tied(), Tied(is_tied=False)
    load(node, model=tied)
    load(node, model=loose)

    assert tied.a.weight is tied.b.weight
    assert torch.equal(tied.a.weight, model.a.weight)
    assert torch.equal(loose.a.weight, model.a.weight)
    assert torch.equal(loose.b.weight, model.a.weight)


def test_weights_that_come_apart_are_stored_apart(node):
    model = Tied()
    with checkpointer(node, model=model) as ck:
        ck.restore()
        ck.step(1)
        model.b.weight = nn.Parameter(torch.full((64, 64), 5.0))
        ck.step(2)
        assert ck.stats["off"] is None
    other = Tied(is_tied=False)

    assert load(node, model=other) == 2
    assert torch.equal(other.a.weight, model.a.weight)
    assert torch.equal(other.b.weight, model.b.weight)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(model, optimizer, n=3):
    for _ in range(n):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(8, 3)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": torch.optim.Rprop,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_as_if_it_had_never_stopped(node, name):
    torch.manual_seed(1)
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    save(node, model=model, optimizer=optimizer)
    train(model, optimizer)

    other = net()
    resumed = OPTIMIZERS[name](other.parameters())
    assert load(node, model=other, optimizer=resumed) == 1
    train(other, resumed)

    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert same(optimizer.state_dict(), resumed.state_dict())


def test_a_state_of_another_dtype_than_its_parameter_keeps_it(node):
    parameter = nn.Parameter(torch.randn(5).bfloat16())
    optimizer = torch.optim.Adam([parameter])
    master = torch.randn(5)
    optimizer.state[parameter] = {
        "step": torch.tensor(4.0),
        "master": master.clone(),
        "kind": "fused",
        "many": [torch.ones(2), (torch.zeros(1), 3)],
        "none": None,
    }
    save(node, optimizer=optimizer)
    other = torch.optim.Adam([nn.Parameter(torch.randn(5).bfloat16())])

    load(node, optimizer=other)

    [state] = other.state.values()
    assert same(dict(state), dict(optimizer.state[parameter]))
    assert state["master"].dtype == torch.float32


def test_an_optimizer_with_state_is_filled_in_place(node):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save(node, model=model, optimizer=optimizer)
    other = net()
    resumed = torch.optim.AdamW(other.parameters())
    train(other, resumed)
    moments = [state["exp_avg"] for state in resumed.state.values()]

    load(node, model=other, optimizer=resumed)

    for moment, state in zip(moments, resumed.state.values(), strict=True):
        assert state["exp_avg"] is moment
    assert same(optimizer.state_dict(), resumed.state_dict())


def test_groups_and_hyperparameters_come_back(node):
    def make(model):
        return torch.optim.SGD(
            [
                {"params": model[0].parameters(), "lr": 0.5, "name": "first"},
                {"params": model[2].parameters()},
            ],
            lr=0.1,
            momentum=0.9,
        )

    model = net()
    optimizer = make(model)
    optimizer.param_groups[1]["lr"] = 0.01
    optimizer.param_groups[1]["betas"] = (0.5, 0.25)
    save(node, model=model, optimizer=optimizer)
    other = net()
    resumed = make(other)

    load(node, model=other, optimizer=resumed)

    assert same(optimizer.state_dict(), resumed.state_dict())


def test_a_frozen_parameter_has_no_state_and_needs_none(node):
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save(node, model=model, optimizer=optimizer)
    other = net()
    resumed = torch.optim.AdamW(other.parameters())

    load(node, model=other, optimizer=resumed)

    assert same(optimizer.state_dict(), resumed.state_dict())
    assert other[0].weight not in resumed.state


def test_before_the_first_step_nothing_is_made_up(node):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    save(node, model=model, optimizer=optimizer)

    assert not optimizer.state


def test_a_hook_on_an_optimizers_state_dict_says_what_is_saved(node):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["kept"] = 1.5
    optimizer.register_state_dict_post_hook(
        lambda _, found: {**found, "state": {0: {"kept": found["state"][0]["kept"] + 1.0}}}
    )
    save(node, steps=(1, 2), optimizer=optimizer)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))])

    load(node, optimizer=other)

    assert [dict(state) for state in other.state.values()] == [{"kept": 2.5}]


CHANGING = (
    {"a": torch.zeros(3)},
    {"a": torch.ones(5)},
    {"a": torch.ones(5), "b": 2},
    {"b": torch.ones(5), "a": 2},
    {"b": torch.ones(5).double(), "a": 2},
    {0: torch.ones(2)},
    torch.ones(2).double(),
    {"": torch.ones(2).double()},
)


@pytest.mark.parametrize("last", range(1, len(CHANGING)))
def test_an_optimizer_whose_state_changes_is_saved_as_it_is(node, last):
    parameters = [nn.Parameter(torch.zeros(5).double()) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters)
    with checkpointer(node, optimizer=optimizer) as ck:
        ck.restore()
        for number in (last - 1, last):
            for parameter in parameters:
                optimizer.state[parameter] = CHANGING[number]
            ck.step(number + 1)
        assert ck.stats["saved"] == 2
    other = torch.optim.SGD([nn.Parameter(torch.zeros(5).double()) for _ in range(2)])

    assert load(node, optimizer=other) == last + 1
    for state in other.state.values():
        assert same(state, CHANGING[last])


def test_names_outlive_wrappers(node):
    model = net()
    save(node, model=torch.compile(model, backend="eager"))
    other = net()

    load(node, model=other)

    assert torch.equal(other[0].weight, model[0].weight)


def test_several_models_and_optimizers_by_name_and_parts_by_position(node):
    models = {"generator": net(), "critic": net()}
    optimizers = {k: torch.optim.AdamW(m.parameters()) for k, m in models.items()}
    for key, model in models.items():
        train(model, optimizers[key])
    parts = [nn.Linear(2, 2), nn.ModuleDict({"head": nn.Linear(2, 1)})]
    save(node, model=models, optimizer=optimizers, ema=parts[0], extra={"parts": parts[1]})
    others = {"generator": net(), "critic": net()}
    resumed = {k: torch.optim.AdamW(m.parameters()) for k, m in others.items()}
    ema, extra = nn.Linear(2, 2), {"parts": nn.ModuleDict({"head": nn.Linear(2, 1)})}

    load(node, model=others, optimizer=resumed, ema=ema, extra=extra)

    for key, model in models.items():
        assert same(dict(model.state_dict()), dict(others[key].state_dict()))
        assert same(optimizers[key].state_dict(), resumed[key].state_dict())
    assert torch.equal(ema.weight, parts[0].weight)
    assert torch.equal(extra["parts"]["head"].weight, parts[1]["head"].weight)


def test_a_list_of_modules_is_one_model_in_parts(node):
    whole = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    save(node, model=whole)
    parts = [nn.ModuleDict({"b": nn.Linear(2, 2)}), nn.ModuleDict({"a": nn.Linear(2, 2)})]

    load(node, model=parts)

    assert torch.equal(parts[0]["b"].weight, whole["b"].weight)
    assert torch.equal(parts[1]["a"].weight, whole["a"].weight)


class WithExtraState(nn.Module):
    """A module with a state beside its tensors."""

    def __init__(self, state):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    "state", [{"scale": 2.5, "history": torch.arange(3.0)}, torch.tensor([1, 2]), "text", None]
)
def test_the_extra_state_of_a_module_comes_back(node, state):
    save(node, steps=(1, 2), model=nn.Sequential(WithExtraState(state), WithExtraState(state)))
    model = nn.Sequential(WithExtraState(None), WithExtraState(None))
    if isinstance(state, torch.Tensor):
        model[0].state = torch.zeros_like(state)
        model[1].state = torch.zeros_like(state)

    load(node, model=model)

    assert same(model[0].state, state)
    assert same(model[1].state, state)


def test_a_model_whose_state_dict_gives_copies_is_loaded_by_its_own_means(node):
    class Packed(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def state_dict(self, *args, **kwargs):
            return {"packed": torch.tensor([self.value])}

        def load_state_dict(self, state, *args, **kwargs):
            self.value = state["packed"].item()

    save(node, model=Packed(7.0))
    model = Packed(0.0)

    load(node, model=model)

    assert model.value == 7.0


def test_schedulers_scalers_generators_and_values_come_back(node):
    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        return {
            "optimizer": optimizer,
            "scheduler": [
                torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
                torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
            ],
            "scaler": torch.amp.GradScaler("cpu"),
            "extra": {
                "generator": torch.Generator().manual_seed(5),
                "numbers": {"tokens": 2**70, "loss": float("nan"), 3: ("a", b"b", None)},
                "tensor": torch.arange(4),
                "best": 1.5,
                "array": np.arange(3),
            },
        }

    given = make()
    for _ in range(3):
        given["optimizer"].step()
        for scheduler in given["scheduler"]:
            scheduler.step()
    torch.rand(3, generator=given["extra"]["generator"])
    given["extra"]["tensor"] += 10
    given["extra"]["best"] = 0.25
    save(node, **given)
    expected = torch.rand(3, generator=given["extra"]["generator"])
    other = make()
    held = other["extra"]["tensor"], other["extra"]["numbers"]
    other["extra"]["numbers"]["stale"] = 1

    load(node, **other)

    assert same(
        [each.state_dict() for each in other["scheduler"]],
        [each.state_dict() for each in given["scheduler"]],
    )
    assert other["scaler"].state_dict() == given["scaler"].state_dict()
    assert torch.equal(torch.rand(3, generator=other["extra"]["generator"]), expected)
    assert other["extra"]["tensor"] is held[0]
    assert held[0].tolist() == [10, 11, 12, 13]
    assert other["extra"]["numbers"] is held[1]
    assert held[1].keys() == {"tokens", "loss", 3}
    assert held[1]["tokens"] == 2**70
    assert held[1][3] == ("a", b"b", None)
    assert other["extra"]["best"] == 0.25
    assert other["extra"]["array"].tolist() == [0, 1, 2]


def test_all_random_generators_continue_where_they_were(node):
    save(node, model=nn.Linear(1, 1))
    expected = drawn()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 the one whose state is saved
    torch.manual_seed(0)

    load(node, model=nn.Linear(1, 1))

    assert drawn() == expected


def drawn():
    legacy = np.random.rand()  # noqa: NPY002 the one whose state is saved
    return random.random(), legacy, torch.rand(1).item()


def test_averages_in_a_dict_are_filled_in_place(node):
    save(node, ema={"weight": torch.full((3,), 7.0)})
    ema = {"weight": torch.zeros(3)}
    held = ema["weight"]

    load(node, ema=ema)

    assert ema["weight"] is held
    assert held.tolist() == [7.0] * 3


def test_the_values_are_those_of_the_moment_of_the_step(node):
    model = Buffers(x=torch.zeros(4))
    extra = {"tokens": 1}
    with checkpointer(node, model=model, extra=extra) as ck:
        ck.restore()
        ck.step(1)
        model.x.fill_(9)
        extra["tokens"] = 2
    other = Buffers(x=torch.ones(4))

    assert load(node, model=other, extra=extra) == 1
    assert other.x.tolist() == [0.0] * 4
    assert extra == {"tokens": 1}


def test_a_state_that_changes_its_shape_is_saved_in_its_new_shape(node):
    model = Buffers(x=torch.zeros(4))
    with checkpointer(node, model=model) as ck:
        ck.restore()
        ck.step(1)
        model.x = torch.ones(6)
        ck.step(2)
        model.register_buffer("y", torch.full((2,), 2.0))
        ck.step(3)
        model.x = model.x.double()
        ck.step(4)
        del model.y
        ck.step(5)
        model.x.fill_(8)
        ck.step(6)
        assert (ck.stats["saved"], ck.stats["off"]) == (6, None)
    other = Buffers(x=torch.zeros(6, dtype=torch.float64))

    assert load(node, model=other) == 6
    assert other.x.tolist() == [8.0] * 6


def test_extras_that_grow_beyond_their_room_are_saved(node):
    extra = {"seen": []}
    with checkpointer(node, extra=extra) as ck:
        ck.restore()
        for step in range(1, 6):
            extra["seen"] += list(range(step * 20_000))
            ck.step(step)
        assert (ck.stats["saved"], ck.stats["off"]) == (5, None)
    other = {"seen": []}

    load(node, extra=other)

    assert other == extra


class Fails:
    """Something whose state cannot be asked for."""

    def __init__(self, error):
        self.error = error
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        raise self.error

    def load_state_dict(self, state):
        pass


class Foreign:
    """Something whose state is of a type that JSON does not know."""

    def __init__(self):
        self.value = object()

    def state_dict(self):
        return {"inner": [self.value]}

    def load_state_dict(self, state):
        self.value = state["inner"][0]


UNSTORABLE = {
    "meta": (lambda: {"model": nn.Linear(2, 2, device="meta")}, r"model\.weight is on the meta"),
    "sparse": (lambda: {"model": Buffers(s=torch.eye(3).to_sparse())}, r"model\.s has the layout"),
    "csr": (lambda: {"model": Buffers(s=torch.eye(3).to_sparse_csr())}, r"model\.s has the layout"),
    "quantized": (
        lambda: {"model": Buffers(q=torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8))},
        r"model\.q is quantized",
    ),
    "nested": (
        lambda: {"extra": {"n": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}},
        r"extra\.n is a nested",
    ),
    "object": (lambda: {"scheduler": Foreign()}, r"scheduler\.inner\.0 is a builtins\.object"),
    "raises": (lambda: {"scheduler": Fails(RuntimeError("no state"))}, "RuntimeError: no state"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
@pytest.mark.parametrize("name", UNSTORABLE)
def test_what_cannot_be_stored_is_named_once_and_training_continues(node, warnings, name):
    make, message = UNSTORABLE[name]
    given = make()
    with checkpointer(node, **given) as ck:
        ck.restore()
        for step in range(1, 4):
            ck.step(step)
        assert ck.stats["saved"] == 0
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(ck.stats["off"])

    assert len(warnings()) == 1
    assert "no checkpoints are saved from now on" in warnings()[0]


def test_a_state_that_begins_to_raise_does_not_harm_what_was_saved(node, warnings):
    class Sometimes:
        value = 1

        def state_dict(self):
            if self.value > 2:
                raise ValueError(self.value)
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    holder = Sometimes()
    with checkpointer(node, scheduler=holder) as ck:
        ck.restore()
        for step in range(1, 6):
            holder.value = step
            ck.step(step)
        assert ck.stats["saved"] == 2
    other = Sometimes()

    assert len(warnings()) == 1
    assert load(node, scheduler=other) == 2
    assert other.value == 2


def test_what_auto_has_chosen_is_saved_beside_the_state(node):
    with checkpointer(node, every="auto", extra={"n": 1}) as ck:
        ck.restore()
        for step in range(1, WARMUP_STEPS + 1):
            ck.step(step)
        # A step takes microseconds here, and a second is the least between two saves.
        for step in range(WARMUP_STEPS + 1, 100_000_000):
            ck.step(step)
            if step % 1000 == 0 and ck.stats["saved"] == 2:
                break
        assert ck.stats["off"] is None

    with contextlib.closing(node.connect()) as line:
        offer = line.restore_point(60.0)
        image = line.open_shard(offer, Shard(0, 1)).view
        said = json.loads(read_metadata_blob(image, read_layout(image)))
    chosen = ChosenInterval.from_json(said[AUTO])
    assert chosen.steps == offer.state.step - WARMUP_STEPS
    assert chosen.stall_s > 0
    assert chosen.step_s > 0
    assert (chosen.restore_s, chosen.n_nodes, chosen.failures) == (
        DEFAULT_RESTORE_S,
        1,
        FailureRate(),
    )


def test_the_step_that_it_is_told_is_in_the_heartbeat(node):
    ring = bytearray(RING_BYTES)
    write_header(ring, RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))
    heart = Heartbeat(memoryview(ring))
    connect(heart, lambda: None)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        save(node, steps=(41, 42), model=model, optimizer=optimizer)
    finally:
        heart.stop()

    steps = [beat.step for beat in read_beats(ring) if beat.phase is WorkerPhase.STEPPING]
    assert steps == [41, 42]


def test_pickles_only_on_request(node):
    class Holder(Foreign):
        def __init__(self):
            self.value = slice(1, 2)

    save(node, scheduler=Holder(), allow_pickle=True)
    with pytest.raises(CheckpointError, match="allow_pickle"):
        load(node, scheduler=Holder())
    other = Holder()
    other.value = None

    load(node, scheduler=other, allow_pickle=True)

    assert other.value == slice(1, 2)


MISFITS = {
    "shape": (lambda: nn.Linear(2, 3), lambda: nn.Linear(3, 2), "with the shape"),
    "dtype": (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3).half(), "saved as F32 and is F16"),
    "missing": (lambda: nn.Linear(2, 3, bias=False), lambda: nn.Linear(2, 3), "has no model.bias"),
    "surplus": (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 3, bias=False), "has model.bias"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_changed(node, name):
    make, other, message = MISFITS[name]
    save(node, ema=nn.Linear(4, 4), model=make())
    model, ema = other(), nn.Linear(4, 4)
    before = copy.deepcopy(ema.state_dict()), copy.deepcopy(model.state_dict())

    with pytest.raises(CheckpointError, match=message):
        load(node, model=model, ema=ema)

    assert same(dict(before[0]), dict(ema.state_dict()))
    assert same(dict(before[1]), dict(model.state_dict()))


def test_a_model_of_another_job_names_its_directory_and_run_and_what_to_do(node, tmp_path):
    folder = tmp_path / "states"
    node.core.begin_generation(0, 1, None, "run-a")
    with Checkpointer(
        model=nn.Linear(2, 3, bias=False), every=1, directory=folder, keeper=node.connect()
    ) as ck:
        ck.restore()
        ck.step(1)
    (refused,) = [
        rule
        for rule in load_rules([data_dir("checks") / "rules"])
        if rule.id == "checkpoint_refused"
    ]

    with pytest.raises(StructureError) as caught:
        Checkpointer(model=nn.Linear(2, 3), directory=folder, keeper=node.connect()).restore()

    assert str(caught.value).startswith(
        f"step 1 (epoch 0) in {folder}, saved by run run-a, does not fit this script; restore it "
        "into what was saved, or set another --ckpt-dir: the checkpoint has no model.bias"
    )
    assert refused.matches(f"gpuops.checkpoint.types.StructureError: {caught.value}")


def test_a_state_in_memory_is_not_said_to_be_in_a_directory_that_does_not_have_it(node, tmp_path):
    node.core.begin_generation(0, 1, None, "run-a")
    with Checkpointer(
        model=nn.Linear(2, 3, bias=False), every=1, directory=tmp_path, keeper=node.connect()
    ) as ck:
        ck.restore()
        ck.step(1)
    for state in tmp_path.glob("step-*"):
        shutil.rmtree(state)

    with pytest.raises(StructureError, match=r"^step 1 \(epoch 0\) does not fit this script; "):
        Checkpointer(model=nn.Linear(2, 3), directory=tmp_path, keeper=node.connect()).restore()


def test_an_optimizer_over_other_parameters_is_refused(node):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save(node, model=model, optimizer=optimizer)
    other = net()

    with pytest.raises(CheckpointError, match="optimizer"):
        load(node, model=other, optimizer=torch.optim.AdamW(other[0].parameters()))
    with pytest.raises(CheckpointError, match="group"):
        load(
            node,
            model=other,
            optimizer=torch.optim.AdamW(
                [{"params": other[0].parameters()}, {"params": other[1:].parameters()}]
            ),
        )


class Picky:
    """Something that refuses the state it is given."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise KeyError("b")


def test_a_part_that_refuses_its_state_is_named(node):
    save(node, scheduler=Picky())

    with pytest.raises(CheckpointError, match=r"scheduler does not accept .* KeyError: 'b'"):
        load(node, scheduler=Picky())


def test_a_state_of_another_kind_is_named(node):
    save(node, optimizer={"a": Picky()})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    with pytest.raises(CheckpointError, match=r"optimizer\.a"):
        load(node, optimizer={"a": optimizer})


def test_a_part_that_was_not_saved_is_an_error_and_one_too_many_a_warning(node, warnings):
    save(node, model=nn.Linear(1, 1), extra={"tokens": 1})

    with pytest.raises(CheckpointError, match=r"nothing of extra\.epoch"):
        load(node, model=nn.Linear(1, 1), extra={"tokens": 0, "epoch": 0})
    load(node, model=nn.Linear(1, 1))

    assert any("extra.tokens" in text for text in warnings())


def test_a_data_loader_without_a_state_is_said_once(node, warnings):
    class Loader:
        pass

    class Stateful(Loader):
        position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    loader = Stateful()
    loader.position = 7
    save(node, dataloader=loader)
    other = Stateful()
    load(node, dataloader=other)
    assert other.position == 7
    assert not warnings()

    with closing(InProcessNode()) as another:
        save(another, model=nn.Linear(1, 1), dataloader=Loader())
    assert ["not resumed" in text for text in warnings()] == [True]


def test_twenty_thousand_small_tensors(node):
    model = nn.ParameterList(nn.Parameter(torch.full((4,), float(i))) for i in range(5000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(node, steps=(1, 2, 3), model=model, optimizer=optimizer)
    other = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(5000))
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)

    assert load(node, model=other, optimizer=resumed) == 3
    assert all(torch.equal(a, b) for a, b in zip(model, other, strict=True))
    assert same(optimizer.state_dict(), resumed.state_dict())


class Refusing:
    """A keeper that stops working at the first of some calls."""

    def __init__(self, keeper, *calls, error=None):
        self.keeper = keeper
        self.calls = set(calls)
        self.error = error or KeeperError("there are 3 GB, and 9 GB would be needed")

    def __getattr__(self, name):
        call = getattr(self.keeper, name)

        def tried(*args, **kwargs):
            if name in self.calls:
                raise self.error
            return call(*args, **kwargs)

        return tried if callable(call) else call


@pytest.mark.parametrize("call", ["set_policy", "reserve", "acquire", "mark_written"])
@pytest.mark.parametrize("error", [None, RuntimeError("a bug")], ids=["refuses", "bug"])
def test_a_keeper_that_fails_ends_saving_with_one_warning(node, warnings, call, error):
    keeper = Refusing(node.connect(), call, error=error)
    model = nn.Linear(1, 1)
    if call == "set_policy" and error is not None:
        return
    with Checkpointer(model=model, every=1, keeper=keeper) as ck:
        for step in range(1, 5):
            ck.step(step)
        assert ck.stats["saved"] == 0
        assert str(keeper.error) in ck.stats["off"]

    assert len([text for text in warnings() if "no checkpoints are saved" in text]) == 1


def test_a_copy_that_fails_is_abandoned_and_the_state_before_stays(node):
    model = Buffers(x=torch.zeros(4))
    with checkpointer(node, model=model) as ck:
        ck.restore()
        ck.step(1)
        ck._saver._copier._slots[1].close()  # the first state is in the first one
        model.x.fill_(5)
        ck.step(2)
        assert ck.stats["off"] is not None
    other = Buffers(x=torch.ones(4))

    assert load(node, model=other) == 1
    assert other.x.tolist() == [0.0] * 4


def test_a_skip_is_counted_with_its_reason_and_nothing_waits(node):
    counts = []

    class Busy:
        def __init__(self, keeper):
            self.keeper = keeper

        def __getattr__(self, name):
            return getattr(self.keeper, name)

        def acquire(self, step, **more):
            counts.append(more["n_steps"])
            return Skipped("no slot is free") if step % 2 else self.keeper.acquire(step, **more)

    with Checkpointer(model=nn.Linear(1, 1), every=1, keeper=Busy(node.connect())) as ck:
        ck.restore()
        for step in range(1, 5):
            ck.step(step)
        assert ck.stats["saved"] == 2
        assert ck.stats["skipped"] == {"no slot is free": 2}
        assert counts == [1, 2, 3, 4]


class BrokenOffError(Exception):
    """What a training loop ends with."""


@pytest.mark.parametrize(
    ("after", "saved"), [("nothing", 7), ("a step", 5), ("an error", 5), ("no place", 5)]
)
def test_the_last_step_is_saved_at_the_end_where_it_persists(node, tmp_path, after, saved):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    place = None if after == "no place" else tmp_path / "states"
    with (
        suppress(BrokenOffError),
        checkpointer(node, model=model, optimizer=optimizer, every=5, directory=place) as ck,
    ):
        ck.restore()
        for n in range(1, 8):
            train(model, optimizer, 1)
            ck.step(n)
        if after == "a step":
            train(model, optimizer, 1)
        elif after == "an error":
            raise BrokenOffError

    other = net()
    with checkpointer(node, model=other, optimizer=torch.optim.AdamW(other.parameters())) as ck:
        assert ck.restore() == saved
    if after == "nothing":
        assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("n", [0, -1, 1.5, "many", None, 10**12])
def test_a_step_that_is_none_is_said_and_training_continues(node, warnings, n):
    with checkpointer(node, model=nn.Linear(1, 1)) as ck:
        ck.restore()
        ck.step(n) if n != 1.5 else ck.step(float("nan"))
        assert ck.stats["saved"] == 0

    assert len(warnings()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "nothing to save"),
        ({"model": nn.Linear(1, 1), "every": 0}, "every=0"),
        ({"model": nn.Linear(1, 1), "every": "soon"}, "every='soon'"),
        ({"model": nn.Linear(1, 1), "every": True}, "every=True"),
        ({"model": nn.Linear(1, 1), "persist_every": "often"}, "persist_every"),
        ({"model": nn.Linear(1, 1), "slots": 1}, "slots"),
        ({"model": nn.Linear(1, 1), "keep_last": 0}, "keep_last"),
        ({"model": nn.Linear(1, 1), "directory": 5}, "directory"),
        ({"scheduler": 5}, "scheduler"),
        ({"optimizer": {"a": object()}}, r"optimizer\.a"),
    ],
)
def test_wrong_arguments_are_errors_at_once(node, given, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(**given, keeper=node.connect())


class Slow(PendingCopy):
    """A copy that a device is still making."""

    def is_done(self):
        return False

    def wait(self):
        pass


def test_a_copy_that_is_still_made_when_the_script_ends_is_written(node):
    ck = checkpointer(node, model=nn.Linear(1, 1))
    ck.step(1)
    saver = ck._saver
    ck.step(2)
    saver._pending, saver._lease = Slow(), saver.keeper.acquire(3)
    saver._copier.start(saver._lease, saver._capturer.capture(3))
    ck._at_exit()  # as at the end of the process, without `close`

    assert node.core.memory.buffer_table.last_committed.step == 3


def test_hooks_are_gone_after_close(node):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with checkpointer(node, model=model, optimizer=optimizer) as ck:
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    ck.close()
    ck.step(1)

    assert not optimizer._optimizer_step_pre_hooks
