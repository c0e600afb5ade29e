"""The optimizer hook, with stand-ins for optimizers: torch is not needed to know what a step is."""

import contextlib
import errno
import gc
import importlib
import os
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from gpuops.wire.ring import (
    RING_BYTES,
    STEP_UNKNOWN,
    RingHeader,
    StepSource,
    WorkerPhase,
    read_beats,
    write_header,
)
from gpuops.worker.heartbeat import Heartbeat, create_ring
from gpuops.worker.optimizer_hook import (
    PATIENCE,
    PATIENCE_MAX,
    LoaderTime,
    StepReader,
    _register,
    _time_loader,
    when_imported,
)


class Scalar:
    """What a zero-dimensional tensor shows of itself; *device* "cuda" must never be read."""

    def __init__(self, value, device="cpu"):
        self.value = value
        self.device = type("device", (), {"type": device})()

    def item(self):
        assert self.device.type == "cpu", "a device synchronisation"
        return self.value

    def __int__(self):
        return int(self.item())


class Optimizer:
    """An optimizer's state: by parameter."""

    param_groups = ()

    def __init__(self, **steps):
        self.state = {name: {"step": step} for name, step in steps.items()}


def heart(mono_ns=lambda: 5):
    ring = bytearray(RING_BYTES)
    write_header(ring, RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))
    return Heartbeat(memoryview(ring), mono_ns=mono_ns), ring


@contextlib.contextmanager
def registered(beat, on_hidden=lambda: None):
    """Have torch's optimizers call *beat* within the block."""
    from torch.optim import optimizer as module

    handles = []
    stand_in = ModuleType("optimizer")
    stand_in.register_optimizer_step_post_hook = lambda hook: handles.append(
        module.register_optimizer_step_post_hook(hook)
    )
    stand_in.register_optimizer_step_pre_hook = lambda hook: handles.append(
        module.register_optimizer_step_pre_hook(hook)
    )
    _register(stand_in, beat, beat.begin_step, on_hidden)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Job:
    """A script's loop on a clock that only it moves."""

    def __init__(self):
        self.now_us = 10
        self.beat, self.ring = heart(lambda: self.now_us * 1000)
        module = ModuleType("dataloader")
        module._BaseDataLoaderIter = self.iterator = type("Iterator", (), {"__next__": self.read})
        _time_loader(module, self.beat.loader, lambda: self.now_us * 1000)

    @staticmethod
    def read(work):
        return work.make()

    def load(self, make):
        """Take a batch from torch's loader, which calls *make* for it."""
        batches = self.iterator()
        batches.make = make
        return next(batches)

    def work(self, us):
        self.now_us += us
        return us

    def step(self, optimizer, us, within=lambda: None):
        self.beat.begin_step(optimizer, (), {})
        self.work(us)
        within()
        self.beat(optimizer, (), {})

    def raises(self, optimizer, us):
        self.beat.begin_step(optimizer, (), {})
        self.work(us)

    @property
    def times(self):
        """Return step, time in the loader and in optimizers of each beat."""
        return [(b.step, b.data_us, b.optimizer_us) for b in read_beats(self.ring)]


def test_a_step_has_the_time_of_all_its_loads_and_of_its_optimizer():
    job, optimizer = Job(), Optimizer(w=1)
    for _ in range(3):  # gradients are accumulated
        assert job.load(lambda: job.work(20)) == 20
        job.work(1000)
    job.step(optimizer, 7)
    optimizer.state["w"]["step"] = 2
    job.step(optimizer, 8)

    assert job.times == [(1, 60, 7), (2, 0, 8)]


def test_without_an_optimizer_a_step_has_the_time_of_its_loads():
    job = Job()
    for step in (1, 2):
        job.load(lambda: job.work(20))
        job.beat.progress(step, tokens=100 * step)

    assert [(b.data_us, b.optimizer_us, b.tokens) for b in read_beats(job.ring)] == [
        (20, 0, 100),
        (20, 0, 200),
    ]


