"""Agents that meet in a real etcd of three members, one of which dies."""

import pytest
from support.cluster_run import TOKEN, ClusterRun
from support.etcd import running_etcd
from support.hosts import Loopbacks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def test_a_run_bears_the_death_of_a_member_and_leaves_no_key(tmp_path):
    with running_etcd(3) as etcd, Loopbacks(2, tmp_path) as hosts:
        run = ClusterRun(
            hosts,
            tmp_path,
            "--health-gate=off",
            script="fake_steps.py",
            env={"JOB_STEPS": "3000", "JOB_PAUSE_S": "0.05"},
            endpoint=etcd.url,
        )
        run.start()
        run.wait_for_step(3)

        etcd.members[0].kill()

        run.wait_for_step(run.lines()[-1].number + 50)
        status = ("run", "status", "--run-dir", hosts[1].runs)
        shown = hosts[1].gpuops(*status, env={"GPUOPS_TOKEN": TOKEN}).stdout
        run.enough()
        assert run.finish() == {"n0": 0, "n1": 0}
        assert "n0" in shown, shown
        assert {line.generation for line in run.lines()} == {0}
        assert run.events("agent.fenced") == []
