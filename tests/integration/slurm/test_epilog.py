"""Our epilog in a real Slurm: what a job leaves behind, and what it merely claims."""

import pytest
from support.mock_nvml import shape
from support.slurm import GPUS, wait_until

pytestmark = [pytest.mark.quick_disk, pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(900)]


@pytest.fixture
def gate(cluster, tmp_path):
    """A job on n1 that ends when it may: what a test changes meanwhile, the job has caused."""
    return Job(cluster, tmp_path / "go")


class Job:
    """A batch job on n1."""

    def __init__(self, cluster, go):
        self.cluster, self.go, self.id = cluster, go, None

    def start(self, *options, script="exit 0"):
        runs = self.go.with_name("runs")
        waiting = f"touch {runs}; until [ -e {self.go} ]; do sleep 0.05; done; {script}"
        self.id = self.cluster.submit(waiting, "-w", "n1", *options)
        wait_until(runs.exists, "no job runs")

    def end(self):
        self.go.touch()
        return self.cluster.finished(self.id)


def test_a_gpu_that_a_job_lost_drains_its_node_in_the_epilog_and_names_the_job(
    cluster, gate, history
):
    gate.start("--gres=gpu:8")
    cluster["n1"].xid(79, index=3)
    job = gate.end()
    reason = cluster.drained_for("n1", "gpuops: fail gpu_xid GPU-0000 79")
    ran = history.wait("check.ran", "n1", trigger="epilog")
    drained = history.wait("node.drained", "n1")

    assert job["JobState"] == "COMPLETED"
    assert ran["job_id"] == gate.id
    assert (drained["reason"], drained["job_id"]) == (reason, gate.id)


def test_what_counters_grew_by_during_a_job_is_told_with_its_id(cluster, gate, history):
    gate.start("--gres=gpu:8")
    worse = {1: {"pcie_replays": 100_000}}
    cluster["n1"].nvml(shape("h100", GPUS, per_gpu=worse))
    gate.end()
    ran = history.wait("check.ran", "n1", trigger="epilog")
    (finding,) = [
        item
        for item in ran["findings"]
        if item["check"] == "gpu_pcie_replays" and item["status"] == "warn"
    ]

    assert ran["job_id"] == gate.id
    assert "100000" in finding["message"] or finding["value"] == 100_000
    assert cluster.state("n1")[0] == "IDLE"


def test_processes_that_a_job_leaves_on_its_gpus_are_found_in_the_epilog(cluster, gate, history):
    gate.start("--gres=gpu:8")
    cluster["n1"].nvml(shape("h100", GPUS) + "\nprocess 0 4242 2000000000")
    gate.end()
    ran = history.wait("check.ran", "n1", trigger="epilog")
    left = [item for item in ran["findings"] if item["check"] == "gpu_processes"]

    assert ran["job_id"] == gate.id
    assert {item["status"] for item in left} == {"fail"}


def test_a_user_who_exits_86_drains_nothing_but_has_the_full_suite_run(cluster, history):
    job_id = cluster.submit("exit 86", "-w", "n1")
    job = cluster.finished(job_id)
    ran = history.wait("check.ran", "n1", trigger="epilog")

    assert job["ExitCode"] == "86:0"
    assert (ran["job_id"], ran["suite"]) == (job_id, "full")
    cluster.in_use("n1")
    assert cluster.state("n1") == ("IDLE", None)


def test_a_job_that_succeeds_has_the_short_suite_run(cluster, history):
    cluster.finished(cluster.submit("exit 0", "-w", "n1"))

    assert history.wait("check.ran", "n1", trigger="epilog")["suite"] == "epilog"


def test_an_administrators_drain_stays_theirs_when_the_epilog_fails(cluster, gate):
    gate.start()
    cluster.drain("n1", "ann: swapping a cable")
    cluster["n1"].lose_gpu()
    gate.end()
    wait_until(lambda: cluster["n1"].drain_record() is None, "the helper goes on")

    assert cluster.state("n1")[1] == "ann: swapping a cable"
