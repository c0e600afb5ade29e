"""What was broken heals, also when the injector is killed, stopped, or loses its keeper."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from support.dummy_run import DummyRun, goes_on, scene, stopped
from support.runs import is_alive, wait_until

from gpuops.drill.catalogue import BY_NAME
from gpuops.drill.fault import DrillOptions, Fault, UndoableStep
from gpuops.drill.inject import inject
from gpuops.drill.steps import RunProgram
from gpuops.host.clock import SystemClock
from gpuops.host.procfs import processes


@pytest.fixture
def run(tmp_path):
    made = DummyRun(tmp_path)
    yield made
    made.end()


def start_drill(run, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "gpuops", "drill", *words, "--run-dir", str(run.folder), "--yes"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def keepers_of(pid):
    """Return the keepers that *pid* started."""
    found = []
    for item in processes():
        try:
            with open(f"/proc/{item.pid}/cmdline", "rb") as file:  # noqa: PTH123 short and gone
                words = file.read()
            with open(f"/proc/{item.pid}/stat") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"gpuops.drill.undo" in words and parent == pid:
            found.append(item.pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_node_thaws_when_its_injector_is_ended(run, number):
    injector = start_drill(run, "freeze-node", "--for", "3600")
    everyone = (run.agent, *run.workers, run.helper)
    wait_until(lambda: all(stopped(pid) for pid in everyone))

    os.killpg(injector.pid, number)

    injector.wait(20)
    wait_until(lambda: all(goes_on(pid) for pid in everyone))


def test_a_slow_rank_runs_freely_when_its_injector_is_killed_while_it_stands_still(run):
    injector = start_drill(run, "slow-rank", "--rank", "0", "--share", "0.99", "--for", "3600")
    wait_until(lambda: stopped(run.workers[0]))

    injector.kill()

    injector.wait(20)
    wait_until(lambda: goes_on(run.workers[0]))


def test_a_stopped_injector_does_not_keep_anything_broken(run):
    injector = start_drill(run, "stop-rank", "--rank", "0", "--for", "0.5")
    wait_until(lambda: stopped(run.workers[0]))
    injector.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: goes_on(run.workers[0]))
    finally:
        injector.kill()
        injector.wait(20)


def test_without_its_keeper_the_injector_undoes_it_itself(run):
    fault = BY_NAME["stop-rank"].plan(scene(run), DrillOptions(rank=0, for_s=60))
    killed = []

    class Clock(SystemClock):
        def mono_ns(self):
            return 10**18 if killed else 0

    def wait(_seconds):
        wait_until(lambda: stopped(run.workers[0]))
        (keeper,) = keepers_of(os.getpid())
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not is_alive(keeper))
        killed.append(keeper)

    outcome = inject(fault, Clock(), wait)

    assert killed
    assert outcome.not_undone == ()
    wait_until(lambda: goes_on(run.workers[0]))


def test_no_keeper_is_left(run):
    injector = start_drill(run, "stop-rank", "--rank", "0", "--for", "0.2")

    assert injector.wait(30) == 0
    assert keepers_of(injector.pid) == []


def test_what_ended_meanwhile_needs_no_undoing(run):
    fault = BY_NAME["stop-rank"].plan(scene(run), DrillOptions(rank=0, for_s=60))
    gone = []

    class Clock(SystemClock):
        def mono_ns(self):
            return 10**18 if gone else 0

    def wait(_seconds):
        run.end()
        gone.append(True)

    assert inject(fault, Clock(), wait).not_undone == ()


def test_what_cannot_be_undone_is_told_and_the_rest_is_undone(tmp_path):
    marker = tmp_path / "undone"
    fault = Fault(
        scenario="test",
        breaks="",
        undone="",
        changes=(
            UndoableStep(RunProgram(("true",)), RunProgram(("touch", str(marker)))),
            UndoableStep(RunProgram(("true",)), RunProgram(("false",))),
            UndoableStep(RunProgram(("false",)), RunProgram(("false", "never"))),
        ),
        for_s=0.1,
    )

    outcome = inject(fault, SystemClock(), threading.Event().wait)

    assert outcome.not_undone == ("`false`: exited with code 1",)
    assert outcome.failed == ("`false`: exited with code 1",)
    assert marker.exists()


def test_the_keeper_drops_what_was_not_done(tmp_path):
    marker = tmp_path / "undone"
    promises = [
        {"kind": "program", "words": ["touch", str(marker)]},
        {"kind": "program", "words": ["touch", str(tmp_path / "dropped")]},
    ]
    said = "".join(json.dumps(item) + "\n" for item in promises) + "drop\n"

    done = subprocess.run(
        [sys.executable, "-m", "gpuops.drill.undo", "60"],
        input=said,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "ready\n[]\n")
    assert marker.exists()
    assert not (tmp_path / "dropped").exists()