def test_a_beat_that_repeats_a_step_leaves_the_times_to_the_next_step():
    job, critic, generator = Job(), Optimizer(w=1), Optimizer(w=1)
    for step in (1, 2):
        job.load(lambda: job.work(20))
        critic.state["w"]["step"] = generator.state["w"]["step"] = step
        job.step(critic, 5)
        job.step(generator, 3)
    assert job.times == [(1, 20, 5), (1, 0, 0), (2, 20, 8), (2, 0, 0)]

    job.step(critic, 5)
    job.beat.progress(3)
    assert job.times[-2:] == [(2, 0, 0), (3, 0, 8)]


def test_without_a_step_number_each_beat_has_its_own_times():
    job, optimizer = Job(), Optimizer()
    for us in (5, 6):
        job.step(optimizer, us)

    assert job.times == [(STEP_UNKNOWN, 0, 5), (STEP_UNKNOWN, 0, 6)]


def test_what_a_phase_loads_is_not_the_next_steps():
    job, optimizer = Job(), Optimizer(w=1)
    job.beat.enter(WorkerPhase.EVAL, "eval")
    job.load(lambda: job.work(5000))
    job.beat.enter(WorkerPhase.RESUMED)
    job.load(lambda: job.work(20))
    job.step(optimizer, 5)

    assert job.times[-1] == (1, 20, 5)


def test_an_optimizer_step_that_raises_ends_in_no_time_of_a_later_one():
    job, optimizer, other = Job(), Optimizer(w=1), Optimizer(w=1)
    job.raises(optimizer, 700)
    job.step(other, 3)
    job.work(900)
    other.state["w"]["step"] = optimizer.state["w"]["step"] = 2
    job.step(optimizer, 4)
    for number in range(5000):  # they do not fill the memory
        job.raises(number, 1)

    assert job.times == [(1, 0, 3), (2, 0, 4)]
    assert len(job.beat._begun_ns) <= 1024


def test_an_optimizer_that_steps_another_one_counts_no_time_twice():
    job, inner, outer = Job(), Optimizer(), Optimizer()
    job.step(outer, 2, lambda: (job.step(inner, 10), job.work(5)))

    assert job.times == [(STEP_UNKNOWN, 0, 10), (STEP_UNKNOWN, 0, 5)]


def test_a_loader_within_a_loader_is_counted_once_and_one_that_raises_is_counted():
    job = Job()
    job.load(lambda: (job.work(5), job.load(lambda: job.work(10))))
    with pytest.raises(StopIteration):
        job.load(lambda: (job.work(3), next(iter(()))))
    job.load(lambda: job.work(1))
    job.beat.progress(1)

    assert job.times == [(1, 19, 0)]


def test_a_thread_that_reads_ahead_takes_no_time_of_the_step():
    job = Job()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job.load, lambda: job.work(50)).result()
    job.load(lambda: job.work(2))
    job.beat.progress(1)

    assert job.times == [(1, 2, 0)]


def test_a_hook_that_fails_at_the_import_fails_no_import(tmp_path, monkeypatch):
    (tmp_path / "slow_to_come.py").write_text("ready = 1")
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    for _ in range(2):  # before the import and after it
        when_imported("slow_to_come", lambda module: called.append(module.ready) or 1 / 0)
        assert importlib.import_module("slow_to_come").ready == 1

    assert called == [1, 1]
    del sys.modules["slow_to_come"]


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
def test_the_time_in_torchs_loader_is_the_time_until_it_returns(workers):
    from torch.utils.data import dataloader

    class Slow:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            time.sleep(0.05)
            return index

    spent, iterator = LoaderTime(), dataloader._BaseDataLoaderIter
    original = iterator.__next__
    _time_loader(dataloader, spent)
    try:
        begun_ns = time.monotonic_ns()
        # Processes of two workers start before the first `__next__`, and may load by then.
        seen = [int(batch) for batch in dataloader.DataLoader(Slow(), num_workers=workers)]
        wall_ns = time.monotonic_ns() - begun_ns
    finally:
        iterator.__next__ = original

    assert seen == [0, 1]
    assert 0 < spent.ns <= wall_ns
    assert workers or spent.ns >= 100_000_000
    assert not spent.is_inside


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_torchs_optimizers_are_timed_from_hook_to_hook(options):
    import torch

    job = Job()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with registered(job.beat):
        torch.optim.AdamW([weight], **options).step(lambda: job.work(40))

    assert job.times == [(1, 0, 40)]


