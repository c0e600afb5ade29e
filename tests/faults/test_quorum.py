"""The first of four hosts is lost with its server: the run goes on, without Postgres."""

import time

import pytest
from support.cluster_run import ClusterRun
from support.etcd import find_etcd
from support.hosts import Hosts
from support.runs import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(400)]


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_run_goes_on_without_its_first_host(tmp_path, how):
    find_etcd()
    with Hosts(4, tmp_path) as hosts:
        run = ClusterRun(
            hosts,
            tmp_path,
            "--health-gate=off",
            "--rdzv-conf=last_call_timeout=1,store_lost_timeout=20",
            "--min-nodes=3",
            script="fake_steps.py",
            env={"JOB_STEPS": "3000", "JOB_PAUSE_S": "0.05"},
            quorum=True,
        )
        run.start()
        run.wait_for_step(3)

        hosts[0].kill_all() if how == "killed" else hosts[0].cut()
        lost_s = time.monotonic()
        run.wait_for_generation(1)
        assert time.monotonic() - lost_s < 25

        if how == "cut":
            wait_until(lambda: run.agent(hosts[0]).code is not None, 60)
            assert run.agent(hosts[0]).code == 85
            assert run.events("agent.fenced", hosts[0])
        run.enough()
        codes = run.finish()
        assert {codes[name] for name in ("n1", "n2", "n3")} == {0}, run.said()
        assert not any(run.events("agent.fenced", host) for host in hosts.hosts[1:])
