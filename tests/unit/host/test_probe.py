"""A probe ends, is ended or is abandoned; nothing waits for it without a bound."""

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.fake_root import FakeRoot
from support.runs import wait_until

from gpuops.errors import ProbeError
from gpuops.host.process import probe
from gpuops.host.process.abandoned import abandoned, name_of
from gpuops.host.process.inspect import process_state
from gpuops.host.process.probe import ProbeEnd, ProbeOutcome
from gpuops.host.storage.mounts import read_filesystems

# Python 3.12 warns of forks in processes with threads, as pytest-xdist's workers are.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SLACK_S = 20.0  # those that are ended would sleep for a minute
# A child on a busy machine takes a while before it does what a test wants of it.
BEGUN_S = 1.5


def call(function, deadline_s=20.0, **kwargs):
    return probe.run(probe.start_call(function, deadline_s=deadline_s, **kwargs))


def refuses_to_end():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def is_alive(pid):
    found = process_state(pid)
    return found is not None and not found.ended


def test_a_call_gives_its_answer():
    outcome = call(lambda: {"free": 7, "names": ["a", "ä"]})

    assert outcome.ending is ProbeEnd.ENDED
    assert outcome.exit_code == 0
    assert outcome.state is None
    assert probe.answer(outcome) == {"free": 7, "names": ["a", "ä"]}


def test_a_call_runs_in_a_session_of_its_own_without_our_files():
    ours = os.pipe()

    def look():
        return {
            "session": os.getsid(0) == os.getpid(),
            "files": sorted(int(fd.name) for fd in Path("/proc/self/fd").iterdir()),
            "terminal": os.isatty(1),
        }

    seen = probe.answer(call(look))

    assert seen["session"] is True
    assert seen["terminal"] is False
    assert not set(ours) & set(seen["files"])
    for fd in ours:
        os.close(fd)


def test_a_probe_error_of_a_call_is_raised_again_with_its_reason():
    def look():
        raise ProbeError("cannot read /proc/none", "no_permission")

    with pytest.raises(ProbeError, match="cannot read /proc/none") as caught:
        probe.answer(call(look))

    assert caught.value.reason == "no_permission"


def test_a_bug_in_a_call_is_a_crash_with_its_traceback():
    def look():
        return {}["missing"]

    with pytest.raises(ProbeError, match="KeyError: 'missing'") as caught:
        probe.answer(call(look))

    assert caught.value.reason == "crash"
    assert "in look" in caught.value.__notes__[0]


def test_a_call_that_dies_by_a_signal_is_a_crash_that_names_it():
    with pytest.raises(ProbeError, match="ended by SIGSEGV without an answer") as caught:
        probe.answer(call(lambda: os.kill(os.getpid(), signal.SIGSEGV)))

    assert caught.value.reason == "crash"


def test_an_answer_that_is_not_json_is_a_crash():
    with pytest.raises(ProbeError) as caught:
        probe.answer(call(lambda: {1, 2}))

    assert caught.value.reason == "crash"


def test_a_call_that_ignores_sigterm_is_killed():
    outcome = call(refuses_to_end, deadline_s=BEGUN_S)

    assert outcome.ending is ProbeEnd.TIMEOUT
    assert outcome.exit_code == -signal.SIGKILL
    assert BEGUN_S + probe.TERM_GRACE_S <= outcome.elapsed_s < BEGUN_S + probe.STOP_S + SLACK_S
    assert not is_alive(outcome.pid)


def test_a_stopped_call_is_killed_and_its_state_is_told():
    outcome = call(stops_itself, deadline_s=BEGUN_S)

    assert outcome.ending is ProbeEnd.TIMEOUT
    assert outcome.state == "T"
    assert "state T" in outcome.describe()


def test_a_late_call_is_unknown_for_want_of_time():
    with pytest.raises(ProbeError, match=r"gave no answer in \d\.\d s") as caught:
        probe.answer(call(lambda: time.sleep(60), deadline_s=0.1))

    assert caught.value.reason == "timeout"


