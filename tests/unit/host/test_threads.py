"""The state of a process is that of its worst thread."""

import os
import threading

import pytest

from gpuops.host.process.inspect import ThreadState, process_state, thread_state

GONE = 2**22 + 1


def tree(tmp_path, states):
    """A process 71 with a thread for each of *states*, the main thread first."""
    for n, state in enumerate(states):
        task = tmp_path / f"proc/71/task/{71 + n}"
        task.mkdir(parents=True)
        rest = " ".join(["0"] * 18)
        (task / "stat").write_text(f"{71 + n} (gpuops:0) {state} {rest} 99 0\n")
        (task / "wchan").write_text("nv_wait" if state == "D" else "0")
    return tmp_path


@pytest.mark.parametrize(
    ("states", "state"),
    [("S", "S"), ("SD", "D"), ("ZD", "D"), ("ZS", "S"), ("RS", "R"), ("SR", "S"), ("ZZ", "Z")],
)
def test_a_thread_inside_the_kernel_speaks_for_its_process(tmp_path, states, state):
    assert process_state(71, tree(tmp_path, states)).state == state


def test_where_it_waits_inside_the_kernel_is_told(tmp_path):
    assert process_state(71, tree(tmp_path, "SD")) == ThreadState("D", "nv_wait")
    assert process_state(71, tree(tmp_path / "x", "S")).wchan is None


def test_a_process_whose_threads_have_all_ended_has_ended(tmp_path):
    assert process_state(71, tree(tmp_path, "ZX")).ended
    assert not process_state(71, tree(tmp_path / "x", "ZD")).ended


def test_a_process_that_is_gone_has_no_state(tmp_path):
    assert process_state(GONE) is None
    assert thread_state(os.getpid(), GONE) is None


def test_this_very_thread_runs():
    assert thread_state(os.getpid(), threading.get_native_id()).state == "R"
