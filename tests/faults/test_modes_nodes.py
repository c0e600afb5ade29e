"""Nodes that are lost, cut off, frozen, replaced, and those that come back.

Each is a failure mode of a run on several nodes, with its bound, its incident and its exit code.
Bounds are generous: what recovery really takes is a benchmark's matter.
"""

import time

import pytest
from support.accounts import BOUND_S, check_account
from support.cluster_run import LIMIT_S, ClusterRun
from support.hosts import Hosts
from support.runs import is_alive

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
LONG = {"JOB_STEPS": "10000", "JOB_PAUSE_S": "0.1"}
# Of two nodes that wait for a third one before the first start: not half a minute.
SOON = "--rdzv-conf=last_call_timeout=5"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(3, tmp_path) as made:
        yield made


def started(hosts, folder, *flags, env=LONG, first=None, **options):
    run = ClusterRun(hosts, folder, *flags, env=env, **options)
    run.start(*(first or ()))
    run.wait_for_step(3)
    return run


@pytest.mark.soak
def test_a_lost_node_is_done_without(hosts, tmp_path):
    """Mode 6: all processes of a node that is not the store's are gone at once."""
    run = started(hosts, tmp_path, nnodes="2:3")
    lost_ns = time.monotonic_ns()

    hosts[2].kill_all()

    assert run.seconds_to_generation(1, lost_ns) < BOUND_S
    run.enough()
    assert run.finish(hosts[0], hosts[1]) == {"n0": 0, "n1": 0}
    check_account(run, "node.lost", ("node", "n2"), actions=["restart"])
    assert run.decisions()[0]["decision"]["rule"] == "node.lost"
    run.check_ledger()


def test_a_killed_agent_takes_its_workers_along_and_the_others_go_on(hosts, tmp_path):
    """Mode 7: the OOM killer ends an agent; its worker must not train on as an orphan."""
    run = started(hosts, tmp_path, "--grow-after", "2", nnodes="2:3")
    orphans = run.worker_pids(hosts[1])
    killed_ns = time.monotonic_ns()

    run.drill(hosts[1], "kill-agent", "--node", "n1")

    run.wait(lambda: not any(is_alive(pid) for pid in orphans), "the end of its workers", 20)
    assert run.seconds_to_generation(1, killed_ns) < BOUND_S
    how = run.decisions()[0]["decision"]["cause"]["how"]
    assert how == "its agent's connection to the control store was closed, and no new one came"
    run.start(hosts[1])  # by hand, in the middle of the run
    run.wait(lambda: run.worker_pids(hosts[1]) - orphans, "its return")
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
    check_account(run, "node.lost", ("node", "n1"), actions=["restart"])
    run.check_ledger()


def test_a_frozen_node_fences_itself_when_it_thaws(hosts, tmp_path):
    """Mode 8: the others go on without it; it must not train once it thaws."""
    run = started(hosts, tmp_path, "--grow-after", "2", nnodes="2:3")
    old = run.worker_pids(hosts[2])
    frozen_ns = time.monotonic_ns()

    hosts[2].freeze()
    assert run.seconds_to_generation(1, frozen_ns) < BOUND_S
    hosts[2].thaw()

    run.wait(lambda: not any(is_alive(pid) for pid in old), "the end of its old workers", 30)
    run.wait(lambda: run.worker_pids(hosts[2]) - old, "its return")
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
    assert run.events("agent.fenced", hosts[2])
    check_account(run, "node.lost", ("node", "n2"), actions=["restart"])
    run.check_ledger()


def test_of_a_partition_the_side_with_the_store_and_enough_nodes_goes_on(hosts, tmp_path):
    """Mode 6: two and one. No two generations train at once, the one stops by itself."""
    run = started(hosts, tmp_path, "--grow-after", "never", nnodes="2:3")
    alone = run.worker_pids(hosts[2])
    cut_ns = time.monotonic_ns()

    hosts[2].cut()

    run.wait(lambda: not any(is_alive(pid) for pid in alone), "the end of the lone workers", 60)
    assert run.seconds_to_generation(1, cut_ns) < BOUND_S
    hosts[2].heal()
    run.wait(lambda: run.events("agent.fenced", hosts[2]), "word of the fence")
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
    check_account(run, "node.lost", ("node", "n2"), actions=["restart"])
    run.check_ledger()


