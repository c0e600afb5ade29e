"""A run whose record is held by etcds of its own, and the next run in the same place."""

import pytest
from support.cluster_run import TOKEN, ClusterRun
from support.etcd import find_etcd
from support.hosts import Loopbacks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def started(hosts, folder, steps, endpoint=None):
    run = ClusterRun(
        hosts,
        folder,
        "--health-gate=off",
        script="fake_steps.py",
        env={"JOB_STEPS": str(steps), "JOB_PAUSE_S": "0.02"},
        endpoint=endpoint,
        quorum=True,
    )
    run.start()
    return run


def test_three_nodes_hold_the_record_by_themselves_and_each_knows_of_all(tmp_path):
    find_etcd()
    with Loopbacks(3, tmp_path) as hosts:
        run = started(hosts, tmp_path, 100_000)
        run.wait_for_step(3)
        board = run.wait(lambda: run.state(hosts[1]), "the state of a node")["board"]
        # Another process, as on another node: it has the token, and no file of an agent.
        status = ("run", "status", "--run-dir", hosts[1].runs)
        shown = hosts[1].gpuops(*status, env={"GPUOPS_TOKEN": TOKEN}).stdout
        run.enough()
        assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}, run.said()

    assert board["kind"] == "quorum"
    assert "?" not in board["endpoint"]
    assert "out of date" not in shown
    assert all(host.name in shown for host in hosts), shown
    assert "is lost" not in run.said()


@pytest.mark.soak
def test_a_run_id_and_its_endpoint_can_be_used_again_at_once(tmp_path):
    find_etcd()
    with Loopbacks(3, tmp_path) as hosts:
        endpoint, ids = None, set()
        for turn in ("first", "second"):
            run = started(hosts, tmp_path / turn, 20, endpoint)
            endpoint = run.endpoint
            assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}, run.said()
            ids |= {event["run_id"] for event in run.events("run.ended")}
        assert len(ids) == 2
