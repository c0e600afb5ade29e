"""How much memory could be taken: of the machine, and below each limit around the process."""

import pytest

from gpuops.checkpoint.memory.available import available_bytes
from gpuops.checkpoint.types import CheckpointError

GIB = 2**30
MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable:   {40 * 2**20} kB\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
TOP = "sys/fs/cgroup"


@pytest.fixture
def machine(tmp_path):
    def build(files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return build


def v2(path, folders, **more):
    files = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2, **more}
    for folder, (limit, used) in folders.items():
        files |= {
            f"{TOP}{folder}/memory.max": f"{limit}\n",
            f"{TOP}{folder}/memory.high": "max\n",
            f"{TOP}{folder}/memory.current": f"{used}\n",
        }
    return files


def v1(path, folders):
    files = {
        "proc/self/cgroup": f"9:name=systemd:/\n5:cpu,memory:{path}\n0::/\n",
        "proc/self/mountinfo": V1,
    }
    for folder, (limit, used) in folders.items():
        files |= {
            f"{TOP}/memory{folder}/memory.limit_in_bytes": f"{limit}\n",
            f"{TOP}/memory{folder}/memory.usage_in_bytes": f"{used}\n",
        }
    return files


def test_without_limits_it_is_what_the_machine_has(machine):
    assert available_bytes(machine({})) == 40 * GIB
    assert available_bytes(machine(v2("/", {}))) == 40 * GIB


def test_this_machine_has_some():
    assert 0 < available_bytes() < 2**60


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 5 kB\n", "MemAvailable: many\n"])
def test_a_machine_that_does_not_say_is_an_error(machine, meminfo):
    with pytest.raises(
        CheckpointError, match="cannot determine the available memory: /proc/meminfo lacks"
    ):
        available_bytes(machine({"proc/meminfo": meminfo}))


def test_a_machine_without_proc_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot determine the available memory: cannot read"):
        available_bytes(tmp_path)


def test_the_least_room_of_all_levels_counts(machine):
    levels = {
        "/slurm/job_7/step_0": ("max", 1 * GIB),
        "/slurm/job_7": (16 * GIB, 4 * GIB),
        "/slurm": (30 * GIB, 10 * GIB),
    }
    assert available_bytes(machine(v2("/slurm/job_7/step_0", levels))) == 12 * GIB


def test_the_limit_of_another_cgroup_does_not_count(machine):
    levels = {"/a": (10 * GIB, 0), "/b": (1 * GIB, 0), "/a/c": (1 * GIB, 0)}

    assert available_bytes(machine(v2("/a", levels))) == 10 * GIB


def test_memory_high_is_a_limit_too(machine):
    files = v2("/a", {"/a": (16 * GIB, 4 * GIB)})
    files[f"{TOP}/a/memory.high"] = f"{8 * GIB}\n"

    assert available_bytes(machine(files)) == 4 * GIB


def test_inactive_page_cache_is_room(machine):
    files = v2("/a", {"/a": (16 * GIB, 15 * GIB)})
    files[f"{TOP}/a/memory.stat"] = f"anon 5\ninactive_file {3 * GIB}\nactive_file 77\n"
    assert available_bytes(machine(files)) == 4 * GIB

    files = v1("/a", {"/a": (16 * GIB, 15 * GIB)})
    files[f"{TOP}/memory/a/memory.stat"] = f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n"
    assert available_bytes(machine(files)) == 3 * GIB


def test_no_room_is_never_below_zero(machine):
    assert available_bytes(machine(v2("/a", {"/a": (1 * GIB, 2 * GIB)}))) == 0


def test_version_1_has_limits_at_each_level(machine):
    levels = {
        "/slurm/uid_0/job_7": (9223372036854771712, GIB),
        "/slurm/uid_0": (12 * GIB, 2 * GIB),
        "": (9223372036854771712, 50 * GIB),
    }

    assert available_bytes(machine(v1("/slurm/uid_0/job_7", levels))) == 10 * GIB


def test_version_1_describes_limits_that_are_out_of_sight(machine):
    files = v1("/a", {"/a": (9223372036854771712, 2 * GIB)})
    files[f"{TOP}/memory/a/memory.stat"] = f"cache 1\nhierarchical_memory_limit {7 * GIB}\n"

    assert available_bytes(machine(files)) == 5 * GIB


def test_a_container_that_shows_its_own_cgroup_as_the_top_is_limited(machine):
    files = v1("/docker/0123abcd", {"": (6 * GIB, GIB)})
    assert available_bytes(machine(files)) == 5 * GIB


def test_a_cgroup_outside_of_the_namespace_leads_nowhere_else(machine):
    files = v2("/../../other", {"": (6 * GIB, GIB)})
    (machine(files) / "other").mkdir()

    assert available_bytes(machine(files)) == 5 * GIB


def test_a_mountinfo_of_many_lines_is_read_to_its_end(machine):
    files = v2("/a", {"/a": (6 * GIB, GIB)})
    many = "".join(f"{n} 23 0:5 / /mnt/{n} rw - tmpfs tmpfs rw\n" for n in range(9000))
    files["proc/self/mountinfo"] = many + V2

    assert available_bytes(machine(files)) == 5 * GIB


def test_strict_overcommit_is_a_limit(machine):
    files = {
        "proc/meminfo": MEMINFO + "CommitLimit:  3145728 kB\nCommitted_AS:  1048576 kB\n",
        "proc/sys/vm/overcommit_memory": "2\n",
    }
    assert available_bytes(machine(files)) == 2 * GIB

    files["proc/sys/vm/overcommit_memory"] = "0\n"
    assert available_bytes(machine(files)) == 40 * GIB


@pytest.mark.parametrize("name", ["memory.max", "memory.current", "memory.stat", "memory.high"])
def test_files_of_a_cgroup_that_make_no_sense_are_skipped(machine, name):
    files = v2("/a", {"/a": (60 * GIB, GIB)})
    files[f"{TOP}/a/{name}"] = "\x00 lots\n"

    assert available_bytes(machine(files)) == 40 * GIB