def test_each_call_is_a_beat_with_the_optimizers_step():
    beat, ring = heart()
    optimizer = Optimizer(w=Scalar(41.0))
    beat(optimizer, (), {})
    optimizer.state["w"]["step"] = Scalar(42.0)
    beat(optimizer, (), {})

    seen = read_beats(ring)
    assert [(b.seq, b.step, b.source) for b in seen] == [
        (1, 41, StepSource.OPTIMIZER_STATE),
        (2, 42, StepSource.OPTIMIZER_STATE),
    ]


def test_a_step_on_a_device_is_left_alone_and_unknown():
    beat, ring = heart()
    beat(Optimizer(w=Scalar(7.0, device="cuda")), (), {})

    (seen,) = read_beats(ring)
    assert (seen.step, seen.source, seen.counted) == (STEP_UNKNOWN, StepSource.COUNTED, 1)


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("apex", {"step": 0}),
        ("schedule-free", {"k": 0, "weight_sum": 0.0}),
        ("Prodigy", {"k": 0, "d": 1e-6}),
    ],
)
def test_a_step_that_is_kept_in_a_parameter_group_is_read_there(kind, group):
    beat, ring = heart()
    optimizer = Optimizer(w=0) if kind == "Prodigy" else Optimizer(w=None)
    optimizer.param_groups = [{"params": [], "lr": 0.1}, group]
    name = next(iter(group))
    for step in (41, 42):
        group[name] = step
        beat(optimizer, (), {})

    seen = [(b.step, b.source) for b in read_beats(ring)]
    assert seen == [(41, StepSource.OPTIMIZER_STATE), (42, StepSource.OPTIMIZER_STATE)]


def test_a_constant_of_a_parameter_group_is_no_step():
    beat, ring = heart()
    optimizer = Optimizer(w=None)
    optimizer.param_groups = [{"k": 5, "alpha": 0.5}]  # Lookahead
    beat(optimizer, (), {})

    assert [(b.step, b.counted) for b in read_beats(ring)] == [(STEP_UNKNOWN, 1)]


def test_without_a_step_the_calls_of_the_busiest_optimizer_are_counted_and_marked():
    beat, ring = heart()
    critic, generator = Optimizer(), Optimizer()
    for optimizer in (critic, critic, generator, critic):
        beat(optimizer, (), {})
    beat.enter(WorkerPhase.EVAL)

    seen = read_beats(ring)
    assert [b.counted for b in seen] == [1, 2, 2, 3, 3]
    assert {(b.step, b.source) for b in seen} == {(STEP_UNKNOWN, StepSource.COUNTED)}
    assert beat.step == STEP_UNKNOWN


@pytest.mark.torch
@pytest.mark.parametrize("name", ["SGD", "LBFGS", "Muon"])
def test_optimizers_of_torch_that_keep_no_step_are_counted(name):
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    beat, ring = heart()
    hook = register_optimizer_step_post_hook(beat)
    try:
        weight = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = getattr(torch.optim, name)([weight])
        weight.grad = torch.ones(2, 2)
        for _ in range(2):
            optimizer.step(weight.sum)
    finally:
        hook.remove()

    assert [(b.step, b.counted) for b in read_beats(ring)] == [(-1, 1), (-1, 2)]


def test_the_parameter_that_is_furthest_is_checked():
    optimizer = Optimizer(frozen=Scalar(1.0), live=Scalar(9.0), device=Scalar(50.0, "cuda"))

    assert StepReader().read(optimizer) == 9


