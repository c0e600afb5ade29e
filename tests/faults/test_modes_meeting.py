"""Where the agents meet is lost, with its host or alone, or stands still for a while."""

import threading
import time
from contextlib import suppress

import psutil
import pytest
from support.accounts import check_account
from support.cluster_run import ClusterRun, postgres_endpoint
from support.hosts import Hosts
from support.postgres import running_server

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
LONG = {"JOB_STEPS": "10000", "JOB_PAUSE_S": "0.05"}
BOUND_S = 90
# Without a board, default: 60 s.
IMPATIENT = "--rdzv-conf=store_lost_timeout=15"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(3, tmp_path) as made:
        yield made


def started(hosts, folder, *flags, **options):
    run = ClusterRun(hosts, folder, "--health-gate=off", *flags, env=LONG, **options)
    run.start()
    run.wait_for_step(3)
    return run


def board_servers(host):
    """Return the processes that serve the board on *host*."""
    found = []
    for pid in host.pids():
        with suppress(psutil.Error):  # one that has ended meanwhile
            process = psutil.Process(pid)
            found += [process] if "gpuops.control.tcp.serve" in process.cmdline() else []
    return found


def board_server(host):
    """Return the process that serves the board on *host*."""
    (server,) = board_servers(host)
    return server


@pytest.mark.postgres
@pytest.mark.soak
def test_one_node_after_the_other_is_lost_beginning_with_rank_0(hosts, tmp_path):
    with running_server(address=hosts.address) as server, server.database() as url:
        run = started(hosts, tmp_path, nnodes="1:3", endpoint=postgres_endpoint(url, hosts.address))
        first = next(host for host in hosts if "0" in run.state(host)["pids"])
        lost_ns = time.monotonic_ns()
        first.kill_all()
        assert run.seconds_to_generation(1, lost_ns) < BOUND_S

        others = [host for host in hosts if host is not first]
        lost_ns = time.monotonic_ns()
        others[0].kill_all()
        assert run.seconds_to_generation(2, lost_ns) < BOUND_S

        run.enough()
        assert run.finish(others[1]) == {others[1].name: 0}
        run.check_ledger()


def test_with_the_host_of_the_store_the_others_give_up(hosts, tmp_path):
    """Mode 16: nobody can agree on anything any more; all that is left is to ask for a requeue."""
    run = started(hosts, tmp_path, IMPATIENT, nnodes="2:3")
    left = [hosts[1], hosts[2]]

    hosts[0].kill_all()

    assert run.finish(*left) == {"n1": 85, "n2": 85}
    assert run.orphans() == set()
    assert {host.name for host in left if run.events("board.lost", host)} == {"n1", "n2"}
    check_account(run, "launcher.store_lost", actions=["requeue"])


def test_a_store_that_is_killed_alone_is_known_to_be_lost_at_once(hosts, tmp_path):
    """Its agent puts an empty one in its place: nobody waits for a minute."""
    run = started(hosts, tmp_path, "--rdzv-conf=store_lost_timeout=200", nnodes="2:3")

    run.drill(hosts[0], "kill-board", "--node", "n0")

    assert run.finish(limit_s=100) == {"n0": 85, "n1": 85, "n2": 85}
    assert run.orphans() == set()
    assert "started anew and knows nothing of this run" in run.said()


@pytest.mark.soak
def test_so_it_is_where_the_next_one_starts_late(hosts, tmp_path):
    """As on a loaded machine: the agents have ended their workers by then, and nothing else."""
    run = started(hosts, tmp_path, "--rdzv-conf=store_lost_timeout=200", nnodes="2:3")
    lost = board_server(hosts[0])

    lost.kill()
    late = run.wait(
        lambda: next((p for p in board_servers(hosts[0]) if p != lost), None), "the next server"
    )
    late.suspend()
    run.wait(lambda: len(run.events("agent.fenced")) == 3, "the end of the workers")
    late.resume()

    assert run.finish(limit_s=100) == {"n0": 85, "n1": 85, "n2": 85}
    assert run.orphans() == set()
    check_account(run, "launcher.store_lost", actions=["requeue"])


@pytest.mark.soak
def test_an_agent_that_comes_back_with_the_store_begins_a_new_run_after_the_old_one(
    hosts, tmp_path
):
    """The range lets it train alone; the workers of the old run have ended by then."""
    run = started(hosts, tmp_path, "--rdzv-conf=last_call_timeout=3", nnodes="1:3")
    others = [hosts[1], hosts[2]]

    hosts[0].kill_all()
    old = run.worker_pids()
    run.start(hosts[0])

    assert run.finish(*others) == {"n1": 85, "n2": 85}
    run.wait(lambda: run.worker_pids() - old, "the new run")
    began_ns = min(line.mono_ns for line in run.lines() if line.pid not in old)
    assert max(line.mono_ns for line in run.lines() if line.pid in old) < began_ns
    run.enough()
    assert run.finish(hosts[0]) == {"n0": 0}
    assert len({event["run_id"] for event in run.events("run.started")}) == 2


def test_a_store_that_stands_still_for_five_seconds_ends_nothing(hosts, tmp_path):
    run = started(hosts, tmp_path, nnodes="2:3")
    server = board_server(hosts[0])

    server.suspend()
    threading.Event().wait(5)
    server.resume()

    run.wait_for_step(run.lines()[-1].number + 50)
    run.enough()
    assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
    assert {line.generation for line in run.lines()} == {0}
    run.check_ledger()


@pytest.mark.soak
def test_the_same_id_can_be_used_at_once_again(hosts, tmp_path):
    """The server of the first run may still be there when the second one's agents come."""
    endpoint = f"{hosts[0].address}:29400"
    for turn in ("first", "second", "third"):
        with ClusterRun(
            hosts, tmp_path / turn, script="fake_steps.py", endpoint=endpoint, run_id="again"
        ) as run:
            run.start()
            assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}
