"""A process from outside, the real one of the test and one of a made-up /proc."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import wait_until

from gpuops.host.process.inspect import read_details
from gpuops.host.process.pyspy import TRIES, StackRecordings, dump, find_pyspy

TOOLS = str(Path(sys.executable).parent)


def fake(root, *, state="S", status="", stack=None, wchan="0"):
    fields = [state, *["1"] * 10, "250", "150", *["1"] * 6, "777", *["0"] * 20]
    stat = f"42 (a (b) c) {' '.join(fields)}\n"
    for folder in (root / "proc/42", root / "proc/42/task/42"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(stat)
        (folder / "wchan").write_text(wchan)
    (root / "proc/42/status").write_text(status)
    if stack is not None:
        (root / "proc/42/stack").write_text(stack)
    return root


def test_what_proc_says_is_read(tmp_path):
    root = fake(
        tmp_path,
        state="D",
        status="Name:\tx\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000000a00\n"
        "voluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t3\n",
        stack="[<0>] nfs_wait+0x1/0x2\n[<0>] vfs_read+0x3/0x4\n",
        wchan="nfs_wait",
    )
    look = read_details(42, root)

    assert (look.state, look.wchan, look.main_waits) == ("D", "nfs_wait", 150)
    assert look.kernel_stack == ("[<0>] nfs_wait+0x1/0x2", "[<0>] vfs_read+0x3/0x4")
    assert look.caught == {signal.SIGUSR1, signal.SIGUSR2}
    assert look.cpu_s == 400 / os.sysconf("SC_CLK_TCK")


def test_what_is_not_told_is_none(tmp_path):
    look = read_details(42, fake(tmp_path, status="SigCgt:\tnonsense\n"))

    assert (look.wchan, look.kernel_stack, look.caught) == (None, (), set())
    assert (look.main_waits, look.main_cpu_s) == (None, None)
    assert read_details(43, tmp_path) is None


def test_a_stopped_process_is_seen_so_and_one_that_is_gone_not_at_all():
    with subprocess.Popen(["sleep", "60"]) as child:
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: read_details(child.pid).state == "T", what="state T")
        child.kill()
        child.wait()

    assert read_details(child.pid) is None


@pytest.mark.skipif(not shutil.which("py-spy", path=TOOLS), reason="no py-spy")
def test_pyspy_reads_what_it_can_and_leaves_the_rest_out():
    program = find_pyspy(TOOLS)
    code = "import time\ndef lost(): print(flush=True); time.sleep(60)\nlost()"
    words = [sys.executable, "-c", code]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE) as python,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        python.stdout.readline()
        found = dump(program, {3: python.pid, 4: other.pid}, 30.0)
        python.kill()
        other.kill()

    assert list(found) == [3]
    assert b'"lost"' in found[3]


# Its main thread burns in native code, or goes round a loop; another one goes round in any case.
RECORDED = """
import hashlib, sys, threading, time
def turn():
    while True: time.sleep(0.001)
def lost(): hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)
def works():
    while True:
        time.sleep(0.05)
        sum(range(300_000))
threading.Thread(target=turn, daemon=True).start()
print(flush=True)
globals()[sys.argv[1]]()
"""


@pytest.mark.skipif(not shutil.which("py-spy", path=TOOLS), reason="no py-spy")
def test_recorded_stacks_tell_who_goes_round_in_a_loop_from_who_burns_in_one_place(tmp_path):
    words = [sys.executable, "-c", RECORDED]
    with (
        subprocess.Popen([*words, "works"], stdout=subprocess.PIPE) as works,
        subprocess.Popen([*words, "lost"], stdout=subprocess.PIPE) as lost,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        for child in (works, lost):
            child.stdout.readline()
        pids = {1: works.pid, 2: lost.pid, 3: other.pid}
        found = StackRecordings(find_pyspy(TOOLS), pids, 3).end(60.0)
        for child in (works, lost, other):
            child.kill()

    assert found.keys() == {1, 2}
    assert max(found[1]) / sum(found[1]) < 0.98
    assert max(found[2]) / sum(found[2]) > 0.995, "its very first sample may be the call itself"


def test_a_recording_that_does_not_end_is_killed(tmp_path):
    slow = tmp_path / "py-spy"
    slow.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 60\n")
    slow.chmod(0o755)
    recordings = StackRecordings(str(slow), {0: 1}, 3)
    wait_until((tmp_path / "pids").exists, what="its start")

    assert recordings.end(0.0) == {}
    for pid in (tmp_path / "pids").read_text().split():
        assert read_details(int(pid)) is None
    assert StackRecordings(str(tmp_path / "none"), {0: 1}, 3).end(0.0) == {}


def test_a_pyspy_that_does_not_end_is_killed(tmp_path):
    slow = tmp_path / "py-spy"
    slow.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 60\n")
    slow.chmod(0o755)

    assert find_pyspy(str(tmp_path)) == str(slow)
    assert dump(str(slow), {0: 1, 1: 2}, 0.5) == {}
    for pid in (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else ():
        assert read_details(int(pid)) is None


def test_a_pyspy_whose_read_was_torn_is_asked_again_and_not_for_ever(tmp_path):
    torn = tmp_path / "py-spy"
    torn.write_text(
        f"#!/bin/sh\necho half; echo $5 >> {tmp_path}/asked\n"
        f"[ $5 = 7 ] && [ $(grep -c 7 {tmp_path}/asked) = 2 ] && echo whole && exit 0\nexit 1\n"
    )
    torn.chmod(0o755)

    assert dump(str(torn), {0: 7, 1: 8}, 30.0) == {0: b"half\nwhole\n"}
    assert (tmp_path / "asked").read_text().split().count("8") == TRIES


def test_a_pyspy_beside_the_interpreter_is_found_though_nobody_activated_its_environment(tmp_path):
    beside = tmp_path / "bin" / "py-spy"
    beside.parent.mkdir()
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)

    assert find_pyspy(str(tmp_path), beside.parent) == str(beside)


def test_a_pyspy_that_cannot_be_started_says_nothing(tmp_path):
    assert find_pyspy(str(tmp_path), tmp_path) is None
    assert dump(str(tmp_path / "none"), {0: 1}, 0.5) == {}
