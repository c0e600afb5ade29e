"""The order in which a device copies a state and computes: by the streams and events in use."""

from dataclasses import replace

import pytest
import torch
from support.fake_cuda import FakeCuda
from support.keeper_ranks import LEASE, reserved_of

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import Shard
from gpuops.convert.tensors import views_of
from gpuops.worker.adapters.dcp_stager import GpuopsStager
from gpuops.worker.assemble import StateAssembler
from gpuops.worker.staging import tensor_copy
from gpuops.worker.staging.capture import StateCapturer
from gpuops.worker.staging.pinned_buffer import PinnedBuffer
from gpuops.worker.staging.slot_copier import SlotCopier

WEIGHT, AVERAGE = torch.arange(9.0), torch.arange(5.0)
DTYPES = [torch.float32, torch.int32, torch.bfloat16, torch.complex64]


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def capture_of(values):
    given = StateAssembler(allow_pickle=False, warn=pytest.fail)
    given.add_values("extra", values)
    return StateCapturer(given.adapters, Shard(0, 1), allow_pickle=False).capture(1)


@pytest.fixture
def copier(cuda):
    """A copier of a weight, which the optimizer alone changes, and an average, as on a device."""
    captured = capture_of({"weight": WEIGHT, "average": AVERAGE})
    (weight,) = [i for i, tensor in enumerate(captured.tensors) if tensor.numel() == 9]
    plan = replace(
        captured.plan,
        device=torch.device("cpu"),
        optimizer_owned=(weight,),
        others=tuple(i for i in range(len(captured.tensors)) if i != weight),
    )
    with reserved_of(plan.layout) as reserved:
        copier = SlotCopier(plan, reserved, pytest.fail)
        yield lambda **options: copier.start(LEASE, replace(captured, plan=plan), **options)
        copier.close()


def test_the_copy_comes_after_the_step_before_and_the_next_step_after_the_copy(cuda, copier):
    last_step = cuda.launch("optimizer step 1")
    pending = copier(overlap=True)
    forward = cuda.launch("forward 2")
    pending.wait_before_step()
    next_step = cuda.launch("optimizer step 2")

    copy = cuda.copy_of(WEIGHT)
    assert last_step in copy.after
    assert copy not in forward.after
    assert copy in next_step.after


def test_what_anything_may_change_is_copied_before_anything_that_computes_later(cuda, copier):
    copier(overlap=True)
    forward = cuda.launch("forward 2")

    copy = cuda.copy_of(AVERAGE)
    assert copy.stream is cuda.computing
    assert copy in forward.after


def test_without_overlap_nothing_that_computes_later_comes_before_the_copy(cuda, copier):
    copier()
    later = cuda.launch("forward 2")

    assert {cuda.copy_of(WEIGHT), cuda.copy_of(AVERAGE)} <= later.after


@pytest.mark.parametrize("overlap", [True, False])
def test_the_stamp_is_written_after_each_part_of_a_copy(cuda, copier, overlap):
    pending = copier(overlap=overlap)

    stamp = cuda.works[-1]
    assert {cuda.copy_of(WEIGHT), cuda.copy_of(AVERAGE)} <= stamp.after
    assert stamp in pending.event.known


@pytest.mark.parametrize("overlap", [True, False])
def test_a_copy_is_done_when_each_part_of_it_is(cuda, copier, overlap):
    pending = copier(overlap=overlap)

    assert {cuda.copy_of(WEIGHT), cuda.copy_of(AVERAGE)} <= pending.event.known


@pytest.fixture
def failing(cuda, monkeypatch):
    """Have the copy of the average fail."""
    launch = cuda.launch

    def fail(name):
        if name == f"copy {AVERAGE.data_ptr()}":
            raise RuntimeError("out of memory")
        return launch(name)

    monkeypatch.setattr(cuda, "launch", fail)


