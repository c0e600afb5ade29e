"""A run whose record is held by etcds of its own, and the next run in the same place."""

import pytest
from support.cluster_run import ClusterRun
from support.etcd import find_etcd
from support.hosts import Loopbacks

pytestmark = [pytest.mark.torch, pytest.mark.soak, pytest.mark.timeout(240)]


def test_a_run_id_and_its_endpoint_can_be_used_again_at_once(tmp_path):
    find_etcd()
    with Loopbacks(3, tmp_path) as hosts:
        endpoint, ids = None, set()
        for turn in ("first", "second"):
            run = ClusterRun(
                hosts,
                tmp_path / turn,
                "--health-gate=off",
                "--rdzv-conf=quorum=1",
                script="fake_steps.py",
                env={"JOB_STEPS": "20", "JOB_PAUSE_S": "0.02"},
                endpoint=endpoint,
            )
            endpoint = run.endpoint
            run.start()
            assert run.finish() == {"n0": 0, "n1": 0, "n2": 0}, run.said()
            ids |= {event["run_id"] for event in run.events("run.ended")}
        assert len(ids) == 2