def test_too_few_nodes_ask_to_be_requeued(hosts, tmp_path):
    """Mode 13: no spare, no fewer nodes allowed."""
    run = started(hosts, tmp_path, "--on-exhausted", "requeue", nnodes="3")

    hosts[2].kill_all()

    assert run.finish(hosts[0], hosts[1]) == {"n0": 85, "n1": 85}
    assert run.decisions()[0]["decision"]["rule"] == "nodes.exhausted"
    check_account(run, "node.lost", ("node", "n2"), actions=["requeue"])
    assert run.orphans() == set()


def test_a_spare_takes_the_hole_and_survivors_keep_their_ranks(hosts, tmp_path):
    run = started(hosts, tmp_path, "--spares", "1", nnodes="2")
    ranks = {line.rank for line in run.lines()}
    assert ranks == {0, 1}
    busy = [host for host in hosts if run.worker_pids(host)]
    keeper, victim = sorted(busy, key=lambda host: host.name)
    if victim is hosts[0]:
        keeper, victim = victim, keeper  # the store is there
    before = set(run.state(keeper)["pids"])
    lost_ns = time.monotonic_ns()

    victim.kill_all()

    assert run.seconds_to_generation(1, lost_ns) < BOUND_S
    assert set(run.state(keeper)["pids"]) == before
    assert {line.rank for line in run.lines() if line.generation == 1} == {0, 1}
    run.enough()
    others = [host for host in hosts if host is not victim]
    assert set(run.finish(*others).values()) == {0}
    check_account(run, "node.lost", ("node", victim.name), actions=["restart"])
    run.check_ledger()


def test_capacity_that_returns_is_taken_in_at_a_checkpoint(hosts, tmp_path):
    """Mode 14: a third node comes late."""
    flags = ("--grow-after", "2", SOON)
    run = started(hosts, tmp_path, *flags, nnodes="2:3", first=[hosts[0], hosts[1]])
    assert {line.rank for line in run.lines()} == {0, 1}

    run.start(hosts[2])

    run.wait(lambda: {x.rank for x in run.lines() if x.generation == 1} == {0, 1, 2}, "growth")
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
    assert run.incidents() == [], "nothing failed, nothing is spent"
    run.check_ledger()


def test_success_of_some_does_not_leave_the_others_alone(tmp_path):
    """Mode 22: one agent's workers are done when another's fail; the run restarts as a whole."""
    with Hosts(2, tmp_path) as hosts:
        env = {"JOB_STEPS": "20", "JOB_PAUSE_S": "0.05"}
        run = ClusterRun(hosts, tmp_path, script="fake_steps.py", env=env)
        late = {"JOB_PAUSE_S": "0.5", "JOB_AT": "*:15:0", "JOB_DEED": "exit:9"}
        run.start(hosts[0])
        run.start(hosts[1], env=late)
        assert run.finish() == {"n0": 0, "n1": 0}
        assert {x.generation for x in run.lines() if x.what == "done"} >= {0, 1}
        check_account(run, "user_code.exception", ("node", "n1"), actions=["restart"])
        assert run.orphans() == set()


def test_a_second_agent_on_a_node_is_refused(hosts, tmp_path):
    """Bad input: two agents of one run on one node."""
    run = started(hosts, tmp_path, SOON, nnodes="2:3", first=[hosts[0], hosts[1]])

    (second,) = run.start(hosts[1])

    run.wait(lambda: second.code is not None, "the refusal")
    assert second.code == 64, second.said()
    run.enough()
    assert {agent.process.wait(LIMIT_S) for agent in run.agents[:2]} == {0}