def test_an_empty_state_is_checked_again():
    optimizer = Optimizer()
    reader = StepReader()

    assert reader.read(optimizer) == STEP_UNKNOWN
    optimizer.state["w"] = {"step": 3}
    assert reader.read(optimizer) == 3


def test_of_several_optimizers_the_highest_step_counts_and_never_falls():
    beat, ring = heart()
    critic, generator = Optimizer(w=10), Optimizer(w=2)
    for optimizer in (critic, generator, critic):
        beat(optimizer, (), {})

    assert [b.step for b in read_beats(ring)] == [10, 10, 10]


def test_a_parameter_that_is_frozen_later_is_given_up():
    beat, ring = heart()
    optimizer = Optimizer(embedding=3, body=3, head=3)
    beat(optimizer, (), {})
    for step in range(4, 4 + 3 * PATIENCE):
        optimizer.state["body"]["step"] = optimizer.state["head"]["step"] = step
        beat(optimizer, (), {})

    seen = read_beats(ring)
    assert all(b.source is StepSource.OPTIMIZER_STATE for b in seen)
    assert seen[PATIENCE - 1].step == 3
    assert [b.step for b in seen[PATIENCE:]] == list(range(3 + PATIENCE, 4 + 3 * PATIENCE))


def test_a_step_that_no_longer_rises_is_unknown_until_it_does():
    beat, ring = heart()
    optimizer = Optimizer(w=7)
    for _ in range(PATIENCE + 2):
        beat(optimizer, (), {})
    optimizer.state["w"]["step"] = 8
    beat(optimizer, (), {})

    steps = [b.step for b in read_beats(ring)]
    assert steps == [*[7] * (PATIENCE + 1), STEP_UNKNOWN, 8]


def test_a_checkpointer_names_the_step_of_an_optimizer_that_counts_none():
    beat, ring = heart()
    optimizer = Optimizer()
    for step in (1, 2):
        beat(optimizer, (), {})
        beat.named(step)

    assert [(b.step, b.source) for b in read_beats(ring)] == [
        (STEP_UNKNOWN, StepSource.COUNTED),
        (1, StepSource.REPORTED),
        (1, StepSource.REPORTED),
        (2, StepSource.REPORTED),
    ]
    assert beat.step == 2


def test_a_checkpointer_that_says_what_the_optimizer_says_makes_no_beat():
    beat, ring = heart()
    optimizer = Optimizer(w=41)
    beat(optimizer, (), {})
    beat.named(41)
    assert [b.source for b in read_beats(ring)] == [StepSource.OPTIMIZER_STATE]

    optimizer.state["w"]["step"] = 42
    beat(optimizer, (), {})
    beat.named(1042)  # it counts what was done with another optimizer as well
    beat(optimizer, (), {})
    assert [b.step for b in read_beats(ring)] == [41, 42, 1042, 1042]

    beat.progress(7)
    beat.named(1043)
    assert [b.step for b in read_beats(ring)][4:] == [7]


def test_the_first_step_after_a_restored_one_is_the_next_whatever_the_optimizer_counts():
    beat, ring = heart()
    optimizer = Optimizer(w=38)  # a GradScaler left two steps out
    beat.restored(40)
    assert read_beats(ring) == []

    optimizer.state["w"]["step"] = 39
    beat(optimizer, (), {})
    beat.named(41)

    assert [b.step for b in read_beats(ring)] == [41, 41]


def test_a_restored_step_that_the_optimizer_counts_as_well_needs_no_name():
    beat, ring = heart()
    beat.restored(40)

    beat(Optimizer(w=41), (), {})

    assert [(b.step, b.source) for b in read_beats(ring)] == [(41, StepSource.OPTIMIZER_STATE)]


def test_a_step_that_a_checkpointer_has_not_named_for_long_is_unknown():
    beat, ring = heart()
    optimizer = Optimizer()
    beat(optimizer, (), {})
    beat.named(1)
    for _ in range(PATIENCE + 1):
        beat(optimizer, (), {})

    assert [b.step for b in read_beats(ring)] == [STEP_UNKNOWN, *[1] * (PATIENCE + 1), STEP_UNKNOWN]
    assert beat.step == STEP_UNKNOWN