def test_a_child_that_no_signal_reaches_is_abandoned_and_reported_as_hung():
    """The kernel delivers nothing to a process in state D; so does this signaller."""
    child = probe.start_call(
        lambda: time.sleep(60), deadline_s=0.1, signaller=lambda _pid, _number: None
    )
    outcome = probe.run(child)

    assert outcome.ending is ProbeEnd.HUNG
    assert outcome.exit_code is None
    assert outcome.elapsed_s < 0.1 + probe.STOP_S + SLACK_S
    assert "could not be killed" in outcome.describe()
    assert is_alive(outcome.pid)
    probe.signal_group(outcome.pid, signal.SIGKILL)
    os.waitpid(outcome.pid, 0)


def loses_its_main_thread():
    """End the main thread alone, as when a process ends while another thread is in the kernel."""
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)


def test_a_child_whose_main_thread_has_ended_is_not_taken_for_one_that_has(records):
    child = probe.start_call(
        loses_its_main_thread,
        deadline_s=BEGUN_S,
        question="gpu",
        left=abandoned(records),
        signaller=lambda _pid, _number: None,
    )
    try:
        outcome = probe.run(child)
        left = abandoned(records).find("gpu")

        assert (outcome.ending, outcome.state) == (ProbeEnd.HUNG, "S")
        assert (left.pid, left.state) == (child.pid, "S")
    finally:
        probe.signal_group(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


@pytest.mark.parametrize("ending", [ProbeEnd.TIMEOUT, ProbeEnd.HUNG])
def test_a_child_that_answered_and_did_not_end_has_answered(ending):
    outcome = ProbeOutcome(
        ending=ending, pid=71, elapsed_s=2.0, output=b'{"value": [7]}', state="D"
    )

    assert probe.read_answer(outcome) == [7]
    with pytest.raises(ProbeError, match="gave no answer"):
        probe.answer(outcome)


@pytest.mark.parametrize("output", [b"", b'{"value": [7'])
def test_a_child_that_did_not_end_and_has_not_said_all_gave_no_answer(output):
    outcome = ProbeOutcome(ending=ProbeEnd.HUNG, pid=71, elapsed_s=2.0, output=output, state="D")

    with pytest.raises(ProbeError, match="state D") as caught:
        probe.read_answer(outcome)

    assert caught.value.reason == "timeout"


@pytest.fixture
def records(tmp_path):
    return tmp_path / "gpuops" / "abandoned"


def enters_the_kernel():
    """Whoever calls vfork(2) waits in state D until its child ends."""
    libc = ctypes.CDLL(None)
    libc.vfork()
    libc.sleep(1000)


def waits_outside_the_kernel():
    time.sleep(1000)


@contextlib.contextmanager
def left_by(function, question, left, *, in_kernel=True):
    """Leave a child behind that does *function*, once it is in its state."""
    child = probe.start_call(function, deadline_s=60, question=question, left=left)
    try:
        wait_until(lambda: process_state(child.pid).state == ("D" if in_kernel else "S"))
        child.leave()
        yield child.pid
    finally:
        probe.signal_group(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)


@pytest.fixture
def left_behind(records):
    with left_by(enters_the_kernel, "mount /dead", abandoned(records)) as pid:
        yield pid


def left_after(records, seconds):
    return abandoned(records, now_s=time.clock_gettime(time.CLOCK_BOOTTIME) + seconds)


def must_not_run():
    raise AssertionError("another child was started")


def asked_again(question, left):
    return probe.answer(call(lambda: 1, question=question, left=left))


def test_a_child_left_behind_is_reported_again_and_no_other_is_started(left_behind, records):
    left = left_after(records, 300)
    outcome = call(must_not_run, deadline_s=1.0, question="mount /dead", left=left)

    assert (outcome.ending, outcome.pid, outcome.state) == (ProbeEnd.HUNG, left_behind, "D")
    assert outcome.stuck
    assert re.match(
        rf"gave no answer in 30\d\.\d s \(pid {left_behind}, state D.*\), and could not be killed",
        outcome.describe(),
    )
    with pytest.raises(ProbeError, match="gave no answer in 30") as caught:
        probe.answer(outcome)
    assert caught.value.reason == "timeout"


def test_another_question_is_asked_though_a_child_was_left_behind(left_behind, records):
    assert asked_again("mount /alive", left_after(records, 300)) == 1


def test_a_child_that_may_still_answer_another_run_is_not_taken_for_hung(left_behind, records):
    assert asked_again("mount /dead", left_after(records, 0)) == 1


def test_a_name_proves_nothing(left_behind, records, tmp_path):
    """Any user can start ``su`` under a name of ours; only our record makes a left-over."""
    assert Path(f"/proc/{left_behind}/comm").read_text() == name_of("mount /dead") + "\n"
    assert asked_again("mount /dead", left_after(tmp_path / "other" / "abandoned", 300)) == 1


def test_a_child_outside_the_kernel_convicts_nobody(records):
    """On a busy machine it takes a while until a killed process is gone."""
    with left_by(waits_outside_the_kernel, "mount /", abandoned(records), in_kernel=False) as pid:
        left = left_after(records, 300)

        assert left.find("mount /").pid == pid
        assert asked_again("mount /", left) == 1


def test_a_question_with_the_name_of_another_is_another(records):
    """A name has 32 bits, and users choose mount points: the questions are told apart in full."""
    one, other = "mount / /home/c50963c80102", "mount / /home/d3f504638284"
    assert name_of(one) == name_of(other)
    with left_by(enters_the_kernel, one, abandoned(records)):
        assert asked_again(other, left_after(records, 300)) == 1


@pytest.mark.parametrize("content", ["{boot} 1", "other {start}", "{boot}", "\xff", ""])
def test_a_record_of_another_process_is_removed(left_behind, records, content):
    (path,) = records.iterdir()
    boot, start = path.read_text().split()
    path.write_text(content.format(boot=boot, start=start))

    assert left_after(records, 300).find("mount /dead") is None
    assert not path.exists()


@pytest.mark.parametrize("folder", [".", ".."])
def test_records_in_a_folder_that_others_can_write_are_not_read(left_behind, records, folder):
    (records / folder).resolve().chmod(0o777)

    assert left_after(records, 300).find("mount /dead") is None
    with left_by(enters_the_kernel, "mount /new", abandoned(records)):
        assert len(list(records.iterdir())) == 1


def test_a_child_that_ends_after_all_is_forgotten(records):
    outcome = call(refuses_to_end, deadline_s=BEGUN_S, question="q", left=abandoned(records))

    assert outcome.ending is ProbeEnd.TIMEOUT
    assert list(records.iterdir()) == []


def test_a_child_that_goes_on_by_itself_is_on_record(records):
    child = probe.start_call(
        waits_outside_the_kernel, deadline_s=60, question="record", left=abandoned(records)
    )
    try:
        assert probe.within(child, 0.01) is None
        assert abandoned(records).find("record").pid == child.pid
    finally:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    assert abandoned(records).find("record") is None


def test_filesystems_of_a_dead_mount_leave_one_child_however_often_they_are_asked(
    tmp_path, records
):
    """The second run finds the first one's child and asks nobody."""
    root = FakeRoot(tmp_path)
    root.mounts("25 1 0:50 / /dead rw - nfs4 filer:/x rw")
    question = f"mount {tmp_path} /dead filer:/x"
    with left_by(enters_the_kernel, question, abandoned(records)) as pid:
        found = read_filesystems(
            tmp_path, 0.7, statvfs=lambda _path: must_not_run(), left=left_after(records, 300)
        )

    (answer,) = found.answers
    assert f"pid {pid}, state D" in answer.silent
    assert answer.stuck


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.skipif(
    os.geteuid() != 0 or not (FREEZER / "tasks").exists(),
    reason="only a version 1 freezer, which needs root, makes a process that SIGKILL cannot end",
)
def test_a_frozen_child_that_even_sigkill_cannot_end_is_abandoned():
    """Version 1 of the freezer keeps a process in the kernel, state D, until it is thawed."""
    group = FREEZER / f"gpuops-test-{os.getpid()}"
    group.mkdir()
    try:
        child = probe.start_call(lambda: time.sleep(60), deadline_s=0.5)
        (group / "tasks").write_text(str(child.pid))
        (group / "freezer.state").write_text("FROZEN")
        outcome = probe.run(child)

        assert outcome.ending is ProbeEnd.HUNG
        assert outcome.state == "D"
        assert outcome.elapsed_s < 0.5 + probe.STOP_S + SLACK_S
    finally:
        (group / "freezer.state").write_text("THAWED")
        os.waitpid(child.pid, 0)
        wait_until(lambda: not (group / "tasks").read_text())
        group.rmdir()


def test_what_a_probe_started_dies_with_it():
    """A helper that a probe leaves behind belongs to its group and is ended with it."""

    def leaves_a_helper():
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        return pid

    outcome = call(leaves_a_helper)

    assert outcome.ending is ProbeEnd.ENDED
    wait_until(lambda: not is_alive(probe.answer(outcome)))


def test_many_calls_wait_at_the_same_time():
    children = [probe.start_call(lambda: time.sleep(60), deadline_s=0.3) for _ in range(10)]
    started = time.monotonic()
    outcomes = list(probe.watch(children))

    assert len(outcomes) == 10
    assert time.monotonic() - started < 0.3 + probe.STOP_S + SLACK_S


def test_a_quick_call_does_not_wait_for_a_slow_one():
    slow = probe.start_call(lambda: time.sleep(60), deadline_s=2.0)
    quick = probe.start_call(lambda: 1, deadline_s=20)

    order = [child.pid for child, _ in probe.watch([slow, quick])]

    assert order == [quick.pid, slow.pid]


def test_a_child_whose_parent_was_killed_ends_by_itself():
    code = """
import time
from gpuops.host.process import probe
child = probe.start_call(lambda: time.sleep(60), deadline_s=0.3)
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not is_alive(pid))


def test_a_child_that_somebody_else_reaped_has_ended():
    """A daemon may start its hooks with SIGCHLD ignored; the kernel then keeps no exit codes."""
    code = """
import json, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from gpuops.host.process import probe
outcome = probe.run(probe.start_call(lambda: 42, deadline_s=30))
print(json.dumps([outcome.ending, outcome.exit_code, probe.answer(outcome)]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)

    assert json.loads(run.stdout) == ["ended", None, 42]


def test_output_beyond_the_limit_is_cut():
    size = probe.OUTPUT_MAX + 1000
    outcome = call(lambda: "x" * size)

    assert len(outcome.output) == probe.OUTPUT_MAX


def test_a_machine_without_files_to_give_is_said_so():
    code = """
import resource
from gpuops.errors import ProbeError
from gpuops.host.process import probe
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
try:
    probe.start_call(lambda: 1, deadline_s=1)
except ProbeError as exc:
    print(exc.reason, exc)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)

    assert run.stdout == b"crash cannot make a memory file: Too many open files\n"


def test_a_child_may_join_those_that_are_watched():
    first = probe.start_call(lambda: 1, deadline_s=20)
    joined = []

    def more():
        if joined:
            return []
        joined.append(probe.start_call(lambda: 2, deadline_s=20))
        return joined

    answers = [probe.answer(outcome) for _, outcome in probe.watch([first], more)]

    assert answers == [1, 2]


def test_a_child_can_be_waited_for_shorter_than_it_may_take():
    quick = probe.start_call(lambda: 7, deadline_s=20)
    stuck = probe.start_call(
        lambda: time.sleep(60), deadline_s=20, signaller=lambda _pid, _number: None
    )
    started = time.monotonic()

    assert probe.answer(probe.within(quick, 10)) == 7
    assert probe.within(stuck, 0.2) is None
    assert time.monotonic() - started < 10
    os.kill(stuck.pid, signal.SIGKILL)
    os.waitpid(stuck.pid, 0)


def test_a_child_that_crashes_leaves_no_core_file():
    child = probe.start_call(lambda: resource.getrlimit(resource.RLIMIT_CORE), deadline_s=10)

    assert probe.answer(probe.run(child)) == [0, 0]


SIGINT_IN_A_FORK = """
import os, signal
from gpuops.host.process import probe

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    probe.start_call(lambda: 1, deadline_s=10)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_sigint_while_a_child_is_forked_is_not_lost():
    ended = subprocess.run(
        [sys.executable, "-c", SIGINT_IN_A_FORK],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (ended.stdout, ended.stderr) == ("interrupted\n", "")
