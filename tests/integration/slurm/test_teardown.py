"""Nothing of the cluster outlives the test session, however that ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import mock_nvml
from support.slurm import wait_until
from support.slurm_processes import processes_of

pytestmark = [pytest.mark.quick_disk, pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(900)]

# A job that runs, a prolog that hangs, and a helper that waits for a slurmctld that is gone.
SESSION = """
import sys, threading
from pathlib import Path
from support.mock_nvml import MockNvml
from support.slurm import running_cluster, wait_until

with running_cluster(MockNvml(Path(sys.argv[1])), names=("n1", "n2", "n3")) as cluster:
    cluster.reset("sqlite:////proc/nonexistent/gpuops.db")
    job = cluster.submit("sleep 600", "-w", "n1")
    wait_until(lambda: cluster.job(job)["JobState"] == "RUNNING", "no job runs")
    hung = cluster["n2"].home / "env"
    cluster["n2"].write_env(hung.read_text() + "exec /bin/sleep 601\\n")
    cluster.submit("exit 0", "-w", "n2")
    cluster["n3"].lose_gpu()
    cluster["n3"].use_scontrol("exec /bin/sleep 602")
    wait_until(lambda: cluster.run_hook("n3").returncode == 1, "no hook refuses the job")
    print(cluster.home, flush=True)
    threading.Event().wait()
"""
KINDS = (
    "munged --foreground",
    "slurmctld -D",
    "slurmd -D -N n1",
    "slurmstepd",
    "sleep 600",
    "sleep 601",
    "sleep 602",
    "slurm publish",
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_session_that_is_interrupted(tmp_path, number):
    mock_nvml.build(tmp_path)
    argv = [sys.executable, "-c", SESSION, str(tmp_path)]
    env = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as session:
        home = Path(session.stdout.readline().strip())

        seen = set()

        def unseen():
            lines = processes_of(home).values()
            seen.update(kind for kind in KINDS if any(kind in line for line in lines))
            return set(KINDS) - seen

        wait_until(lambda: not unseen(), lambda: (unseen(), processes_of(home)))
        session.send_signal(number)

    wait_until(lambda: not processes_of(home), lambda: processes_of(home))
    wait_until(lambda: not home.exists(), f"{home} is gone")
