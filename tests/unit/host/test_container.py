"""What a container takes from a run, and who is only called root there."""

import subprocess
import sys

import pytest
from support.services import unavailable

from gpuops.agent.launch.node_context import lost_in_container
from gpuops.agent.launch.preconditions import refuse_foreign_proc
from gpuops.errors import UsageError
from gpuops.host.container import ContainerFacts, container_facts

JOB = {"SLURM_JOB_ID": "7"}
NO_LOG = "cannot open /dev/kmsg: No such file or directory"


def test_a_machine_that_hides_its_log_from_users_is_no_container(tmp_path):
    assert lost_in_container(ContainerFacts(kernel_log=NO_LOG), JOB, tmp_path / "users") is None


@pytest.mark.parametrize(
    ("facts", "env", "expected"),
    [
        ({"has_own_users": True}, {}, []),
        ({"has_own_users": True, "kernel_log": NO_LOG}, {}, ["NVML alone", NO_LOG]),
        ({"has_own_pids": True}, {}, ["other process ids", "in memory end with it"]),
        ({"has_mark": True}, JOB, ["only if", "users is mounted"]),
    ],
)
def test_what_is_lost_is_one_line(tmp_path, facts, env, expected):
    line = lost_in_container(ContainerFacts(**facts), env, tmp_path / "users")

    assert (line is None) == (not expected)
    assert all(text in line for text in expected)
    assert "\n" not in (line or "")


def test_a_folder_for_users_events_that_is_mounted_is_not_missed(tmp_path):
    assert lost_in_container(ContainerFacts(has_mark=True), JOB, tmp_path) is None


def test_marks_and_the_kernel_log_are_looked_for_below_the_root(tmp_path):
    (tmp_path / ".singularity.d").mkdir()

    facts = container_facts(tmp_path)

    assert facts.has_mark
    assert facts.is_container
    assert "No such file" in facts.kernel_log
    assert not facts.has_foreign_proc
    refuse_foreign_proc(facts)


def test_a_proc_of_other_processes_is_refused():
    with pytest.raises(UsageError, match="--mount-proc"):
        refuse_foreign_proc(ContainerFacts(has_foreign_proc=True))


def test_root_of_a_namespace_with_one_uid_is_no_root_of_a_system():
    code = "from gpuops.host.trust import is_system_root as r; print(r(0), r(1000))"
    argv = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr:
        unavailable(f"no user namespace can be made here: {done.stderr}")

    assert done.stdout.split() == ["False", "False"], done.stderr
