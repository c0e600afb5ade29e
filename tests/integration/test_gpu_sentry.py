"""The job's GPUs watched by real children, over the real pynvml and a driver in C."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import mock_nvml
from support.kernel_log import gpu_information, write_kmsg
from support.mock_nvml import UUIDS, addresses, shape
from support.monitors import report_of

from gpuops.agent.monitors.api import MonitoredAttempt
from gpuops.agent.monitors.gpu import (
    GpuMonitor,
    open_gpu_monitor,
    xid_catalogue,
)
from gpuops.host.clock import SystemClock
from gpuops.host.process.command import module_command
from gpuops.host.process.inspect import descendants
from gpuops.host.process.watcher import WatchingChild
from gpuops.host.xid_watch import XidSource
from gpuops.incident.suspicion import SuspicionLevel
from gpuops.model import Entity, EntityKind, FailureClass

pytestmark = pytest.mark.cc

WITHIN_S = 30.0
HEALTHY = shape("h100", 4)
CLOCK = SystemClock()
BUS = "NVRM: Xid (PCI:{}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture(scope="module")
def mock(tmp_path_factory):
    return mock_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def root(tmp_path):
    for index, address in enumerate(addresses(4)):
        gpu_information(tmp_path, address, UUIDS[index], index)
    write_kmsg(tmp_path, [])
    return tmp_path


def until(condition, within_s=WITHIN_S):
    """Return what *condition* gives once it gives something."""
    ends_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < ends_s, "waited in vain"
        time.sleep(0.02)
    return found


def watched(generation=0):
    workers = [SimpleNamespace(pid=100 + n, local_rank=n) for n in range(4)]
    return MonitoredAttempt(generation=generation, node="n1", workers=workers, folder=Path("/"))


def opened(mock, root, scenario=HEALTHY, **env):
    """Return a sentry that has begun, and the environment that its children play."""
    played = mock.env(scenario)
    sentry = open_gpu_monitor({**os.environ, **played, **env}, CLOCK, root=root)
    sentry.begin(watched())
    return sentry, played


def ready(sentry):
    """Wait until both children watch: NVML tells the GPUs, the kernel's log is at its end."""

    def both():
        sentry.poll()
        return set(sentry._gpus) == set(XidSource)

    until(both)
    sentry.begin(watched())


def write(root, *lines):
    with (root / "dev/kmsg").open("a") as file:
        file.write("".join(f"4,{n},{n},-;{line}\n" for n, line in enumerate(lines, start=1)))


def test_an_xid_79_while_workers_run_is_reported_at_once(mock, root):
    sentry, env = opened(mock, root)
    with closing(sentry):
        ready(sentry)
        assert report_of(sentry) is None
        assert sentry.rank_gpus(range(4)) == dict(enumerate(UUIDS[:4]))
        started_s = time.monotonic()
        mock_nvml.change(env, HEALTHY + "\nxid 1 79")
        report = until(lambda: report_of(sentry))

        assert time.monotonic() - started_s < 10  # a fraction of a second on a quiet machine
        assert report.failure_class is FailureClass.GPU_FELL_OFF_BUS
        assert report.blames_node
        assert report.culprits[0] == Entity(EntityKind.GPU, UUIDS[1])
        assert "seen by NVML" in report.how


def test_the_log_tells_where_nvml_hangs(mock, root):
    """NVML has begun, and its next call never returns."""
    sentry, _env = opened(mock, root, HEALTHY + "\nblock * nvmlEventSetWait")
    with closing(sentry):
        ready(sentry)
        write(root, BUS.format(addresses(4)[2][:-2]))
        report = until(lambda: report_of(sentry))

        assert report.culprits[0] == Entity(EntityKind.GPU, UUIDS[2])
        assert "seen by the kernel's log" in report.how


def test_a_fault_of_an_application_is_kept_and_ends_nothing(mock, root):
    sentry, env = opened(mock, root)
    with closing(sentry):
        ready(sentry)
        mock_nvml.change(env, HEALTHY + "\nxid 3 31")
        write(root, f"NVRM: Xid (PCI:{addresses(4)[3][:-2]}): 31, pid=103, name=python, Ch 1")

        def both():
            assert report_of(sentry) is None
            return [s for s in sentry.poll() if "by NVML and the kernel's log" in s.why]

        (suspicion,) = until(both)
        assert suspicion.failure_class is FailureClass.GPU_ILLEGAL_ACCESS
        assert (suspicion.level, suspicion.node) == (SuspicionLevel.NOTE, None)
        assert " times" not in suspicion.why
        (evidence,) = sentry.evidence(1.0)
        assert evidence.entity == Entity(EntityKind.GPU, UUIDS[3])


def test_a_gpu_of_another_job_is_not_ours(mock, root):
    sentry, env = opened(mock, root, CUDA_VISIBLE_DEVICES="0,1")
    with closing(sentry):
        ready(sentry)
        mock_nvml.change(env, HEALTHY + "\nxid 3 79\nxid 0 48")
        report = until(lambda: report_of(sentry))

        assert report.culprits[0] == Entity(EntityKind.GPU, UUIDS[0])
        assert sentry.evidence(1.0)[0].entity == Entity(EntityKind.GPU, UUIDS[0])
        assert len(sentry.evidence(1.0)) == 1


