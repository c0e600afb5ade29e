"""A node joins when it is healthy and its GPUs are free; both are asked at once."""

import json
import threading

import pytest

from gpuops.agent.elastic.rendezvous import Preflight
from gpuops.agent.monitors.gpu_memory import WAIT_MAX_S, GpuMemoryGate
from gpuops.agent.monitors.preflight import (
    BASELINE_S,
    STALE_S,
    BurninPreflight,
    HealthPreflight,
    NoPreflight,
    PreflightGate,
    PreflightResult,
)
from gpuops.host.clock import FakeClock

GIB = 2**30
WELL = PreflightResult(passed=True)
SICK = PreflightResult(passed=False, reason="sick")


class Lines:
    """What NVML tells of memory, as a test writes it."""

    def __init__(self):
        self.waiting = []
        self.given_up = threading.Event()

    def take(self, lines_max):
        taken, self.waiting = self.waiting, []
        return taken

    def close(self, wait_s=0.0):
        pass


class Check:
    """A health check whose result a test gives."""

    def __init__(self):
        self.given = None
        self.calls = []

    def start(self):
        self.calls.append("start")

    def result(self, timeout_s=0.0):
        if timeout_s:
            self.calls.append("wait")
        return self.given

    def cancel(self):
        self.calls.append("cancel")


class Stand:
    """A gate whose check, memory and time a test gives."""

    def __init__(self, uuids=None):
        self.clock = FakeClock()
        self.lines, self.checks, self.waits, self.said = [], [], [], []
        memory = GpuMemoryGate(self.open_lines, self.clock)
        self.keeper = HealthPreflight(
            self.open_check, memory, self.clock, self.said.append, lambda: uuids
        )

    def open_lines(self):
        self.lines.append(Lines())
        return self.lines[-1]

    def open_check(self):
        self.checks.append(Check())
        return self.checks[-1]

    def held(self, used):
        body = {"held": {"GPU-1": used}, "mono_ns": self.clock.mono_ns()}
        self.lines[-1].waiting.append(json.dumps(body).encode())

    def result(self, *steps):
        """Return the result; each wait does one of *steps*, and time goes on."""
        left = list(steps)

        def wait(seconds):
            self.waits.append(seconds)
            self.clock.advance(1)
            if left:
                left.pop(0)()

        return self.keeper.result(wait)

    def says(self, result):
        return lambda: setattr(self.checks[-1], "given", result)


def test_a_healthy_node_with_free_gpus_joins():
    stand = Stand()
    stand.keeper.begin()
    stand.held(0)

    assert stand.result(stand.says(WELL)).passed
    assert stand.checks[0].calls == ["start"]
    assert stand.said == []


def test_a_machine_without_nvml_does_not_wait_for_memory():
    stand = Stand()
    stand.keeper.begin()
    stand.lines[0].given_up.set()
    stand.checks[0].given = WELL

    assert stand.result().passed
    assert stand.waits == []


def test_an_nvml_that_is_slow_to_start_is_given_a_moment():
    stand = Stand()
    stand.keeper.begin()
    stand.checks[0].given = WELL

    assert stand.result().passed
    assert len(stand.waits) == BASELINE_S


def test_a_sick_node_does_not_join():
    stand = Stand()
    stand.keeper.begin()
    stand.lines[0].given_up.set()
    gate = stand.result(stand.says(SICK))

    assert (gate.passed, gate.reason) == (False, "sick")


def test_what_could_not_be_judged_is_said():
    stand = Stand()
    stand.keeper.begin()
    stand.lines[0].given_up.set()
    note = PreflightResult(passed=True, reason="not all was judged")

    assert stand.result(stand.says(note)).passed
    assert stand.said == ["not all was judged"]


def joined(stand):
    stand.keeper.begin()
    stand.held(0)
    assert stand.result(stand.says(WELL)).passed
    stand.keeper.started()
    stand.clock.advance(100)
    stand.waits.clear()
    stand.keeper.begin()
    return stand


def test_memory_of_dead_workers_is_waited_for():
    stand = joined(Stand())
    stand.checks[-1].given = WELL

    assert stand.result(lambda: stand.held(40 * GIB), lambda: stand.held(0)).passed
    assert len(stand.waits) == 2


def test_memory_that_stays_keeps_the_node_out():
    stand = joined(Stand())
    stand.checks[-1].given = WELL
    gate = stand.result(*[lambda: stand.held(40 * GIB)] * (round(WAIT_MAX_S) + 1))

    assert not gate.passed
    assert "42.9 GB on GPU-1" in gate.reason


@pytest.mark.parametrize(
    ("uuids", "passes"), [({"GPU-2"}, True), (set(), True), ({"GPU-1", "GPU-2"}, False)]
)
def test_what_another_job_holds_on_its_own_gpu_keeps_nobody_out(uuids, passes):
    stand = joined(Stand(uuids))
    stand.checks[-1].given = WELL
    gate = stand.result(*[lambda: stand.held(60 * GIB)] * (round(WAIT_MAX_S) + 1))

    assert gate.passed is passes


def test_who_closes_ends_the_check_and_waits_for_its_end():
    stand = Stand()
    stand.keeper.begin()
    stand.keeper.close()

    assert stand.checks[0].calls == ["start", "cancel", "wait"]


def test_a_second_beginning_begins_nothing_unless_the_first_is_old():
    stand = Stand()
    stand.keeper.begin()
    stand.keeper.begin()
    assert len(stand.checks) == 1
    stand.clock.advance(STALE_S + 1)
    stand.keeper.begin()
    assert len(stand.checks) == 2


class NodeUnderLoad:
    """A burn-in behind another gate; each wait gives it the next of *results*."""

    def __init__(self, *results, gate=None):
        self.left, self.checks, self.said = list(results), [], []
        self.gate = BurninPreflight(gate or NoPreflight(), self.open_check, self.said.append)

    def open_check(self):
        self.checks.append(Check())
        return self.checks[-1]

    def result(self):
        return self.gate.result(lambda _: setattr(self.checks[-1], "given", self.left.pop(0)))


def test_a_node_is_tested_under_load_once():
    tested = NodeUnderLoad(WELL)

    assert [tested.result().passed, tested.result().passed] == [True, True]
    assert [check.calls for check in tested.checks] == [["start"]]
    assert tested.said[1:] == ["this node passed its burn-in"]


def test_a_node_that_failed_under_load_is_tested_again_before_it_joins_after_all():
    tested = NodeUnderLoad(SICK, PreflightResult(passed=True, reason="warn burnin/gemm: slow"))

    first = tested.result()
    assert (first.passed, first.reason) == (False, "sick")
    assert first.to_report("n1", 0).how == "sick"
    assert tested.result().passed
    assert tested.said[-1] == "warn burnin/gemm: slow"


def test_a_node_that_fails_its_health_check_is_not_tested_under_load():
    class Closed(PreflightGate):
        def result(self, _wait):
            return Preflight(passed=False, reason="sick")

    tested = NodeUnderLoad(gate=Closed())

    assert tested.result().reason == "sick"
    assert tested.checks == []


def test_a_burn_in_ends_with_the_agent():
    tested = NodeUnderLoad()

    with pytest.raises(IndexError):  # the wait ends as that of a run which is over
        tested.result()
    tested.gate.close()

    assert tested.checks[0].calls == ["start", "cancel", "wait"]
