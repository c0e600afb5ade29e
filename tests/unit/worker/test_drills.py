"""Which fault a worker injects into itself, when, and on which rank."""

import os
import signal
import subprocess
import time

import pytest

from gpuops.errors import UsageError
from gpuops.wire.worker_drill import KINDS, SLOW_KINDS, WorkerDrill, parse_drill
from gpuops.worker.drills import DrillHook, drill_of
from gpuops.worker.shim import with_drill


class Worker:
    """A rank whose clock moves by its steps and its sleeps only; a step takes 100 ms."""

    def __init__(self, spec, rank=1, n_ranks=4):
        self.now_s, self.slept_s = 0.0, []
        self.hook = DrillHook(
            parse_drill(spec),
            rank=rank,
            n_ranks=n_ranks,
            clock_s=lambda: self.now_s,
            sleep=self.sleep,
        )

    def sleep(self, seconds):
        self.slept_s[-1] += seconds
        self.now_s += seconds

    def steps(self, n_steps):
        """Return by how many milliseconds each step became longer."""
        for _ in range(n_steps):
            self.now_s += 0.1
            self.slept_s.append(0.0)
            self.hook()
        return [round(1000 * slept_s) for slept_s in self.slept_s]


def test_a_slow_rank_is_slow_from_its_step_on():
    assert Worker("slow:rank=1,step=5,factor=1.5").steps(8) == [0] * 4 + [50] * 4
    assert Worker("slow:rank=2,step=5").steps(8) == [0] * 8
    assert Worker("slow:rank=0+1,step=5").steps(6)[-1] == 50
    assert Worker("slow:rank=all,step=5").steps(6)[-1] == 50


def test_a_ramp_ends_at_its_factor():
    assert Worker("ramp:rank=1,step=3,factor=2,every=4").steps(8) == [0, 0, 25, 50, 75, *[100] * 3]


def test_a_periodic_one_is_slow_and_quick_by_turns():
    assert Worker("periodic:rank=1,step=3,factor=2,every=2").steps(8) == [
        *(0, 0, 100, 100),
        *(0, 0, 100, 100),
    ]


def test_slowness_that_rotates_comes_to_each_rank():
    spec = "rotating:step=3,factor=2,every=2"
    by_rank = [Worker(spec, rank, n_ranks=2).steps(6) for rank in range(2)]

    assert by_rank == [[0, 0, 100, 100, 0, 0], [0, 0, 0, 0, 100, 100]]


def test_a_fault_that_stops_a_rank_comes_once():
    worker = Worker("sleep:rank=1,step=3,seconds=7")

    assert worker.steps(5) == [0, 0, 7000, 0, 0]
    assert Worker("sleep:rank=2,step=3,seconds=7").steps(5) == [0] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_has_a_name_and_defaults(kind):
    drill = parse_drill(f"{kind}:rank=0+2")

    assert (drill.kind, drill.ranks, drill.step, drill.generation) == (kind, {0, 2}, 10, 0)
    assert drill.extra_share(0, 9, 4) == 0
    assert (drill.extra_share(0, 10, 4) > 0) is (kind in SLOW_KINDS)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("explode:rank=1", "there is no fault 'explode'"),
        ("", "there is no fault ''"),
        ("slow", "names no rank"),
        ("slow:rank=one", "rank=one is not a whole number from 0 on"),
        ("slow:rank=-1", "rank=-1 is not a whole number"),
        ("slow:rank=1,factor=nan", "factor=nan is not a number from 1 on"),
        ("slow:rank=1,factor=0.5", "factor=0.5 is not a number from 1 on"),
        ("slow:rank=1,factor", "factor= is not a number"),
        ("slow:rank=1,every=0", "every=0 is not a whole number from 1 on"),
        ("sleep:rank=1,seconds=1e99", "seconds=1e99 is not a number"),
        ("sleep:rank=1,colour=red", "unknown colour; known are rank, node, step"),
        ("sleep:node=n1", "node= is for slow, ramp, periodic, rotating"),
    ],
)
def test_what_is_no_fault_is_refused_with_the_reason(spec, why):
    with pytest.raises(UsageError, match=why) as refused:
        parse_drill(spec)
    assert "GPUOPS_DRILL=" in str(refused.value)


def test_a_fault_is_for_one_generation_unless_it_is_for_all():
    env = {"RANK": "1", "WORLD_SIZE": "4", "GPUOPS_GENERATION": "1"}

    assert drill_of(env) is None
    assert drill_of(env | {"GPUOPS_DRILL": "sleep:rank=1"}) is None
    assert drill_of(env | {"GPUOPS_DRILL": "sleep:rank=1,generation=1"}) is not None
    assert drill_of(env | {"GPUOPS_DRILL": "slow:node=n1,generation=all"}) is not None


def test_the_beat_comes_before_the_fault():
    calls = []
    env = {"RANK": "1", "WORLD_SIZE": "4", "GPUOPS_GENERATION": "0"}
    hook = with_drill(
        lambda *_: calls.append("beat"), env | {"GPUOPS_DRILL": "sleep:rank=1,step=1,seconds=0"}
    )
    hook(None, (), {})

    assert calls == ["beat"]
    assert with_drill(calls.append, env) == calls.append


def test_a_fault_of_all_ranks_names_none():
    assert parse_drill("slow:rank=all").ranks is None
    assert WorkerDrill(kind="slow").is_meant(7)


def test_a_signal_does_not_end_the_hold_of_the_interpreter_lock():
    def hold(seconds):
        worker = Worker(f"hold-lock:rank=1,step=1,seconds={seconds}")
        worker.steps(1)

    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        began_s = time.time()
        sender = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -USR2 {os.getpid()}"])
        hold(2)
    finally:
        sender.wait()
        signal.signal(signal.SIGUSR2, before)

    assert int(began_s + 2) <= time.time()