def test_a_storm_hides_nothing(mock, root):
    sentry, _env = opened(mock, root)
    with closing(sentry):
        ready(sentry)
        storm = f"NVRM: Xid (PCI:{addresses(4)[0][:-2]}): 31, pid=100, name=python, Ch 1"
        write(root, *[storm] * 170_000, BUS.format(addresses(4)[1][:-2]))
        slowest_s = 0.0

        def look():
            nonlocal slowest_s
            started_s = time.thread_time()
            report = report_of(sentry)
            slowest_s = max(slowest_s, time.thread_time() - started_s)
            return report

        assert until(look).culprits[0] == Entity(EntityKind.GPU, UUIDS[1])
        assert slowest_s < 0.25  # of this thread's own time; the agent's loop has 10 ms

        def all_counted():
            return any(", 170000 times" in suspicion.why for suspicion in sentry.poll())

        until(all_counted)


@pytest.mark.parametrize(
    "scenario", ["crash * nvmlInit", "crash * nvmlEventSetWait"], ids=["init", "wait"]
)
def test_a_driver_that_crashes_its_asker_is_asked_again_and_not_for_ever(mock, scenario):
    env = {**os.environ, **mock.env(f"{HEALTHY}\n{scenario}")}
    command = module_command("gpuops.host.xid_watch", "nvml")
    child = WatchingChild("test-xid", command, env, back_off_s=0.01, restarts_max=2)
    with closing(child):
        assert child.given_up.wait(WITHIN_S)
        assert child.restarts == 2


def test_a_driver_that_recovers_is_watched_again(mock, root):
    env = mock.env(f"{HEALTHY}\nreturn * nvmlEventSetWait 999")
    variables = {**os.environ, **env}
    command = module_command("gpuops.host.xid_watch", "nvml")
    child = WatchingChild("test-xid", command, variables, back_off_s=0.05, restarts_max=1000)
    sentry = GpuMonitor(variables, xid_catalogue(None), CLOCK, {XidSource.NVML: child})
    with closing(sentry):
        sentry.begin(watched())
        until(lambda: child.restarts > 1)
        mock_nvml.change(env, f"{HEALTHY}\nxid 2 79")

        assert until(lambda: report_of(sentry)).culprits[0] == Entity(EntityKind.GPU, UUIDS[2])


def test_a_gpu_that_nvml_calls_lost_is_found(mock, root):
    sentry, env = opened(mock, root)
    with closing(sentry):
        ready(sentry)
        lost = f"{HEALTHY}\nreturn * nvmlEventSetWait 15\nreturn 2 nvmlDeviceGetPciInfo 15"
        mock_nvml.change(env, lost)
        report = until(lambda: report_of(sentry))

        assert report.failure_class is FailureClass.GPU_FELL_OFF_BUS
        assert report.culprits[0] == Entity(EntityKind.GPU, UUIDS[2])


def test_a_slow_driver_delays_nothing(mock, root):
    sentry, _env = opened(mock, root, HEALTHY + "\ndelay * nvmlInit 60000")
    started_s = time.monotonic()
    for _ in range(10):
        assert report_of(sentry) is None
    sentry.close()

    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("how", ["block * nvmlEventSetWait", "deaf"], ids=["in-kernel", "deaf"])
def test_nothing_is_left_behind(mock, root, how):
    mine = set(descendants(os.getpid()))
    sentry, _env = opened(mock, root, f"{HEALTHY}\n{how}")
    ready(sentry)
    assert len(set(descendants(os.getpid())) - mine) >= 2
    sentry.close()

    until(lambda: set(descendants(os.getpid())) <= mine)


PARENT = """
import os, sys, time
from gpuops.agent.monitors.gpu import open_gpu_monitor
from gpuops.host.clock import SystemClock
from pathlib import Path
sentry = open_gpu_monitor(dict(os.environ), SystemClock(), root=Path(sys.argv[1]))
while len(sentry._gpus) < 2:
    sentry.poll()
    time.sleep(0.02)
print(*(child.pid for child in sentry._sources.values()), flush=True)
time.sleep(60)
"""


def test_children_end_with_an_agent_that_is_killed(mock, root):
    agent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root)],
        env={**os.environ, **mock.env(HEALTHY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in agent.stdout.readline().split()]
    agent.send_signal(signal.SIGKILL)
    agent.wait(WITHIN_S)
    agent.stdout.close()

    assert len(pids) == 2
    until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid):
    try:
        return "gpuops" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_a_machine_without_a_gpu_is_not_watched(tmp_path):
    """Where a driver is installed this watches its GPUs, and nothing is reported either."""
    sentry = open_gpu_monitor(dict(os.environ), CLOCK, root=tmp_path)
    with closing(sentry):
        sentry.begin(watched())
        until(sentry._sources[XidSource.KERNEL].given_up.is_set)

        assert report_of(sentry) is None
        assert sentry._sources[XidSource.KERNEL].restarts == 0
        assert (sentry.evidence(1.0), sentry.poll()) == ((), [])