@pytest.mark.usefixtures("failing")
def test_copies_that_were_begun_are_awaited_where_another_one_fails(cuda, copier):
    with pytest.raises(RuntimeError, match="out of memory"):
        copier(overlap=True)

    assert cuda.copy_of(WEIGHT).is_done


def test_a_large_tensor_is_copied_in_pieces_between_which_others_copy(monkeypatch, cuda, copier):
    monkeypatch.setattr(tensor_copy, "PIECE_BYTES", 16)
    copier(overlap=True).wait()

    beside = [work for work in cuda.works if work.stream is not cuda.computing]
    assert len(beside) == 3 + 1  # the weight of 36 bytes, and the stamp


def test_small_tensors_are_gathered_in_turn_and_go_to_the_host_together(monkeypatch):
    cuda = FakeCuda(monkeypatch, gathers=True)
    cuda.hold_tensors(monkeypatch)
    values = {
        f"{dtype}{n}": torch.full((n,), n, dtype=dtype) for n in (2, 3, 4) for dtype in DTYPES
    }
    values["large"] = torch.ones(2**18)
    values["spread"] = torch.arange(6.0).view(2, 3).t()
    captured = capture_of(values)
    saved = [tensor.clone() for tensor in captured.tensors]
    plan = replace(captured.plan, optimizer_owned=captured.plan.others, others=())
    with reserved_of(plan.layout) as reserved:
        copier = SlotCopier(plan, reserved, pytest.fail)
        pending = copier.start(LEASE, replace(captured, plan=plan), overlap=True)
        in_turn = [work for work in cuda.works if work.stream is cuda.computing]
        assert len(in_turn) == 3 * len(DTYPES)
        assert len(cuda.works) == len(in_turn) + len(DTYPES) + 2 + 1, "and the stamp"
        cuda.computing.synchronize()
        for value in values.values():
            if value.numel() < 5:
                value.zero_()
        pending.wait()

        assert pending.written() == []
        views = views_of(reserved.slots[0].view, plan.layout, plan.names)
        assert all(map(torch.equal, views, saved))
        copier.close()


def test_the_stager_of_dcp_waits_for_its_copies_and_not_for_the_device(cuda, monkeypatch):
    cuda.hold_tensors(monkeypatch)
    beside = cuda.launch_beside("the user's own")
    stager = GpuopsStager()
    staged = stager.stage({"weight": WEIGHT, "step": 3})

    assert torch.equal(staged["weight"], WEIGHT)
    assert not beside.is_done
    stager.close()


@pytest.mark.usefixtures("failing")
def test_the_stager_of_dcp_awaits_the_copies_it_began_where_another_one_fails(cuda, monkeypatch):
    cuda.hold_tensors(monkeypatch)
    stager = GpuopsStager()
    with pytest.raises(RuntimeError, match="out of memory"):
        stager.stage({"weight": WEIGHT, "average": AVERAGE})

    assert cuda.copy_of(WEIGHT).is_done
    stager.close()


def test_memory_that_cannot_be_pinned_is_reported_and_leaves_no_error_behind(cuda, monkeypatch):
    warnings, launched = [], []
    zeros = torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *args, **kw: launched.append(kw) or zeros(*args, **kw)
    )
    cuda.runtime.code = 2
    with SharedBuffer.create("test", 4096) as memory:
        pinned = PinnedBuffer(memory, torch.device("cpu"), warnings.append)
        pinned.release()  # unregisters nothing

    assert ["4096 bytes" in text and "returned 2" in text for text in warnings] == [True]
    assert launched  # a kernel takes the error: the next one of the training would raise it


def test_pinned_memory_is_released_once(cuda):
    with SharedBuffer.create("test", 4096) as memory:
        pinned = PinnedBuffer(memory, torch.device("cpu"), pytest.fail)
        assert len(cuda.runtime.registered) == 1
        pinned.release()
        pinned.release()

    assert not cuda.runtime.registered
