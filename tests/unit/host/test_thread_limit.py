"""The room for threads is that of the tightest limit: machine, user or control group."""

import math
import resource

import pytest

from gpuops.host.thread_limit import _threads, room_for_threads

V2 = "0::/kubepods/pod1/c1\n"
V1 = "5:cpu,cpuacct:/other\n4:pids:/docker/abc\n0::/\n"


@pytest.fixture
def write(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


MACHINE = {
    "proc/sys/kernel/threads-max": 900_000,
    "proc/sys/kernel/pid_max": 32_768,
    "proc/loadavg": "0.10 0.20 0.30 3/2768 99",
}


def group(path, limit, current):
    return {f"sys/fs/cgroup/{path}/pids.{k}": v for k, v in (("max", limit), ("current", current))}


CASES = {
    "nothing known": ({}, math.inf),
    "the machine": (MACHINE, 30_000),
    "a group": (MACHINE | {"proc/self/cgroup": V2} | group("kubepods/pod1/c1", 500, 90), 410),
    "one above it": (
        MACHINE
        | {"proc/self/cgroup": V2}
        | group("kubepods/pod1/c1", "max", 90)
        | group("kubepods/pod1", 1024, 1000),
        24,
    ),
    "version 1": (MACHINE | {"proc/self/cgroup": V1} | group("pids/docker/abc", 99, 9), 90),
    # As in a container: the path is that of the host, the mount is its own.
    "mounted at the root": (MACHINE | {"proc/self/cgroup": V2} | group(".", 200, 60), 140),
    "a group without pids": (MACHINE | {"proc/self/cgroup": V1}, 30_000),
    "damaged": (MACHINE | {"proc/loadavg": "", "proc/self/cgroup": "x\n::"}, math.inf),
}


@pytest.mark.parametrize(("files", "room"), CASES.values(), ids=CASES)
def test_the_tightest_limit_counts(write, tmp_path, files, room, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)  # root has no limit of its user
    write(files)
    assert room_for_threads(tmp_path) == room


def test_threads_of_the_same_user_count_for_its_limit(tmp_path, monkeypatch):
    for name in ("1/task/1", "22/task/22", "22/task/23", "33"):  # 33 has ended
        (tmp_path / "proc" / name).mkdir(parents=True)
    uid = tmp_path.stat().st_uid
    assert _threads(tmp_path, uid) == 3
    assert _threads(tmp_path, uid + 1) == 0

    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    assert room_for_threads(tmp_path) == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert room_for_threads(tmp_path) == math.inf


def test_this_machine_has_room():
    assert room_for_threads() > 0
