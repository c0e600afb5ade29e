"""A child that watches: heard without waiting, started again, ended."""

import os
import sys
import time
from contextlib import closing

import pytest

from gpuops.host.process.watcher import LINES_MAX, WatchingChild

WITHIN_S = 30.0


def child(text, **options):
    command = (sys.executable, "-c", text)
    return WatchingChild("test-child", command, os.environ, back_off_s=0.01, **options)


def lines(watching, count):
    """Return what came, once there are *count* lines."""
    found = []
    ends_s = time.monotonic() + WITHIN_S
    while len(found) < count:
        assert time.monotonic() < ends_s, found
        found += watching.take()
        time.sleep(0.01)
    return found


def test_lines_come_as_they_are_written():
    text = "import sys\nprint('one', flush=True)\nprint('two', flush=True)\nsys.stdin.read()"
    with closing(child(text)) as watching:
        assert lines(watching, 2) == [b"one\n", b"two\n"]
        assert watching.take() == []
        assert watching.pid is not None


def test_a_child_that_ends_is_started_again_and_not_for_ever():
    with closing(child("print(1); raise SystemExit(1)", restarts_max=3)) as watching:
        assert watching.given_up.wait(WITHIN_S)
        assert lines(watching, 4) == [b"1\n"] * 4


def test_a_child_with_nothing_to_watch_is_not():
    with closing(child("raise SystemExit(3)")) as watching:
        assert watching.given_up.wait(WITHIN_S)
        assert watching.restarts == 0


def test_a_program_that_is_not_there_is_given_up():
    command = ("/nonexistent/python",)
    watching = WatchingChild("test-child", command, {}, back_off_s=0.01, restarts_max=1)

    assert watching.given_up.wait(WITHIN_S)


def test_a_child_that_talks_without_end_takes_little_memory():
    text = "print('x\\n' * 100_000, end='', flush=True)\nprint('y' * 10**6)\nraise SystemExit(3)"
    with closing(child(text)) as watching:
        assert watching.given_up.wait(WITHIN_S)
        assert watching.take(10**6) == [b"x\n"] * LINES_MAX


@pytest.mark.parametrize("deaf", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_it_ends_at_once(deaf):
    text = f"import signal, time\n{deaf}\nprint(1, flush=True)\ntime.sleep(600)"
    watching = child(text)
    lines(watching, 1)
    pid = watching.pid
    watching.close(WITHIN_S)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert watching.given_up.is_set()
