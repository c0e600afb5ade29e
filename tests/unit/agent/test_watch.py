"""Real short-lived processes: when they end, and how the rest is ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import is_alive, wait_until

from gpuops.agent.elastic.exits import RankFiles
from gpuops.agent.elastic.teardown import ExitWatcher, ObservedExit, end_workers
from gpuops.agent.elastic.workers import RingReader, Worker, Workers
from gpuops.host.clock import SystemClock
from gpuops.host.process.inspect import KillOutcome

NO_PID = 2**22 + 1
STUBBORN = "import signal, time; signal.signal(15, lambda *_: None); print(1, flush=True)\n"


@pytest.fixture
def start():
    started = []

    def run(code):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


SLEEPING = "import time; print(1, flush=True); time.sleep(60)"


@pytest.fixture
def watch():
    watchers = []

    def run(*processes):
        pids = {number: process.pid for number, process in enumerate(processes)}
        watchers.append(ExitWatcher(pids, SystemClock()))
        return pids, watchers[-1]

    yield run
    for watcher in watchers:
        watcher.close()


def test_the_killed_one_is_never_dated_after_the_one_that_died_of_it(start, watch):
    first = start(SLEEPING)
    second = start(
        "import os, sys, time; print(1, flush=True)\n"
        f"fd = os.pidfd_open({first.pid}); import select\n"
        "p = select.poll(); p.register(fd); p.poll(); sys.exit(5)"
    )
    _pids, watcher = watch(second, first)
    os.kill(first.pid, signal.SIGKILL)

    assert watcher.wait(lambda seen: len(seen) == 2, 10)
    seen = watcher.seen()
    assert (seen[1].code, seen[0].code) == (-9, 5)
    assert seen[1].seen_mono_ns <= seen[0].seen_mono_ns
    assert first.wait() == -9, "the watcher leaves the reaping to its owner"


def test_a_process_that_is_gone_already_counts_as_ended(start, watch):
    process = start("print(1)")
    process.wait()
    _pids, watcher = watch(process)

    assert watcher.seen()[0].code is None


def test_the_rest_ends_by_our_signal_and_the_stubborn_by_sigkill(start, watch):
    easy, stubborn = start(SLEEPING), start(STUBBORN + "time.sleep(60)")
    pids, watcher = watch(easy, stubborn)

    done = end_workers(pids, watcher, SystemClock(), first=signal.SIGTERM, grace_s=2)

    assert done.sent[0].signals == (signal.SIGTERM,)
    assert done.sent[1].signals == (signal.SIGTERM, signal.SIGKILL)
    assert done.stuck == ()
    assert (watcher.seen()[0].code, watcher.seen()[1].code) == (-15, -9)


def test_an_urgent_user_does_not_wait_for_the_grace(start, watch):
    pids, watcher = watch(start(STUBBORN + "time.sleep(60)"))

    done = end_workers(
        pids,
        watcher,
        SystemClock(),
        first=signal.SIGINT,
        grace_s=60,
        is_urgent=lambda: True,
    )

    assert done.sent[0].signals[-1] is signal.SIGKILL


class ReapedElsewhere:
    """What a watcher knows of workers that torch was faster to reap."""

    def __init__(self, pids):
        self._seen = {rank: ObservedExit(pid, None, 0, 0) for rank, pid in pids.items()}

    def seen(self):
        return dict(self._seen)

    def wait(self, enough, _timeout_s):
        return enough(self._seen)


def test_a_process_id_that_torch_gave_back_is_not_signalled_again(start, tmp_path):
    note = tmp_path / "stranger"
    start(
        "import subprocess, sys, time\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                     start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(c.pid)); print(1, flush=True)\n"
        "sys.exit(c.wait() + 100)"
    )
    stranger = int(note.read_text())
    pids = {0: stranger}
    try:
        done = end_workers(
            pids, ReapedElsewhere(pids), SystemClock(), first=signal.SIGTERM, grace_s=0
        )

        assert done.sent == {}
        assert is_alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_an_end_without_a_code_is_torchs_to_judge(start):
    process, other = start("print(1)"), start(SLEEPING)
    process.wait()
    workers = Workers([worker(0, process.pid), worker(1, other.pid)], SystemClock())
    try:
        assert workers.needs_exit_check
        assert not workers.has_failed
        other.kill()
        wait_until(lambda: workers.has_failed, 10, "the end of the other")
    finally:
        workers.close()


class NeverEnds:
    """What a watcher knows of workers that SIGKILL has not ended; no time passes."""

    def seen(self):
        return {}

    def wait(self, _enough, _timeout_s):
        return False


@pytest.mark.parametrize(
    ("looks", "stuck", "exiting"),
    [
        ([KillOutcome.STUCK], (0,), ()),
        ([KillOutcome.EXITING], (), (0,)),
        ([KillOutcome.STUCK, KillOutcome.EXITING, KillOutcome.STUCK], (), (0,)),
        ([KillOutcome.STUCK, KillOutcome.NOTHING], (), ()),
    ],
)
def test_only_what_is_stuck_at_every_look_outlives_sigkill(looks, stuck, exiting):
    waiting = list(looks)

    def look(_pid):
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    done = end_workers(
        {0: NO_PID}, NeverEnds(), SystemClock(), first=signal.SIGTERM, grace_s=0, poll=look
    )

    assert (done.stuck, done.exiting) == (stuck, exiting)


def worker(rank, pid):
    nowhere = Path("/nonexistent")
    ring, files = RingReader(nowhere), RankFiles()
    return Worker(rank=rank, local_rank=rank, pid=pid, ring=ring, files=files)


def test_children_that_a_dead_worker_left_are_ended_too(start, watch, tmp_path):
    note = tmp_path / "child"
    worker = start(
        "import subprocess, sys, time\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(c.pid)); print(1, flush=True); time.sleep(60)"
    )
    child = int(note.read_text())
    pids, watcher = watch(worker)
    os.kill(worker.pid, signal.SIGKILL)
    assert watcher.wait(lambda seen: len(seen) == 1, 10)

    done = end_workers(pids, watcher, SystemClock(), first=signal.SIGTERM, grace_s=1)

    assert done.sent == {}
    wait_until(lambda: not is_alive(child), 10, "the child's end")
