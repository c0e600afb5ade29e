"""Helpers that have left their group, session and parent are found by what they inherited."""

import os
import subprocess
import sys

import pytest
from support.runs import is_alive, wait_until

from gpuops.host.process.inspect import kill_env_tagged

FAR = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
NEAR = (
    "import subprocess, sys;"
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
)


@pytest.fixture
def mark():
    return f"of-test-{os.getpid()}"


def started(env, *words):
    process = subprocess.Popen(
        [sys.executable, "-c", *words], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    )
    with process.stdout:
        pid = int(process.stdout.readline())
    return process, pid


def test_an_orphan_in_a_session_of_its_own_is_ended_and_a_stranger_is_not(mark):
    parent, orphan = started({"GPUOPS_TEST_MARK": mark}, NEAR, FAR)
    parent.wait(30)
    stranger, _pid = started({"GPUOPS_TEST_MARK": f"{mark}0"}, FAR)
    try:
        assert kill_env_tagged("GPUOPS_TEST_MARK", mark) == [orphan]
        wait_until(lambda: not is_alive(orphan), 30, "its end")
        assert stranger.poll() is None
        assert kill_env_tagged("GPUOPS_TEST_MARK", mark) == []
    finally:
        stranger.kill()
        stranger.wait()


def test_the_one_who_asks_is_spared_and_no_proc_is_no_error(mark, tmp_path):
    code = (
        "import sys; from gpuops.host.process.inspect import kill_env_tagged as kill; "
        "kill('M', sys.argv[1])"
    )
    env = {**os.environ, "M": mark}
    assert subprocess.run([sys.executable, "-c", code, mark], env=env, check=False).returncode == 0
    assert kill_env_tagged("M", mark, tmp_path) == []
