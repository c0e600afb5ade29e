"""`gpuops run` in a real Slurm: the shipped sbatch examples, training over gloo on three nodes."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from support.ports import free_port
from support.runs import JOBS, whole_lines
from support.slurm import SHIPPED, wait_until

pytestmark = [
    pytest.mark.quick_disk,
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.cc,
    pytest.mark.timeout(700),
]
JOB = JOBS / "elastic_train.py"
NODES = "--spares=1 --min-nodes=2"
LIMIT_S = 200


class Launch:
    """One job of an example, whose nodes are all this machine and meet on loopback."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder

    def submit(self, example, steps, *options, flags=None, **env):
        """Submit *example*; its script trains *steps* steps, *flags* replace those for nodes."""
        text = (SHIPPED / "examples" / example).read_text()
        assert "train.py" in text
        if flags is not None:
            assert NODES in text
            text = text.replace(NODES, flags)
        script = self.folder / example
        # Every node of this Slurm is called localhost, so the agents say where they are.
        script.write_text(text.replace("train.py", f"--local-addr=127.0.0.1 {JOB}"))
        port = free_port()
        env = {
            "PATH": f"{self.cluster.home}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
            "PET_NPROC_PER_NODE": "1",
            "PET_RDZV_CONF": "quorum=0",
            "OMP_NUM_THREADS": "1",
            "GPUOPS_RUN_DIR": str(self.folder / "runs"),
            "GPUOPS_STORE": f"sqlite:///{self.folder}/run.db",
            "GPUOPS_SPOOL": str(self.folder / "spool"),
            "GPUOPS_STATE": str(self.folder / "state"),
            "GPUOPS_HEALTH_GATE": "off",
            "JOB_DIR": str(self.folder),
            "JOB_STEPS": str(steps),
            "JOB_PAUSE_S": "0.1",
            **env,
        }
        exported = ",".join(f"{name}={value}" for name, value in env.items())
        argv = ("sbatch", "--parsable", "-o", str(self.folder / "out-%A-%a"))
        argv += (f"--export=ALL,{exported}", *options, str(script))
        return self.cluster._run(*argv).stdout.strip()

    def diary(self, what):
        """Return the lines about *what* that the workers wrote: generation, rank and number."""
        path = self.folder / "steps"
        lines = whole_lines(path) if path.exists() else []
        found = (line.split() for line in lines)
        return [tuple(map(int, words[1:4])) for words in found if words[0] == what]

    def has_stepped(self, step=5, generation=0):
        """Wait until some rank has made *step* in *generation*."""
        wait_until(
            lambda: any(g >= generation and n >= step for g, _, n in self.diary("step")),
            self.said,
            LIMIT_S,
        )

    def enough(self):
        """Let the job end with its next step, however many it was to make."""
        (self.folder / "enough").touch()

    def said(self):
        """Return what the job wrote."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("out-*")))

    def finished(self, job_id):
        """Return the fields of the job at its end."""
        try:
            return self.cluster.finished(job_id, LIMIT_S)
        except AssertionError:
            raise AssertionError(self.said()) from None

    def victim(self):
        """Return the agent of a node that trains and does not serve the board: any may."""
        lines = (self.folder / "steps").read_text().splitlines()
        workers = {line.split()[5] for line in lines}
        training = {int(environ(pid)["GPUOPS_AGENT_PID"]) for pid in workers}
        return min(training - set(serving_agents()))


def environ(pid):
    """Return the environment of process *pid*."""
    items = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(item.partition("=")[::2] for item in items)


def parent_of(pid):
    """Return the parent of process *pid*."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def serving_agents():
    """Return the parents of all servers of boards on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"gpuops.control.tcp.serve" in path.read_bytes():
                yield parent_of(path.parent.name)


@pytest.fixture
def launch(cluster, tmp_path):
    return Launch(cluster, tmp_path)


def test_a_spare_takes_the_place_of_a_node_whose_task_is_gone(launch):
    job_id = launch.submit("elastic.sbatch", 3000)
    launch.has_stepped()
    os.kill(parent_of(launch.victim()), signal.SIGKILL)
    launch.has_stepped(generation=1)
    launch.enough()

    fields = launch.finished(job_id)

    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), launch.said()
    done = launch.diary("done")
    assert {rank for _, rank, _ in done} == {0, 1, 2}
    assert min(generation for generation, _, _ in done) >= 1


def test_an_agent_that_is_killed_is_started_again_by_its_parent(launch):
    # A busy machine may take longer to start it than the 15 s after which its node is given up.
    flags = "--rdzv-conf=quorum=0,keep_alive_interval=7"
    job_id = launch.submit("elastic.sbatch", 3000, "--nodes=2", flags=flags)
    launch.has_stepped()
    os.kill(launch.victim(), signal.SIGKILL)
    launch.has_stepped(generation=1)
    launch.enough()

    fields = launch.finished(job_id)

    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), launch.said()
    assert "the agent was killed; it starts again (1 of 3 in an hour)" in launch.said()
    assert {rank for _, rank, _ in launch.diary("done")} == {0, 1}


def test_slurms_notice_drains_the_run_and_the_job_goes_on_where_it_was(launch, cluster):
    # Not a fixed number: the step after which all stop lies seconds ahead, and must come.
    job_id = launch.submit("elastic.sbatch", 3000, JOB_DRAINS="1")
    launch.has_stepped()
    cluster._run("scancel", "--signal=USR1", job_id)
    wait_until(lambda: launch.diary("drained"), launch.said, LIMIT_S)
    drained = launch.diary("drained")[0][2]
    wait_until(lambda: drained in {n for _, _, n in launch.diary("load")}, launch.said, LIMIT_S)
    launch.enough()

    fields = launch.finished(job_id)

    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), launch.said()
    assert {number for _, _, number in launch.diary("drained")} == {drained}
    assert "exit 85: requeue me" in launch.said()


def test_a_fault_of_the_software_ends_the_chain(launch, cluster):
    flags = ("--array=1-3%1", "--nodes=1")
    array = launch.submit("chain.sbatch", 20, *flags, JOB_AT="0:3", JOB_DEED="raise")

    def over():
        return not cluster._run("squeue", "-h", "-j", array, check=False).stdout.strip()

    wait_until(over, launch.said, LIMIT_S)
    assert "link 1 (job" in launch.said()
    assert "ended with 93: no further link" in launch.said()
    assert "link 2" not in launch.said()
