"""The first line of a process at our side, and what is told when there is none."""

import os
import sys
import time

import pytest

from gpuops.host.process.sidecar import start_sidecar

ANSWERS = """
import sys
from gpuops.host.process.sidecar import report_and_detach
report_and_detach("ready " + sys.stdin.read())
sys.exit(sys.stdin.read() != "")
"""


def first_line(program, tell=b"", wait_s=30.0):
    """Return the first line of a Python *program*, and its exit code."""
    process = start_sidecar([sys.executable, "-P", "-c", program], dict(os.environ))
    said = process.first_line(time.monotonic() + wait_s, tell)
    assert process.write == -1
    return said, process.pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_it_hears_what_it_is_told_and_its_first_line_is_returned():
    said, pid = first_line(ANSWERS, b"token")

    assert said == "ready token"
    assert ended(pid) == 0


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", ""),
        ("print('half', end='')", ""),
        ("print('one'); print('two')", "one"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "\ufffd"),
        ("print('x' * 100_000)", "x" * 4000),
    ],
    ids=["none", "no whole line", "two", "no text", "too long"],
)
def test_a_first_line_is_bounded_and_always_text(program, said):
    found, pid = first_line(program)

    assert found[: len(said) or 1] == said
    assert len(found) < 10_000
    ended(pid)


def test_one_that_says_nothing_costs_no_more_than_the_time_given():
    began_s = time.monotonic()
    found, pid = first_line("import signal; signal.pause()", wait_s=0.2)
    took_s = time.monotonic() - began_s
    os.kill(pid, 9)
    ended(pid)

    assert found == ""
    assert 0.2 <= took_s < 10


def test_one_that_ended_before_it_was_told_is_a_failure_in_words():
    process = start_sidecar([sys.executable, "-P", "-c", ""], dict(os.environ))
    ended(process.pid)

    assert process.first_line(time.monotonic() + 10, b"token") == "failed Broken pipe"
