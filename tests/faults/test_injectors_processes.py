"""Each injector that touches processes does to them what it says, to no other, and undoes it."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from support.dummy_run import DummyRun, goes_on, scene, stopped
from support.runs import is_alive, wait_until

from gpuops.drill.catalogue import BY_NAME
from gpuops.drill.fault import DrillOptions
from gpuops.drill.find import Victim, send
from gpuops.drill.inject import inject
from gpuops.errors import DrillError
from gpuops.host.clock import SystemClock
from gpuops.host.procfs import process


@pytest.fixture
def run(tmp_path):
    made = DummyRun(tmp_path)
    yield made
    made.end()


class Held:
    """A fault that is held until the test lets go of it."""

    def __init__(self, run, name, **wanted):
        self.fault = BY_NAME[name].plan(scene(run), DrillOptions(**wanted))
        self._go_on = threading.Event()
        self._end = [False]
        self.outcome = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self):
        # Its time is over when the test says so, not when a clock does.
        self.outcome = inject(self.fault, _Clock(self._end), self._go_on.wait)

    def let_go(self):
        self._end[0] = True
        self._go_on.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.outcome


class _Clock(SystemClock):
    """Stands still until the test ends the fault, and is then far beyond its time."""

    def __init__(self, is_over):
        self._is_over = is_over

    def mono_ns(self):
        return 10**18 if self._is_over[0] else 0


def do(run, name, **wanted):
    fault = BY_NAME[name].plan(scene(run), DrillOptions(**wanted))
    return inject(fault, SystemClock(), threading.Event().wait)


def test_a_rank_is_killed_and_nobody_else(run):
    do(run, "kill-rank", rank=1)

    wait_until(lambda: not is_alive(run.workers[1]))
    assert all(goes_on(pid) for pid in (run.agent, run.workers[0], run.helper, run.board))


def test_a_rank_is_ended_by_the_signal_that_was_named(run):
    do(run, "kill-rank", rank=0, signal="SIGABRT")

    wait_until(lambda: not is_alive(run.workers[0]))


def test_a_stopped_rank_stays_stopped_where_no_time_is_given(run):
    outcome = do(run, "stop-rank", rank=0)

    wait_until(lambda: stopped(run.workers[0]))
    assert outcome.failed == outcome.not_undone == ()
    assert goes_on(run.workers[1])


def test_a_stopped_rank_goes_on_after_its_time(run):
    held = Held(run, "stop-rank", rank=0, for_s=60)
    wait_until(lambda: stopped(run.workers[0]))

    assert held.let_go().not_undone == ()

    wait_until(lambda: goes_on(run.workers[0]))


def test_the_agent_alone_is_killed(run):
    do(run, "kill-agent")

    assert run.process.wait(20) == -9
    assert all(goes_on(pid) for pid in run.workers), "what becomes of them is not the injector's"


def test_a_node_dies_with_its_helpers_and_its_store(run):
    fault = BY_NAME["kill-node"].plan(scene(run), DrillOptions())
    assert "All 5 processes" in fault.breaks
    assert "including the store of the run" in fault.breaks

    inject(fault, SystemClock(), threading.Event().wait)

    wait_until(lambda: not any(is_alive(pid) for pid in run.everyone))


def test_a_frozen_node_stands_still_but_for_the_store_and_thaws(run):
    held = Held(run, "freeze-node")
    everyone = (run.agent, *run.workers, run.helper)
    wait_until(lambda: all(stopped(pid) for pid in everyone))
    assert goes_on(run.board)

    held.let_go()

    wait_until(lambda: all(goes_on(pid) for pid in everyone))


def test_the_store_freezes_too_where_asked(run):
    held = Held(run, "freeze-node", store=True)
    wait_until(lambda: all(stopped(pid) for pid in run.everyone))

    held.let_go()

    wait_until(lambda: all(goes_on(pid) for pid in run.everyone))


def test_a_slow_rank_stands_still_again_and_again_and_then_no_more(run):
    fault = BY_NAME["slow-rank"].plan(scene(run), DrillOptions(rank=1, share=0.75, for_s=1.0))
    assert fault.pulse.stopped_s == pytest.approx(0.15)
    seen = []

    def wait(seconds):
        wait_until(lambda: stopped(run.workers[1]) == (seconds > 0.1))
        seen.append(stopped(run.workers[1]))
        clock.now += round(seconds * 1e9)

    class Clock(SystemClock):
        now = 0

        def mono_ns(self):
            return self.now

    clock = Clock()
    inject(fault, clock, wait)

    assert seen == [True, False] * 5
    wait_until(lambda: goes_on(run.workers[1]))
    assert goes_on(run.workers[0])


@pytest.mark.parametrize("name", [None, "SIGTERM"])
def test_preemption_is_a_signal_to_the_agent(run, name):
    do(run, "preempt", signal=name)

    heard = run.folder / "heard"
    wait_until(lambda: heard.exists() and heard.read_text())
    assert int(heard.read_text()) == getattr(signal, name or "SIGUSR1")


def test_the_store_alone_is_killed(run):
    do(run, "kill-board")

    wait_until(lambda: not is_alive(run.board))
    assert all(goes_on(pid) for pid in (run.agent, *run.workers))


def test_a_slow_store_stands_still_and_then_runs_freely(run):
    held = Held(run, "slow-board")
    wait_until(lambda: stopped(run.board))
    assert held.fault.pulse.stopped_s == 2.0

    held.let_go()

    wait_until(lambda: goes_on(run.board))


def test_a_state_file_that_names_a_stranger_breaks_nothing(run):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        run.publish(pids={"0": stranger.pid})
        with pytest.raises(DrillError, match=r"is not rank 0: .*nothing was touched"):
            do(run, "kill-rank", rank=0)
        run.publish(agent_pid=stranger.pid)
        with pytest.raises(DrillError, match="is not the agent"):
            do(run, "kill-agent")
        run.publish(agent_pid=run.agent, board_pid=stranger.pid)
        with pytest.raises(DrillError, match=r"does not run gpuops\.control"):
            do(run, "kill-board")

        assert goes_on(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_run_of_somebody_else_is_refused(run):
    theirs = replace(scene(run), uid=os.geteuid() + 1)

    with pytest.raises(DrillError, match="belongs to user"):
        BY_NAME["kill-rank"].plan(theirs, DrillOptions(rank=0))


def test_what_has_ended_meanwhile_is_said(run):
    fault = BY_NAME["kill-rank"].plan(scene(run), DrillOptions(rank=1))
    os.kill(run.workers[1], signal.SIGKILL)
    wait_until(lambda: not is_alive(run.workers[1]))

    with pytest.raises(DrillError, match="has ended, or is another process by now"):
        inject(fault, SystemClock(), threading.Event().wait)


def test_a_pid_that_was_used_again_gets_no_signal(run):
    now = process(run.workers[0])
    victim = Victim(now.pid, now.start_ticks, os.geteuid(), "rank 0")

    assert not send(replace(victim, start_ticks=now.start_ticks + 1), signal.SIGKILL)
    assert not send(replace(victim, uid=victim.uid + 1), signal.SIGKILL)
    assert goes_on(run.workers[0])
    assert send(victim, signal.SIGKILL)


def test_a_frozen_node_with_a_dead_worker_thaws_all_the_same(run):
    fault = BY_NAME["freeze-node"].plan(scene(run), DrillOptions(for_s=0.1))
    run_end = run.helper
    os.kill(run_end, signal.SIGKILL)
    wait_until(lambda: process(run_end) is None or process(run_end).state == "Z")

    inject(fault, SystemClock(), threading.Event().wait)

    wait_until(lambda: all(goes_on(pid) for pid in (run.agent, *run.workers)))
