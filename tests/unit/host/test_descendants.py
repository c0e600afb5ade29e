"""Which processes a process has started, and those theirs."""

import os
import shutil
import subprocess

import pytest
from support.runs import wait_until

from gpuops.host.process.inspect import descendants


@pytest.fixture
def tree():
    """Yield a shell whose child, a shell too, has a child; no signal of the test reaches them."""
    script = "sh -c 'sleep 600; true'; true"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as process:
        yield process
        for pid in (process.pid, *descendants(process.pid)):
            os.kill(pid, 9)


def test_children_and_theirs_come_in_order(tree):
    wait_until(lambda: len(descendants(tree.pid)) == 2, what="the shells")
    child, grandchild = descendants(tree.pid)

    assert descendants(child) == [grandchild]
    assert descendants(grandchild) == []
    assert {child, grandchild} < set(descendants(os.getpid()))


def test_a_name_cannot_pretend_another_parent(tmp_path):
    program = tmp_path / "x) S 1 (y"
    program.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([program, "600"]) as process:
        try:
            assert process.pid in descendants(os.getpid())
        finally:
            process.kill()


def test_a_process_that_is_gone_has_none():
    process = subprocess.Popen(["true"])
    process.wait()

    assert descendants(process.pid) == []
