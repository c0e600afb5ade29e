"""The small questions of a launch: grace, torch's variables, nesting, who is who."""

from pathlib import Path
from signal import SIGTERM, SIGUSR1

import pytest
from support.launches import requested

from gpuops.agent.launch.identity import fingerprint, leave, meaning
from gpuops.agent.launch.preconditions import refuse_nested, why_not_python
from gpuops.agent.launch.slurm import drain_grace
from gpuops.agent.launch.torch_compat import HEARTBEAT, collective_env, heartbeat_s
from gpuops.errors import UsageError

pytestmark = pytest.mark.torch
NOW_S = 1_700_000_000.0


def ends_in(seconds):
    return {"SLURM_JOB_END_TIME": f"{NOW_S + seconds:.0f}"}


@pytest.mark.parametrize(
    ("env", "signal", "flag_s", "grace_s"),
    [
        ({}, SIGTERM, None, 25.0),
        (ends_in(100), SIGTERM, None, 25.0),
        ({}, SIGTERM, 120.0, 120.0),
        ({}, SIGUSR1, None, 90.0),
        ({}, SIGUSR1, 40.0, 40.0),
        (ends_in(120), SIGUSR1, None, 115.0),
        (ends_in(120), SIGUSR1, 60.0, 60.0),
        (ends_in(30), SIGUSR1, 60.0, 25.0),
        (ends_in(0), SIGUSR1, None, 1.0),
        (ends_in(36_000), SIGUSR1, None, 90.0),  # a preemption, hours before the time limit
    ],
)
def test_the_time_between_notice_and_sigkill(env, signal, flag_s, grace_s):
    assert drain_grace(env, NOW_S, signal, flag_s) == grace_s


def test_torch_is_told_to_dump_into_the_folder():
    assert collective_env({}, Path("/runs/g0"), torch_version="2.13.0+cpu") == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        HEARTBEAT: "720",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/runs/g0/flight_recorder_rank_",
    }


def test_nccl_times_its_collectives_where_slow_ranks_are_looked_for():
    name = "TORCH_NCCL_ENABLE_TIMING"

    assert collective_env({}, Path("/runs"), are_timed=True)[name] == "1"
    assert name not in collective_env({}, Path("/runs"))
    assert name not in collective_env({name: "0"}, Path("/runs"), are_timed=True)


def test_an_older_torch_knows_older_names():
    env = collective_env({}, Path("/runs/g0"), torch_version="2.8.0")

    assert env["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/runs/g0/flight_recorder_rank_"


@pytest.mark.parametrize(
    "theirs",
    [
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        {HEARTBEAT: "90"},
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"},
        {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_what_the_user_set_stays(theirs):
    added = collective_env(theirs, Path("/runs"))

    assert not added.keys() & theirs.keys()
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" in theirs:
        assert "TORCH_FR_BUFFER_SIZE" not in added


def test_the_heartbeat_comes_after_a_long_hang_timeout():
    assert heartbeat_s({}, 1200.0) == 1320.0
    assert heartbeat_s({HEARTBEAT: "90"}, 1200.0) == 90.0


def test_the_names_that_torch_is_told_are_in_this_torch():
    import torch

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    content = library.read_bytes()
    for name in (b"TORCH_FR_BUFFER_SIZE", b"TORCH_FR_DUMP_TEMP_FILE"):
        assert name in content
    header = "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    text = (Path(torch.__file__).parent / header).read_text()
    for name in ("DUMP_ON_TIMEOUT", "ENABLE_MONITORING", "HEARTBEAT_TIMEOUT_SEC"):
        assert f'"TORCH_NCCL_{name}"' in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.py", b"#!/bin/sh\n''':'\nexec python3 $0\n'''", None),
        ("train", b"import torch\n", None),
        ("train", b"#!/usr/bin/env python3\n", None),
        ("train", b"#!/opt/pypy/bin/pypy\n", None),
        ("train", b"", None),
        ("train.sh", b"#!/bin/bash\npython x.py\n", "a script for /bin/bash"),
        ("train", b"#! /usr/bin/env bash\n", "a script for /usr/bin/env"),
        ("a.out", b"\x7fELF\x02\x01", "a compiled program"),
    ],
)
def test_a_script_that_says_itself_that_it_is_not_python(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)

    assert why_not_python(tmp_path / name) == said


def test_such_a_script_is_refused_with_what_to_write(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\n")

    with pytest.raises(UsageError, match=r"is a script for /bin/bash, .* --no-python before it"):
        requested(script)


def agent(proc, pid, *words):
    (proc / pid).mkdir(parents=True)
    (proc / pid / "cmdline").write_bytes(b"\0".join(word.encode() for word in words) + b"\0")


def test_an_agent_inside_an_agent_is_refused(tmp_path):
    agent(tmp_path, "7", "/usr/bin/python3", "/opt/bin/gpuops", "run", "train.py")
    agent(tmp_path, "8", "/usr/bin/python3", "-m", "gpuops", "run", "train.py")
    agent(tmp_path, "9", "/usr/bin/python3", "train.py", "run")

    for pid in ("7", "8"):
        with pytest.raises(UsageError, match=f"a worker of a `gpuops run` already .process {pid}"):
            refuse_nested({"GPUOPS_AGENT_PID": pid}, tmp_path)
    for pid in ("9", "10", "", "x"):  # another process by now; gone; nonsense
        refuse_nested({"GPUOPS_AGENT_PID": pid}, tmp_path)


def test_what_agents_of_a_run_must_have_in_common():
    base = ("--nnodes=2", "--rdzv-endpoint=h:1", "--nproc-per-node=2", "-m", "train")
    one = fingerprint(requested(*base, "--lr", "1"))

    same = (*base[:4], "--log-dir=/tmp/x", "--node-rank=1", "-m", "train", "--lr", "1")
    assert fingerprint(requested(*same)) == one
    for other in (
        (*base, "--lr", "2"),
        ("--nnodes=3", *base[1:], "--lr", "1"),
        (*base[:2], "--nproc-per-node=4", *base[3:], "--lr", "1"),
        (*base[:4], "evaluate", "--lr", "1"),
    ):
        assert fingerprint(requested(*other)) != one


def test_the_folder_of_the_script_may_differ_from_node_to_node(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").touch()

    one, two = (fingerprint(requested(tmp_path / name / "train.py")) for name in ("a", "b"))
    assert one == two


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, None), (1, None), (64, None), (85, "RequeueExit"), (86, "epilog"), (93, "chain of jobs")],
)
def test_an_exit_code_says_what_it_asks_of_the_scheduler(code, said):
    line = meaning(code)

    assert (line is None) if said is None else (said in line and f"exit {code}" in line)


def test_the_exit_code_goes_into_a_file_that_is_there(tmp_path):
    file = tmp_path / "code"
    assert leave(85, str(file)) is None
    assert leave(85, None) is None
    assert not file.exists()
    file.write_text("something longer")
    assert leave(85, str(file)) is None
    assert file.read_text() == "85\n"
    (tmp_path / "link").symlink_to(file)
    assert "cannot write the exit code" in leave(0, str(tmp_path / "link"))
    assert file.read_text() == "85\n"
