"""The gate before joining, as the real command over the real pynvml and a driver in C."""

import os
import sys
import threading
import time
from contextlib import closing

import pytest
from support import mock_nvml
from support.fake_root import FakeRoot
from support.mock_nvml import UUIDS, addresses, shape
from support.one_at_a_time import hung_driver

from gpuops.agent.monitors.gpu_memory import open_memory
from gpuops.agent.monitors.preflight import HealthPlan, HealthPreflight, PreflightCheck
from gpuops.host.clock import SystemClock
from gpuops.host.process.inspect import descendants
from gpuops.model import Entity, EntityKind, FailureClass

pytestmark = [pytest.mark.cc, pytest.mark.quick_disk, pytest.mark.timeout(300)]

WITHIN_S = 120.0
HEALTHY = shape("h100", 2)
GIB = 2**30


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(autouse=True)
def _nothing_left():
    """What a gate starts is gone once it has its result; a killed child may be reaped late."""
    mine = set(descendants(os.getpid()))
    yield
    ends_s = time.monotonic() + WITHIN_S
    while set(descendants(os.getpid())) - mine:
        assert time.monotonic() < ends_s, set(descendants(os.getpid())) - mine
        time.sleep(0.02)


def played(mock, scenario):
    return {**os.environ, **mock.env(scenario)}


def gated(mock, scenario, env=None, **plan):
    gate = PreflightCheck(HealthPlan(env={**played(mock, scenario), **(env or {})}, **plan))
    gate.start()
    return gate.result(WITHIN_S)


@pytest.fixture
def bus(tmp_path):
    """Return the root of a machine with two GPUs on its PCI bus."""
    root = FakeRoot(tmp_path / "root")
    for address in addresses(2):
        root.gpu(address)
    return root.path


def test_a_healthy_node_joins(mock):
    result = gated(mock, HEALTHY, gpus=UUIDS[:2])

    assert result.passed
    assert (result.tries, result.hung) == (1, False)


def test_a_lost_gpu_keeps_the_node_out(mock):
    result = gated(mock, HEALTHY + "\nlost 1", gpus=UUIDS[:2])

    assert not result.passed
    assert result.failure_class is FailureClass.GPU_MISSING
    assert UUIDS[1] in result.reason


def test_a_lost_gpu_that_still_tells_its_name_is_the_culprit(mock):
    scenario = HEALTHY + "\nreturn 1 nvmlDeviceGetPowerUsage 15"
    result = gated(mock, scenario, gpus=UUIDS[:2])

    assert not result.passed
    assert result.failure_class is FailureClass.GPU_FELL_OFF_BUS
    assert result.culprits == (Entity(EntityKind.GPU, UUIDS[1]),)


def test_a_pending_remap_keeps_the_node_out_and_another_jobs_gpu_does_not(mock):
    sick = HEALTHY + "\nset 1 remapped_failure 1"

    assert gated(mock, sick, gpus=[UUIDS[1]]).failure_class is FailureClass.GPU_ROW_REMAP
    assert gated(mock, sick, gpus=[UUIDS[0]]).passed


def test_own_workers_that_are_just_ending_keep_nobody_out(mock):
    busy = f"{HEALTHY}\nprocess 0 {os.getpid()} {40 * GIB} compute\nset 0 used_bytes {40 * GIB}"
    result = gated(mock, busy, gpus=UUIDS[:2])

    assert result.passed
    assert any("gpu_processes" in finding for finding in result.findings)


@pytest.mark.parametrize(
    "deaf",
    [pytest.param("", marks=pytest.mark.soak), "deaf\n"],
    ids=["", "and ignores SIGTERM"],
)
def test_a_driver_that_hangs_twice_keeps_the_node_out(mock, bus, deaf):
    scenario = f"{deaf}{HEALTHY}\ndelay * nvmlDeviceGetPowerUsage 60000"
    with hung_driver():
        # A busy machine may need the whole deadline to start the check.
        for deadline_s in (10.0, 40.0):
            result = gated(
                mock, scenario, {"GPUOPS_ROOT": str(bus)}, deadline_s=deadline_s, root=bus
            )
            if "nvml" in result.reason:
                break

    assert (result.passed, result.hung, result.tries) == (False, True, 2)
    assert result.failure_class is FailureClass.GPU_DRIVER_HANG
    assert "nvmlDeviceGetPowerUsage" in result.reason
    assert result.reason.endswith("twice")


def test_a_cold_driver_is_given_a_second_try(mock, bus):
    """The driver is slow the first time only: it stays loaded from then on."""
    env = {**played(mock, HEALTHY + "\ndelay * nvmlInit 60000"), "GPUOPS_ROOT": str(bus)}
    with hung_driver():
        # By half of it a busy machine has started the check, too.
        gate = PreflightCheck(HealthPlan(env=env, deadline_s=16.0, root=bus))
        gate.start()
        assert gate.result(8.0) is None
        mock_nvml.change(env, HEALTHY)
        result = gate.result(WITHIN_S)

    assert (result.passed, result.tries) == (True, 2)


