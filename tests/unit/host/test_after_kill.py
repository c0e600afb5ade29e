"""A process after SIGKILL: being taken apart is not being stuck."""

import subprocess
import sys

import pytest

from gpuops.host.process.inspect import KillOutcome, kill_outcome

EXITING, OTHER = 0x400104, 0x400100


def tree(root, *threads):
    for n, (state, flags) in enumerate(threads):
        task = root / f"proc/71/task/{71 + n}"
        task.mkdir(parents=True)
        (task / "stat").write_text(f"{71 + n} (a b) c) {state} 1 71 71 0 -1 {flags} 9 0 0 0\n")
    return root


@pytest.mark.parametrize(
    ("threads", "left"),
    [
        ([("R", EXITING)], KillOutcome.EXITING),
        ([("Z", EXITING), ("R", EXITING)], KillOutcome.EXITING),
        ([("D", EXITING)], KillOutcome.STUCK),
        ([("Z", EXITING), ("D", OTHER)], KillOutcome.STUCK),
        ([("R", EXITING), ("R", OTHER)], KillOutcome.STUCK),
        ([("Z", EXITING), ("X", EXITING)], KillOutcome.NOTHING),
    ],
)
def test_all_threads_of_one_that_exits_do_so_and_none_waits(tmp_path, threads, left):
    assert kill_outcome(71, tree(tmp_path, *threads)) is left


def test_a_real_process_lives_and_then_leaves_its_exit_code():
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert kill_outcome(process.pid) is KillOutcome.STUCK
        process.kill()
        process.wait()
        assert kill_outcome(process.pid) is KillOutcome.NOTHING