def test_one_optimizer_for_each_of_many_parameters_is_not_a_standstill():
    beat, ring = heart()
    optimizers = [Optimizer(w=1) for _ in range(5 * PATIENCE)]
    for step in (1, 2, 3):
        for optimizer in optimizers:
            optimizer.state["w"]["step"] = step
            beat(optimizer, (), {})

    assert {b.step for b in read_beats(ring)} == {1, 2, 3}


def test_a_standstill_is_looked_into_ever_less_often():
    class Counted(dict):
        looks = 0

        def items(self):
            self.looks += 1
            return super().items()

    optimizer = Optimizer()
    optimizer.state = Counted(w={"step": 1})
    reader = StepReader()
    for _ in range(10 * PATIENCE_MAX):
        reader.read(optimizer)

    assert optimizer.state.looks < 20


@pytest.mark.torch
def test_discarded_models_are_not_kept_alive():
    import torch

    beat, ring = heart()
    seen = []
    for _ in range(3):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones(2)
        optimizer.step()
        beat(optimizer, (), {})
        seen += [weakref.ref(parameter), weakref.ref(optimizer)]
        del parameter, optimizer
    gc.collect()

    assert len(read_beats(ring)) == 3
    assert [known() for known in seen] == [None] * 6


@pytest.mark.torch
def test_the_step_that_only_makes_the_optimizers_state_is_none():
    import torch
    from torch.distributed.checkpoint import state_dict as dcp
    from torch.optim.optimizer import register_optimizer_step_post_hook

    beat, ring = heart()
    hook = register_optimizer_step_post_hook(beat)
    try:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        saved = dcp.get_optimizer_state_dict(model, optimizer)
        for state in saved["state"].values():
            state["step"] = torch.tensor(8.0)
        dcp.set_optimizer_state_dict(model, optimizer, saved)
        assert read_beats(ring) == []

        optimizer.param_groups[0]["lr"] = 0.0  # a warm-up may begin so
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    finally:
        hook.remove()

    assert [(b.step, b.optimizer_calls) for b in read_beats(ring)] == [(9, 1)]


def test_an_exception_in_the_hook_ends_the_beats_and_nothing_else():
    beat, ring = heart()
    beat(Optimizer(w=1), (), {})
    beat(object(), (), {})
    beat(Optimizer(w=2), (), {})

    assert len(read_beats(ring)) == 1


def test_a_forked_child_does_not_beat():
    beat, ring = heart()
    beat.stop()
    beat(Optimizer(w=1), (), {})

    assert read_beats(ring) == []


def test_a_ring_appears_complete_and_private(tmp_path):
    path = tmp_path / "rank0.ring"
    ring = create_ring(path, RingHeader(rank=3, generation=2, pid=77, start_mono_ns=5))

    assert path.stat().st_size == RING_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    ring.close()


def test_a_ring_has_all_its_memory_before_the_first_beat(tmp_path, monkeypatch):
    def full(_fd, _offset, length):
        assert length == RING_BYTES
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)

    # A hole instead would end the training by SIGBUS, at some beat.
    with pytest.raises(OSError, match="no space left"):
        create_ring(tmp_path / "rank0", RingHeader(rank=0, generation=0, pid=1, start_mono_ns=0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_steps_beat_unless_a_graph_break_is_an_error():
    import torch

    class Plain(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])

    hidden = []
    beat, ring = heart()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    adamw, plain = torch.optim.AdamW([weight]), Plain([weight], {"lr": 0.1})
    with registered(beat, lambda: hidden.append(1)):
        for optimizer, is_full in ((adamw, False), (plain, True)):
            step = torch.compile(optimizer.step, backend="eager", fullgraph=is_full)
            for _ in range(2):
                step()

    assert [b.step for b in read_beats(ring)] == [1, 2]
    assert hidden == [1]
