"""Workers that will not end, leave early, print without end, are slow, or are asked to stop."""

import time

import pytest
from support.accounts import check_account
from support.cluster_run import ClusterRun
from support.faulty import culprits
from support.hosts import Loopbacks
from support.runs import is_alive

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
LONG = {"JOB_STEPS": "10000", "JOB_PAUSE_S": "0.1"}


class OneNode(ClusterRun):
    """A run of two ranks on this machine, whose first generation misbehaves."""

    def __init__(self, folder, *flags, **env):
        super().__init__(Loopbacks(1, folder), folder, *flags, nproc=2, env={**LONG, **env})
        self.flags = ["--nproc-per-node=2", "--health-gate", "off", *flags]
        self.host = self.hosts[0]


@pytest.fixture
def one_node(tmp_path):
    runs = []

    def make(*flags, **env):
        runs.append(OneNode(tmp_path, *flags, **env))
        runs[-1].start()
        return runs[-1]

    yield make
    for run in runs:
        run.hosts.close()


def test_a_rank_that_ignores_sigterm_is_ended_all_the_same(one_node):
    run = one_node(JOB_STUBBORN="1", JOB_AT="1:5:0", JOB_DEED="signal:SIGKILL")

    run.wait_for_generation(1)
    first = {line.pid for line in run.lines() if line.generation == 0}
    assert not any(is_alive(pid) for pid in first)
    run.enough()
    assert run.finish() == {"n0": 0}
    run.check_ledger()


def test_a_rank_that_leaves_while_others_train_ends_the_generation(one_node):
    """One rank exits 0 in the middle: its peers lose it, and it is to blame."""
    run = one_node(JOB_AT="1:8:0", JOB_DEED="exit:0")

    run.wait_for_generation(1)
    run.enough()
    assert run.finish() == {"n0": 0}
    incident = check_account(run, "user_code.early_exit", ("rank", "1"), actions=["restart"])
    assert ("rank", "0") not in culprits(incident)
    run.check_ledger()


def test_output_without_end_does_not_slow_the_supervision(one_node):
    run = one_node(JOB_SHOUT_MB_S="50", JOB_AT="1:8:0", JOB_DEED="signal:SIGKILL")
    run.wait_for_step(7)
    since_ns = time.monotonic_ns()

    assert run.seconds_to_generation(1, since_ns) < 90
    run.enough()
    assert run.finish() == {"n0": 0}


def test_a_preempted_run_saves_and_asks_to_be_requeued(one_node):
    """Mode 15: SIGUSR1 ahead of the end."""
    run = one_node(JOB_DRAINS="1")
    run.wait_for_step(3)

    run.drill(run.host, "preempt")

    assert run.finish() == {"n0": 85}
    drained = {line.number for line in run.lines() if line.what == "drained"}
    saved = [line.number for line in run.lines() if line.what == "save"]
    assert drained == {saved[-1]}, "all ranks stop at one step, which is saved"
    (incident,) = run.incidents()
    assert incident["title"].startswith("drained on SIGUSR1")
    assert (incident["state"], incident["actions"]) == ("closed", ["requeue"])
    assert (incident["failure_class"], incident["culprits"]) == ("scheduler.preempted", [])


def test_a_slow_rank_is_no_reason_to_end_anything(one_node):
    """Mode 21: a straggler is for detectors; supervision does not restart for it."""
    run = one_node()
    run.wait_for_step(3)

    run.drill(run.host, "slow-rank", "--rank", "1", "--share", "0.8", "--for", "5")

    run.enough()
    assert run.finish() == {"n0": 0}
    assert {line.generation for line in run.lines()} == {0}
    assert run.incidents() == []


def test_neither_a_lost_run_directory_nor_an_unreachable_store_ends_training(one_node):
    """Modes 19 and 20: logs and journal have no place any more, and the store is not there."""
    run = one_node("--store", "postgresql+psycopg://nobody@127.0.0.1:9/none")
    run.wait_for_step(3)
    for folder in run.folders(run.host):
        folder.rename(folder.with_name("gone"))

    last = run.lines()[-1].number
    run.wait_for_step(last + 10)
    run.enough()
    assert run.finish() == {"n0": 0}
    run.check_ledger()
