"""The store through which the agents agree is killed, slow, or on a node that is lost."""

import time

import pytest
from support.accounts import check_account
from support.cluster_run import ClusterRun, postgres_endpoint
from support.hosts import Hosts
from support.postgres import running_server

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
LONG = {"JOB_STEPS": "10000", "JOB_PAUSE_S": "0.1"}
BOUND_S = 90


@pytest.fixture
def hosts(tmp_path):
    with Hosts(3, tmp_path) as made:
        yield made


def started(hosts, folder, *flags, **options):
    run = ClusterRun(hosts, folder, *flags, env=LONG, **options)
    run.start()
    run.wait_for_step(3)
    return run


def test_without_the_store_every_agent_asks_to_be_requeued(hosts, tmp_path):
    """Mode 16: nobody can agree on anything any more: all agents give up."""
    run = started(hosts, tmp_path, nnodes="2:3")

    run.drill(hosts[0], "kill-board", "--node", "n0")

    assert run.finish(limit_s=150) == {"n0": 85, "n1": 85, "n2": 85}
    assert run.orphans() == set()
    check_account(run, "launcher.store_lost", actions=["requeue"])


def test_a_slow_store_is_not_a_lost_one(hosts, tmp_path):
    """Answers that take two seconds end nothing."""
    run = started(hosts, tmp_path, nnodes="2:3")

    run.drill(hosts[0], "slow-board", "--node", "n0", "--delay", "2000", "--for", "25")

    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
    assert {line.generation for line in run.lines()} == {0}
    run.check_ledger()


@pytest.mark.postgres
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_with_postgres_any_node_may_be_lost(hosts, tmp_path, victim):
    """Also the one with rank 0, whose store the workers used."""
    with running_server(address=hosts.address) as server, server.database() as url:
        run = started(
            hosts,
            tmp_path,
            nnodes="2:3",
            endpoint=postgres_endpoint(url, hosts.address),
        )
        lost_ns = time.monotonic_ns()

        hosts[victim].kill_all()

        assert run.seconds_to_generation(1, lost_ns) < BOUND_S
        run.enough()
        others = [host for host in hosts if host is not hosts[victim]]
        assert set(run.finish(*others).values()) == {0}
        run.check_ledger()
