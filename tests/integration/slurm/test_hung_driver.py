"""A GPU driver that gives no answer: the job starts, slurmd goes on, a second look decides."""

import time

import pytest
from support.mock_nvml import shape
from support.one_at_a_time import hung_driver
from support.slurm import GPUS, HOOK_LIMIT_S, wait_until

pytestmark = [pytest.mark.quick_disk, pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(900)]

HUNG = "\ndelay_ms 600000"
# The shipped one waits 40 s, as long as a cold driver may take.
SOON = """\
about = "as the shipped one, but soon"
inherits = "full"
deadline_s = 3
run = ["gpu_driver"]
"""


def test_a_hung_driver_stalls_neither_job_nor_slurmd_and_a_second_hang_drains(
    cluster, history, tmp_path
):
    node = cluster["n1"]
    site = tmp_path / "site" / "suites"
    site.mkdir(parents=True)
    (site / "followup.toml").write_text(SOON)
    # With the shipped deadlines: this driver uses up whatever it is given.
    node.env.pop("PYTHONPATH")
    node.set(GPUOPS_SITE_DIR=str(site.parent))
    cluster.finished(cluster.submit("exit 0", "-w", "n1"))

    with hung_driver():
        node.nvml(shape("h100", GPUS) + HUNG)
        begun = time.monotonic()
        started = node.home / "started"
        started.unlink(missing_ok=True)
        job_id = cluster.submit(f"touch {started}; sleep 300", "-w", "n1")
        wait_until(started.exists, "the job does not start")

        # The prolog's script did not have to end it.
        assert time.monotonic() - begun < HOOK_LIMIT_S
        assert "NOT_RESPONDING" not in cluster.state("n1")[0]
        assert cluster.drained_for("n1", "gpuops: fail gpu_driver")
        assert cluster.job(job_id)["JobState"] == "RUNNING"
        assert history.wait("node.drained", "n1")["check"] == "gpu_driver"
