"""``gpuops run`` in namespaces as pyxis and Apptainer make them.

Inside are PID, mount and user namespaces of their own, another uid, an empty /run, and a /dev
without kmsg.
"""

import subprocess

import pytest
from support.runs import JOBS, Run
from support.services import unavailable

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount")
# Devices cannot be made in a user namespace: those of the machine are mounted one by one.
DEVICES = """
set -e
mkdir "$DEV" && mount -t tmpfs tmpfs "$DEV"
for name in null zero urandom random; do
  touch "$DEV/$name" && mount --bind "/dev/$name" "$DEV/$name"
done
mkdir "$DEV/shm" && mount -t tmpfs tmpfs "$DEV/shm"
mount --rbind "$DEV" /dev
mount -t tmpfs tmpfs /run
exec unshare --user --map-user=1000 --map-group=1000 "$@"
"""


class Contained(Run):
    """A run whose agent is process 1 of a container."""

    def __init__(self, folder, *words, mounts_proc=True, **options):
        proc = ["--mount-proc"] if mounts_proc else []
        front = [*NAMESPACES, *proc, "sh", "-c", DEVICES, "sh"]
        super().__init__(
            folder,
            *words,
            popen=lambda argv, **kept: subprocess.Popen([*front, *argv], **kept),
            **options,
        )


@pytest.fixture(autouse=True)
def namespaces(tmp_path, monkeypatch):
    monkeypatch.setenv("DEV", str(tmp_path / "dev"))
    probe = [*NAMESPACES, "--mount-proc", "sh", "-c", DEVICES, "sh", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        unavailable(f"no container of namespaces can be made here: {done.stderr}")
    (tmp_path / "dev").rmdir()


def test_a_killed_rank_resumes_from_memory_and_what_is_lost_is_one_line(tmp_path):
    env = {"SLURM_JOB_ID": "7", "GPUOPS_SPOOL_USERS": "/run/users"}
    env |= {"JOB_DIR": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/0"}  # of the host: not there
    with Contained(tmp_path / "run", JOBS / "frameworks.py", "ddp", env=env) as run:
        assert run.finish(180) == 0, run.said()

    (line,) = [line for line in run.err.read_text().splitlines() if "container" in line]
    assert line.startswith("gpuops: in a container: Xids come from NVML alone, no OOM kill is")
    assert "/dev/kmsg" in line
    assert "checkpoints in memory end with it" in line
    assert "if /run/users is mounted" in line
    assert line.endswith("; all else works")
    (incident,) = run.incidents()
    assert [c["id"] for c in incident["culprits"] if c["kind"] == "rank"] == ["1"]
    assert incident["state"] == "closed"
    assert {p["tier"] for p in run.payloads("checkpoint.restored")} == {"memory"}
    for rank in (0, 1):
        assert f"rank {rank} from step 4: same True" in run.said()


@pytest.mark.soak
def test_a_killed_agent_is_started_again_by_process_1_and_finds_its_states(tmp_path):
    env = {"JOB_DIR": str(tmp_path), "KILL_AGENT": "1"}
    with Contained(tmp_path / "run", JOBS / "frameworks.py", "ddp", env=env) as run:
        assert run.finish(180) == 0, run.said()

    assert "the agent was killed; it starts again (1 of 3 in an hour)" in run.said()
    for rank in (0, 1):
        assert f"rank {rank} from step 4: same True" in run.said()


def test_another_namespaces_proc_is_refused_in_one_line(tmp_path):
    with Contained(tmp_path / "run", JOBS / "train.py", mounts_proc=False) as run:
        assert run.finish() == 64

    (line,) = run.err.read_text().splitlines()
    assert "/proc shows another one" in line
    assert "--mount-proc" in line
