"""Zombies and users' processes out of a recorded /proc."""

import os

import pytest
from support.fake_root import FakeRoot

from gpuops.host.leftovers import LISTED_MAX, Leftovers, UserProcess, read_leftovers

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def root(tmp_path):
    root = FakeRoot(tmp_path).write("proc/uptime", "1000.50 9.0\n")
    return process(root, 1, "systemd", 0)


def process(root, pid, name, uid, *, state="S", cgroup="/user.slice/session-4.scope", start_s=400):
    root.process(pid, name, state, start_s * TICKS)
    root.write(f"proc/{pid}/status", f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    return root.write(f"proc/{pid}/cgroup", f"0::{cgroup}\n")


def test_a_users_process_outside_of_jobs_is_left_over_with_its_age(root):
    process(root, 50, "python (1)", 1000)

    assert read_leftovers(root.path) == Leftovers(
        zombies=0, count=1, processes=(UserProcess(50, "python (1)", 1000, 600.5),)
    )


@pytest.mark.parametrize(
    "cgroup",
    [
        "/system.slice/slurmstepd.scope/job_42/step_0/user/task_0",
        "/slurm/uid_1000/job_42",
    ],
)
def test_a_process_of_a_job_is_not(root, cgroup):
    process(root, 50, "python", 1000, cgroup=cgroup)

    assert read_leftovers(root.path).count == 0


@pytest.mark.parametrize(("uid", "counts"), [(999, 0), (1000, 1), (60000, 1), (60001, 0)])
def test_only_people_count(root, uid, counts):
    process(root, 50, "python", uid)

    assert read_leftovers(root.path).count == counts


def test_zombies_are_counted_and_are_nobodys_leftovers(root):
    process(root, 50, "python", 1000, state="Z")
    process(root, 51, "sh", 0, state="Z")

    assert (read_leftovers(root.path).zombies, read_leftovers(root.path).count) == (2, 0)


def test_many_are_counted_and_the_first_are_listed(root):
    for pid in range(100, 100 + LISTED_MAX + 5):
        process(root, pid, "python", 1000)
    found = read_leftovers(root.path)

    assert (found.count, len(found.processes)) == (LISTED_MAX + 5, LISTED_MAX)


def test_a_process_that_vanished_half_way_is_left_out(root):
    process(root, 50, "python", 1000)
    (root.path / "proc/50/status").unlink()
    (root.path / "proc/51").mkdir()

    assert read_leftovers(root.path).count == 0


def test_where_process_one_cannot_be_seen_others_are_hidden(root):
    assert not read_leftovers(root.path).hidden
    (root.path / "proc/1/stat").unlink()
    assert read_leftovers(root.path).hidden