def test_a_driver_that_crashes_its_asker_keeps_nobody_out(mock):
    result = gated(mock, HEALTHY + "\ncrash * nvmlInit")

    assert result.passed
    assert any("SIGSEGV" in finding for finding in result.findings)


def test_a_suite_that_is_not_there_keeps_nobody_out(mock):
    result = gated(mock, HEALTHY, suite="prefligth")

    assert result.passed
    assert "exit code 64" in result.reason
    assert "prefligth" in result.reason


def script(tmp_path, text):
    path = tmp_path / "check.py"
    path.write_text(text)
    return (sys.executable, str(path))


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("print('hello')", "exit code 0"),
        ("raise SystemExit(75)", "exit code 75"),
        ("raise MemoryError", "exit code 1: MemoryError"),
        ("import sys; sys.stdout.write('{' * 20_000_000)", "exit code 0"),
    ],
    ids=["killed", "garbage", "later", "crash", "endless"],
)
def test_a_check_without_a_verdict_keeps_nobody_out(tmp_path, text, how):
    gate = PreflightCheck(HealthPlan(env=os.environ, command=script(tmp_path, text)))
    gate.start()
    result = gate.result(WITHIN_S)

    assert result.passed
    assert how in result.reason


def test_a_program_that_is_not_there_keeps_nobody_out():
    gate = PreflightCheck(HealthPlan(env={}, command=("/nonexistent/python",)))
    gate.start()

    assert gate.result(WITHIN_S).passed


DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


def test_a_check_that_gives_no_answer_is_ended_with_its_children_and_tried_again(tmp_path, bus):
    command = script(tmp_path, DEAF)
    plan = HealthPlan(env=os.environ, command=command, deadline_s=2.0, root=bus)
    gate = PreflightCheck(plan)
    began_s = time.monotonic()
    gate.start()
    result = gate.result(WITHIN_S)

    assert time.monotonic() - began_s >= 4
    assert (result.passed, result.hung, result.tries) == (False, True, 2)
    assert result.reason == "the health check gave no answer in 2 s, twice"


def test_a_gate_that_is_cancelled_ends_its_check(tmp_path):
    gate = PreflightCheck(HealthPlan(env=os.environ, command=script(tmp_path, DEAF)))
    gate.start()
    assert gate.result(0.2) is None
    gate.cancel()

    assert gate.result(WITHIN_S).reason == "the health check was cancelled"


def test_a_check_leaves_no_trace_in_the_nodes_history(mock, tmp_path):
    gated(mock, HEALTHY + "\nlost 1", gpus=UUIDS[:2])

    kept = [path for path in (tmp_path / "default").rglob("*") if path.is_file()]
    assert kept == []


def test_memory_that_is_released_late_delays_the_restart_until_then(mock):
    env = played(mock, HEALTHY)
    clock, waiting = SystemClock(), threading.Event()
    memory = open_memory(env, os.getpid(), clock)
    keeper = HealthPreflight(lambda: PreflightCheck(HealthPlan(env=env)), memory, clock, print)
    with closing(keeper):
        assert keeper.result(waiting.wait).passed
        keeper.started()
        mock_nvml.change(env, HEALTHY + f"\nset 0 used_bytes {40 * GIB}")
        keeper.begin()
        done = []
        asking = threading.Thread(target=lambda: done.append(keeper.result(waiting.wait)))
        asking.start()
        asking.join(4)
        assert done == []
        mock_nvml.change(env, HEALTHY)
        asking.join(WITHIN_S)

        assert done[0].passed


def test_memory_of_another_program_is_not_ours(mock):
    """It came while the run was going, and lives: a machine that people share."""
    env = played(mock, HEALTHY)
    clock, waiting = SystemClock(), threading.Event()
    memory = open_memory(env, 1, clock)
    keeper = HealthPreflight(lambda: PreflightCheck(HealthPlan(env=env)), memory, clock, print)
    with closing(keeper):
        assert keeper.result(waiting.wait).passed
        keeper.started()
        used = 40 * GIB
        lines = f"\nset 0 used_bytes {used}\nprocess 0 {os.getpid()} {used} compute"
        mock_nvml.change(env, HEALTHY + lines)
        keeper.begin()

        assert keeper.result(waiting.wait).passed
        assert memory.poll().note is None


def test_a_machine_without_nvml_is_ready_at_once():
    clock, waiting = SystemClock(), threading.Event()
    memory = open_memory(dict(os.environ), os.getpid(), clock)
    with closing(memory):
        while not memory.has_baseline:
            waiting.wait(0.02)
        memory.started()
        memory.begin()

        assert memory.poll().note == "held before the run: not known"
