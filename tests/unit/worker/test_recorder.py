"""What the shim does for the flight recorder, with a torch that is small or lacks it."""

import json
import stat
import subprocess
import sys

import pytest

import gpuops.worker.shim

SHIM = gpuops.worker.shim.__file__
C10D = """
class _WorkerServer:
    def __init__(self, path):
        open(path, "x").close()
        self.path = path
    def __del__(self):
        if hasattr(self, "path"):
            print("the server was destroyed")
"""
DISTRIBUTED = """
class Group:
    group_name = "0"
    def size(self):
        return 2

def _new_process_group_helper(size, rank, global_ranks_in_group, *rest, **more):
    made = object() if global_ranks_in_group == [7] else Group()
    return made, "store"
"""
JOB = """
import os, sys
from torch.distributed import distributed_c10d as d
d._new_process_group_helper(2, 0, [])
d._new_process_group_helper(2, 0, [4, 0], name="1")
d._new_process_group_helper(2, 0, [7])
d._new_process_group_helper(2, 0, global_ranks_in_group=[0, 1])
print(d._new_process_group_helper(2, 0, [])[1], os.path.exists("r.sock"), flush=True)
if (child := os.fork()) == 0:
    d._new_process_group_helper(2, 0, [])
    sys.exit()
os.waitpid(child, 0)
print("after the child", os.path.exists("r.sock"))
"""
NOTED = [[0, 1], [4, 0], [0, 1], [0, 1]]


@pytest.fixture
def run(tmp_path):
    """Run a script under the shim, with modules of a made-up torch; return what it wrote."""

    def run(c10d=C10D, distributed=DISTRIBUTED, job=JOB, **env):
        modules = {
            "__init__": "from torch._C import _distributed_c10d",
            "_C/__init__": "",
            "_C/_distributed_c10d": c10d,
            "distributed/__init__": "",
            "distributed/distributed_c10d": distributed,
        }
        for name, text in modules.items():
            path = tmp_path / "torch" / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        (tmp_path / "job.py").write_text(job)
        wanted = {"GPUOPS_RECORDER": "r.sock", "GPUOPS_GROUPS": "groups"}
        done = subprocess.run(
            [sys.executable, SHIM, "job.py"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin"} | wanted | env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout

    return run


def noted(tmp_path):
    return [json.loads(line)["ranks"] for line in (tmp_path / "groups").read_text().splitlines()]


def test_the_server_lives_until_the_worker_ends_also_if_a_child_ends(run, tmp_path):
    assert run() == "store True\nafter the child True\n"
    assert noted(tmp_path) == NOTED
    assert stat.S_IMODE((tmp_path / "groups").stat().st_mode) == 0o600
    # Nobody is to ask while the process ends.
    assert not (tmp_path / "r.sock").exists()


def test_a_torch_without_a_server_trains_and_names_its_groups(run, tmp_path):
    assert run(c10d="") == "store False\nafter the child False\n"
    assert noted(tmp_path) == NOTED


def test_a_server_that_cannot_start_costs_nothing_else(run, tmp_path):
    (tmp_path / "r.sock").write_text("of another process")
    assert run() == "store True\nafter the child True\n"
    assert noted(tmp_path) == NOTED
    assert (tmp_path / "r.sock").read_text() == "of another process"


def test_a_torch_that_makes_groups_otherwise_has_its_server(run, tmp_path):
    job = "import os\nimport torch.distributed.distributed_c10d\nprint(os.path.exists('r.sock'))"
    assert run(distributed="", job=job) == "True\n"
    assert not (tmp_path / "groups").exists()


def test_groups_that_cannot_be_noted_cost_nothing(run, tmp_path):
    (tmp_path / "groups").symlink_to("elsewhere")
    assert run() == "store True\nafter the child True\n"
    assert not (tmp_path / "elsewhere").exists()


def test_where_threads_may_run_short_there_is_no_server(run, tmp_path):
    # It would end the process that it cannot start a thread in.
    assert run(LOCAL_WORLD_SIZE="100000000") == "store False\nafter the child False\n"
    assert noted(tmp_path) == NOTED


@pytest.mark.parametrize("env", [{"GPUOPS_DISABLE": "1"}, {"GPUOPS_RECORDER": ""}])
def test_it_can_be_off(run, tmp_path, env):
    assert run(**env) == "store False\nafter the child False\n"
    assert not (tmp_path / "groups").exists()


def test_the_file_of_groups_is_bounded(run, tmp_path):
    run(distributed=DISTRIBUTED.replace("return 2", "return 2**20"))
    assert noted(tmp_path) == NOTED[1:2] + NOTED[2:3]
