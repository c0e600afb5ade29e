"""The first saves take no longer than later ones: their memory is there before the first step."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.in_process_keeper import InProcessNode
from support.keeper_ranks import reserved_of
from support.placed import as_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ByRows
from torch.distributed.tensor import zeros
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpuops.checkpoint.keeper.messages import Lease
from gpuops.checkpoint.memory import shared_buffer
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CheckpointError, Shard, StateId
from gpuops.convert.tensors import is_dtensor
from gpuops.worker.assemble import StateAssembler
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.staging.capture import StateCapturer
from gpuops.worker.staging.slot_copier import SlotCopier
from gpuops.worker.state.expected import expected_state

OPTIMIZERS = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda given: torch.optim.AdamW(given, fused=True),
    "AdamW, foreach": lambda given: torch.optim.AdamW(given, foreach=True, amsgrad=True),
    "RMSprop": lambda given: torch.optim.RMSprop(given, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "groups": lambda given: torch.optim.Adam([{"params": [each]} for each in given], lr=0.1),
}


def net(width=8):
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model[1].bias.requires_grad_(False)
    return model


def train(model, optimizer):
    model(torch.ones(2, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def slots_of(ck):
    return ck._saver._copier._slots


def taken_bytes(slot):
    return os.fstat(slot.fd).st_blocks * 512


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_for_what_the_first_step_makes_is_there_before_it(node, name):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = len(optimizer.state)
    with Checkpointer(model=model, optimizer=optimizer, every=1, keeper=node.connect()) as ck:
        assert ck.restore() == 0
        slots = slots_of(ck)
        assert [taken_bytes(slot) >= slot.nbytes for slot in slots] == [True, True]
        assert len(optimizer.state) == before
        train(model, optimizer)
        ck.step(1)

        assert slots_of(ck) is slots
        assert ck.stats["saved"] == 1


def test_expecting_a_state_steps_no_optimizer_and_calls_no_hook():
    model, calls = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    hook = register_optimizer_step_post_hook(lambda *_: calls.append("post"))
    weights = [each.detach().clone() for each in model.parameters()]
    random_state = torch.get_rng_state()
    with expected_state(optimizer):
        made = [value for entry in optimizer.state.values() for value in entry.values()]
        assert sum(value.untyped_storage().nbytes() for value in made) <= 8 * len(made)
    hook.remove()

    assert calls == []
    assert all(map(torch.equal, weights, model.parameters()))
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not optimizer.state


class OfTheSite(torch.optim.AdamW):
    """An optimizer that is not torch's own."""


@pytest.mark.parametrize("make", [OfTheSite, torch.optim.ASGD])
def test_what_cannot_be_expected_is_reserved_at_the_first_save(node, make):
    model = net()
    optimizer = make(model.parameters())
    with Checkpointer(model=model, optimizer=optimizer, every=1, keeper=node.connect()) as ck:
        ck.restore()
        for step in (1, 2):
            train(model, optimizer)
            ck.step(step)
        assert ck.stats["saved"] == 2
        assert ck.stats["keeper"]["reserved_bytes"] == 2 * ck.stats["nbytes"]


