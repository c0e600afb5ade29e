"""The verdicts on load and on processes that stay inside the kernel."""

import os

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.host.load import Parameters, judge, without_probes
from gpuops.host.process.abandoned import AbandonedProbes, name_of
from gpuops.host.procfs import Load, Process

LIMITS = Parameters(per_cpu=limit(warn=1, fail=50), blocked=limit(warn=1, fail=8))


def load(load1=0.0, cpus=4, blocked=0):
    stuck = tuple(Process(100 + n, "nfs io", "D", n) for n in range(blocked))
    return Load(load1, 0.0, 0.0, cpus, stuck)


def test_a_quiet_machine_passes():
    assert said(judge(load(), LIMITS, CASE)) == [("n1", "pass", None), ("n1", "pass", None)]


@pytest.mark.parametrize(
    ("load1", "status"),
    [
        (3.9, "pass"),
        (4.0, "warn"),
        (4.1, "warn"),
        (199.9, "warn"),
        (200.0, "fail"),
        (200.1, "fail"),
    ],
)
def test_load_is_judged_for_each_cpu(load1, status):
    assert judge(load(load1, cpus=4), LIMITS, CASE)[0].status.word == status


@pytest.mark.parametrize(
    ("blocked", "status"), [(0, "pass"), (1, "warn"), (2, "warn"), (7, "warn"), (9, "fail")]
)
def test_stuck_processes_are_judged_by_their_number(blocked, status):
    assert judge(load(blocked=blocked), LIMITS, CASE)[1].status.word == status


def test_stuck_processes_are_counted_and_the_first_are_named():
    _, finding = judge(load(blocked=7), LIMITS, CASE)

    assert (finding.status.word, finding.value) == ("warn", 7)
    assert finding.message.startswith("stuck inside the kernel: nfs io (100), nfs io (101)")
    assert finding.message.endswith("and 2 more")


def test_our_own_hung_children_are_not_counted_as_stuck():
    """Those of this run and those on record; a name, which any process can have, counts not."""
    child = Process(os.getpid(), name_of("mount /data"), "D", 1)
    recorded = Process(2**22 + 7, "anything", "D", 1)
    named = Process(2**22 + 8, name_of("mount /data"), "D", 1)
    left = AbandonedProbes(pids=frozenset({recorded.pid}))

    found = without_probes(Load(0.0, 0.0, 0.0, 4, (child, recorded, named)), os.getppid(), left)

    assert found.blocked == (named,)


def test_processes_that_wait_for_a_file_server_are_told_and_do_not_warn():
    _, finding = judge(Load(0.0, 0.0, 0.0, 4, on_network=40), LIMITS, CASE)

    assert (finding.status.word, finding.value) == ("pass", 0)
    assert finding.message.endswith("; 40 wait for a network file system (see mount_alive)")


def test_many_stuck_processes_fail_as_hung_tasks():
    assert said(judge(load(blocked=8), LIMITS, CASE))[1] == ("n1", "fail", "kernel.hung_task")
