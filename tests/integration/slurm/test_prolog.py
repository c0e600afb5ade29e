"""Our prolog in a real Slurm: who runs, who is drained, and what can go wrong without draining."""

import pytest
from support.mock_nvml import gpus
from support.slurm import GPUS

pytestmark = [pytest.mark.slurm, pytest.mark.cc]


def test_a_healthy_node_runs_the_job(cluster):
    job = cluster.finished(cluster.submit("exit 0", "-w", "n1", "--gres=gpu:2"))

    assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n1")
    assert cluster.state("n1") == ("IDLE", None)


def test_a_node_with_a_lost_gpu_is_drained_for_our_reason_and_the_job_runs_elsewhere(cluster):
    cluster["n1"].nvml(gpus(GPUS, broken={2: 15}))
    job = cluster.finished(cluster.submit("exit 0", "--exclude=n[3-6]"))
    reason = cluster.drained_for("n1", "gpuops: ")

    assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n2")
    assert reason.startswith("gpuops: fail ")