def test_memory_reserved_for_a_wrong_expectation_is_released_before_other_memory_is_reserved():
    """Where there is room for two slots only: a parameter without gradient has no state."""
    model = net(1024)
    optimizer = torch.optim.AdamW(model.parameters())
    node = InProcessNode(available=lambda: 2**30 + 70 * 2**20 - node.core.memory.populated_bytes())
    with Checkpointer(model=model, optimizer=optimizer, every=1, keeper=node.connect()) as ck:
        ck.restore()
        expected = ck.stats["nbytes"]
        model[0](torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        ck.step(1)
        assert ck.stats["saved"] == 1, ck.stats
        assert ck.stats["nbytes"] < expected
        assert ck.stats["keeper"]["reserved_bytes"] == 2 * ck.stats["nbytes"]
    node.close()


class Loader:
    """A data loader whose position exists once it has begun."""

    position = None

    def __iter__(self):
        raise AssertionError("it must not begin")

    def state_dict(self):
        assert self.position is not None, "its workers would start"
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_a_data_loader_is_not_asked_before_training(node):
    loader = Loader()
    with Checkpointer(model=net(), dataloader=loader, every=1, keeper=node.connect()) as ck:
        ck.restore()
        slots = slots_of(ck)
        loader.position = 7
        ck.step(1)
        assert slots_of(ck) is slots
        assert ck.stats["saved"] == 1


def test_a_state_that_cannot_be_read_before_training_is_read_at_the_first_step(node, warnings):
    class Late:
        ready = False

        def state_dict(self):
            if not self.ready:
                raise RuntimeError("no step was made")
            return {}

        def load_state_dict(self, state):
            pass

    late = Late()
    with Checkpointer(model=net(), scheduler=late, every=1, keeper=node.connect()) as ck:
        assert ck.restore() == 0
        late.ready = True
        ck.step(1)
        assert ck.stats["saved"] == 1
    assert warnings() == []


def test_too_little_memory_for_slots_is_a_warning_with_figures(warnings):
    node = InProcessNode(available=lambda: 2**30 + 2**20)
    with Checkpointer(model=net(1024), every=1, keeper=node.connect()) as ck:
        assert ck.restore() == 0
        (warning,) = warnings()
        assert "2 slots of 8.5 MB need 16.9 MB more; 1.1 GB are available" in warning
        ck.step(1)
        assert ck.stats["saved"] == 0
        assert warnings() == [warning]
    node.close()


@pytest.fixture
def shrunk(monkeypatch):
    """Memory that is available to the keeper, and not any more when it is allocated."""
    room = [0]
    monkeypatch.setattr(shared_buffer, "available_bytes", lambda _root: room[0])
    return room


def test_memory_that_shrinks_meanwhile_is_a_warning_and_saves_are_refused(
    node, warnings, shrunk, monkeypatch
):
    now_s = [0.0]
    with Checkpointer(model=net(1024), every=1, keeper=node.connect()) as ck:
        monkeypatch.setattr("gpuops.worker.saver.time.monotonic", lambda: now_s[0])
        assert ck.restore() == 0
        assert ck.stats["off"] is None
        (warning,) = warnings()
        assert "8.5 MB of it are not populated, 0 B are available here" in warning
        ck.step(1)
        assert "a slot of 8.5 MB does not fit" in ck.stats["off"]
        assert len(warnings()) == 2

        shrunk[0] = 2**30
        ck._saver.session.retry_at_s = 0.0
        ck.step(2)
        assert (ck.stats["saved"], ck.stats["off"]) == (1, None)


def test_a_kernel_that_refuses_huge_pages_gives_others(monkeypatch):
    refused = []
    madvise = shared_buffer.madvise

    def refuse(mapped, begin, nbytes, advice):
        if advice == shared_buffer.mmap.MADV_HUGEPAGE:
            refused.append(nbytes)
            raise OSError(22, "Invalid argument")
        madvise(mapped, begin, nbytes, advice)

    monkeypatch.setattr(shared_buffer, "madvise", refuse)
    with SharedBuffer.create("slot", 5 * 2**20) as slot:
        assert slot.populate()
        assert taken_bytes(slot) >= slot.nbytes
    assert refused == [4 * 2**20]  # whole pages: the image keeps its size


def test_threads_populate_all_of_it_and_stop_with_the_first_error(shrunk):
    shrunk[0] = 2**40
    nbytes = 3 * shared_buffer.POPULATE_BYTES + 5
    with SharedBuffer.create("slot", nbytes) as slot:
        assert slot.populate(n_threads=3)
        assert taken_bytes(slot) >= nbytes
        assert slot.populate(lambda: True, n_threads=3) is False
    shrunk[0] = 0
    with (
        SharedBuffer.create("slot", nbytes) as slot,
        pytest.raises(CheckpointError, match="does not fit"),
    ):
        slot.populate(n_threads=3)


@pytest.mark.parametrize("code", [0, 1])
def test_slots_are_pinned_before_training_or_a_warning_says_why_not(monkeypatch, code):
    cuda, told = FakeCuda(monkeypatch), []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: object())
    cuda.runtime.code = code
    given = StateAssembler(allow_pickle=False, warn=pytest.fail)
    given.add_values("extra", {"weight": torch.arange(9.0)})
    captured = StateCapturer(given.adapters, Shard(0, 1), allow_pickle=False).capture(1)
    plan = replace(captured.plan, device=torch.device("cpu"))
    with reserved_of(plan.layout, 2) as reserved:
        copier = SlotCopier(plan, reserved, told.append)
        copier.populate(1)
        assert len(cuda.runtime.registered) == (0 if code else 3)  # and their stamp
        assert len(told) == (2 if code else 0)
        copier.start(Lease(1, StateId(0, 1), 1), replace(captured, plan=plan))
        copier.close()
        assert not cuda.runtime.registered


@pytest.mark.parametrize("code", [0, 1])
def test_a_restore_pins_the_memory_before_a_device_copies_out_of_it(node, monkeypatch, code):
    saved, again = net(), net()
    with Checkpointer(model=saved, every=1, keeper=node.connect()) as ck:
        ck.restore()
        ck.step(1)
    cuda = FakeCuda(monkeypatch)
    cuda.hold_tensors(monkeypatch)
    cuda.runtime.code = code
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: object())
    with Checkpointer(model=again, every=1, keeper=node.connect()) as ck:
        assert ck.restore() == 1
        assert cuda.from_pinned == [code == 0] * len(saved.state_dict())
        assert not cuda.runtime.registered
    assert all(map(torch.equal, saved.parameters(), again.parameters()))


def test_the_expected_state_of_sharded_parameters_is_sharded_as_the_real_one():
    def described(optimizer):
        return [
            (name, type(each), each.shape, each.dtype, each.device, places(each))
            for entry in optimizer.state.values()
            for name, each in entry.items()
        ]

    def places(tensor):
        return (tensor.placements, tensor.to_local().shape) if is_dtensor(tensor) else None

    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(zeros(5, 3, device_mesh=mesh, placements=[ByRows(0)]))
        optimizer = torch.optim.AdamW([weight])
        with expected_state(optimizer):
            expected = described(optimizer)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert expected == described(optimizer)


def test_a_resume_does_not_wait_for_memory_to_be_mapped(node, monkeypatch):
    with Checkpointer(model=net(), every=1, keeper=node.connect()) as ck:
        ck.restore()
        ck.step(1)
    may_map, mapped = threading.Event(), threading.Semaphore(0)
    populate = SharedBuffer.populate

    def gated(memory, *args, **options):
        assert may_map.wait(60)
        done = populate(memory, *args, **options)
        mapped.release()
        return done

    monkeypatch.setattr(SharedBuffer, "populate", gated)
    with Checkpointer(model=net(), every=1, keeper=node.connect()) as ck:
        assert ck.restore() == 1
        may_map.set()
        assert mapped.acquire(timeout=60)
        assert mapped.acquire(timeout=60)
        ck.step(2)
        assert ck.stats["saved"] == 1
