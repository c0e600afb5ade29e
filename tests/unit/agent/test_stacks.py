"""Stacks out of faulthandler's and py-spy's own words."""

import faulthandler
import json
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.agent.monitors.stacks import (
    THREADS_MAX,
    StackFrame,
    Stacks,
    ThreadStack,
    parse_faulthandler,
    parse_pyspy,
)

DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/threading.py", line 982 in run
  File "/usr/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 [python3] (most recent call first):
  File "/job/my train.py", line 12 in <lambda>
  File "/job/my train.py", line ??? in step
  File "<string>", line 3 in <module>
"""


def test_the_last_thread_of_a_dump_is_the_main_thread():
    stacks = parse_faulthandler(DUMP)

    assert [thread.is_main for thread in stacks.threads] == [False, True]
    assert stacks.main.frames == (
        StackFrame("/job/my train.py", 12, "<lambda>"),
        StackFrame("/job/my train.py", 0, "step"),
        StackFrame("<string>", 3, "<module>"),
    )
    assert stacks.gil_owner is None


def test_a_real_dump_is_read():
    ready, over = threading.Event(), threading.Event()

    def wait_here():
        ready.set()
        over.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    ready.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = parse_faulthandler(file.read())
    over.set()
    thread.join()

    functions = [{frame.function for frame in t.frames} for t in stacks.threads]
    assert any("wait_here" in names for names in functions[:-1])
    assert "test_a_real_dump_is_read" in functions[-1]


def test_pyspy_says_who_holds_the_lock():
    frame = {"name": "hold", "filename": "/job/t.py", "line": 4}
    threads = [
        {"os_thread_id": 8, "thread_name": "loader", "owns_gil": True, "frames": [frame]},
        {"os_thread_id": 7, "thread_name": "python3", "owns_gil": False, "frames": []},
    ]
    stacks = parse_pyspy(json.dumps(threads).encode(), 7)

    assert stacks == Stacks(
        (
            ThreadStack((StackFrame("/job/t.py", 4, "hold"),), False, True, "loader"),
            ThreadStack((), True, False, "python3"),
        ),
        "py-spy",
    )
    assert stacks.gil_owner.name == "loader"


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"Error: no such process", b"{}", b"[1]", b"[{}]", b"[]", b"[" * 100_000),
        b'[{"owns_gil": true, "frames": [{"filename": "x", "name": "y", "line": "z"}]}]',
    ],
    ids=["empty", "error", "object", "number", "bare", "none", "deep", "line"],
)
def test_what_is_no_answer_of_pyspy_is_none(data):
    assert parse_pyspy(data, 1) is None


@given(st.text(max_size=300))
def test_any_text_can_be_read_as_a_dump(text):
    assert parse_faulthandler(text) is None or "thread" in text.lower()


def test_a_dump_is_bounded():
    dump = "Thread 0x1 (most recent call first):\n" + '  File "x", line 1 in f\n' * 500

    stacks = parse_faulthandler(dump * (THREADS_MAX + 5))

    assert len(stacks.threads) == THREADS_MAX
    assert len(stacks.main.frames) == 100
