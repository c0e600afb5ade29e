"""Whose the processes are that a job left on its GPUs."""

import os

import pytest
from support.checks import NODE
from support.gpus import gpu, node

from gpuops.checks.core.runner import CheckRun
from gpuops.gate.hook import with_owners
from gpuops.host.nvml.facts import GpuProcess
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

V1 = "9:devices:/slurm_n1/uid_1001/job_17/step_batch\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n"
NO_JOB = "0::/user.slice/user-1001.slice/job_x\n"
# A busy machine takes long to start the child that looks.
BUSY_S = 30.0
FOUND = Finding(
    check="gpu_processes",
    entity=Entity(EntityKind.GPU, "GPU-0"),
    status=Status.FAIL,
    message="GPU 0: processes are still on it: 4242 (python)",
    failure_class=FailureClass.HOST_LEFTOVERS,
)


def ran(finding=FOUND):
    facts = {"gpus": node(gpu(0, processes=(GpuProcess(pid=4242),)), gpu(1))}
    return CheckRun(
        suite="epilog", node=NODE.id, start_us=1, end_us=2, findings=(finding,), facts=facts
    )


@pytest.mark.parametrize(
    ("cgroup", "told"),
    [
        (V1, "; 4242 is of job 17"),
        (V2, "; 4242 is of job 17"),
        (NO_JOB, f"; 4242 is of the job's user, {os.getuid()}"),
        (None, ""),
    ],
)
def test_a_left_over_process_is_named_by_its_job_or_its_user(tmp_path, cgroup, told):
    if cgroup is not None:
        path = tmp_path / "proc" / "4242" / "cgroup"
        path.parent.mkdir(parents=True)
        path.write_text(cgroup)
    (finding,) = with_owners(ran(), tmp_path, os.getuid(), deadline_s=BUSY_S).findings

    assert finding.message == FOUND.message + told


def test_another_users_process_is_nobodys(tmp_path):
    path = tmp_path / "proc" / "4242" / "cgroup"
    path.parent.mkdir(parents=True)
    path.write_text(NO_JOB)

    assert with_owners(ran(), tmp_path, os.getuid() + 1, deadline_s=BUSY_S) == ran()
