"""Programs of others cannot hurt whoever asks them; a detached one holds nothing of ours."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import is_alive, wait_until

from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import ask, find, spawn_detached
from gpuops.host.procfs import process

SHELL = "/bin/sh"


def open_files():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def children(of="self"):
    found = set()
    for path in Path(f"/proc/{of}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found.update(path.read_text().split())
    return found


def test_what_a_program_prints_and_how_it_ends_is_the_answer():
    answer = ask([SHELL, "-c", "echo out; echo err >&2; exit 3"], 10)

    assert (answer.exit_code, answer.output, answer.errors) == (3, "out\n", "err\n")
    assert (answer.timed_out, answer.cut, answer.stuck) == (False, False, False)
    assert answer.ending == "exited with code 3"
    assert answer.first_line() == "err"


def test_a_program_reads_what_it_is_given_and_sees_no_environment_of_ours():
    answer = ask([SHELL, "-c", "cat; echo $ONLY; env | cut -d= -f1 | sort"], 10, stdin="a\nb\n")

    assert answer.output.splitlines()[:3] == ["a", "b", ""]
    assert set(answer.output.splitlines()[3:]) <= {"HOME", "LC_ALL", "PATH", "PWD", "_", "SHLVL"}
    assert ask([SHELL, "-c", "echo $ONLY"], 10, env={"ONLY": "this"}).output == "this\n"


def test_a_program_that_prints_megabytes_ends_as_it_would_and_the_rest_is_dropped():
    code = "head -c 20000000 /dev/zero | tr '\\0' x; echo end >&2; exit 1"
    answer = ask([SHELL, "-c", code], 30, bytes_max=1000)

    assert (answer.exit_code, answer.output, answer.cut) == (1, "x" * 1000, True)
    assert answer.errors == "end\n"


def test_exactly_as_much_as_is_kept_is_not_cut():
    assert not ask([SHELL, "-c", "printf 12345"], 10, bytes_max=5).cut
    assert ask([SHELL, "-c", "printf 123456"], 10, bytes_max=5).cut


def test_a_program_that_prints_for_ever_is_stopped_in_time():
    # On a busy machine it may print too little to be cut in the first 0.3 s.
    answers = (ask(["/usr/bin/yes"], timeout_s) for timeout_s in (0.3, 3.0, 20.0))
    answer = next(answer for answer in answers if answer.cut)

    assert (answer.exit_code, answer.timed_out) == (None, True)
    assert answer.elapsed_s < 30


def test_a_program_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    note = tmp_path / "pid"
    code = f"trap '' TERM; sleep 1000 & echo $! > {note}; wait; sleep 1000"
    answer = ask([SHELL, "-c", code], 3.0)

    assert (answer.timed_out, answer.stuck) == (True, False)
    assert answer.ending.startswith("gave no answer in")
    pid = int(note.read_text())
    wait_until(lambda: not is_alive(pid), what="its end")


def test_a_grandchild_that_keeps_the_output_open_is_not_waited_for_and_ends_too(tmp_path):
    note = tmp_path / "pid"
    answer = ask([SHELL, "-c", f"sleep 1000 & echo $! > {note}; echo done"], 60)

    assert (answer.exit_code, answer.output) == (0, "done\n")
    assert answer.elapsed_s < 30
    pid = int(note.read_text())
    wait_until(lambda: not is_alive(pid), what="its end")


def test_a_program_that_is_killed_has_a_negative_exit_code():
    answer = ask([SHELL, "-c", "kill -9 $$"], 10)

    assert (answer.exit_code, answer.ending) == (-9, "ended by SIGKILL")


# Whoever calls vfork(2) waits in state D until its child ends or becomes another program.
IN_THE_KERNEL = "import ctypes; libc = ctypes.CDLL(None); libc.vfork(); libc.sleep(1000)"


def test_a_program_inside_the_kernel_is_told_from_one_that_is_slow():
    answer = ask([sys.executable, "-c", IN_THE_KERNEL], 5.0)

    assert (answer.timed_out, answer.stuck) == (True, True)
    assert "state D" in answer.ending


@pytest.fixture
def in_the_kernel():
    """A process in state D that was started with arguments of ours; not by us."""
    argv = [sys.executable, "-c", IN_THE_KERNEL]
    first = subprocess.Popen(argv, start_new_session=True)
    # Without a child state D is only the wait for a disk.
    wait_until(lambda: children(first.pid) and process(first.pid).state == "D", what="state D")
    yield argv, first.pid
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()


def test_while_one_is_stuck_inside_the_kernel_no_other_like_it_is_started(in_the_kernel, tmp_path):
    argv, pid = in_the_kernel
    folder = tmp_path / "gpuops" / "abandoned"
    abandoned(folder).record("\0".join(["command", *argv]), pid)
    answer = ask(argv, 60, left=abandoned(folder))
    other = ask([SHELL, "-c", "echo fine"], 60, left=abandoned(folder))

    assert (answer.timed_out, answer.stuck, answer.elapsed_s) == (True, True, 0.0)
    assert answer.ending == f"is stuck inside the kernel since an earlier run (pid {pid})"
    assert other.output == "fine\n"


def test_the_same_arguments_of_somebody_else_stop_no_program(in_the_kernel, tmp_path):
    """Anyone can start ``su`` with our arguments and keep it inside the kernel."""
    argv, _ = in_the_kernel
    answer = ask(argv, 1.0, left=abandoned(tmp_path / "gpuops" / "abandoned"))

    assert answer.elapsed_s > 0


def test_a_program_whose_asker_was_killed_ends_soon_too(tmp_path):
    note = tmp_path / "pid"
    argv = [SHELL, "-c", f"echo $$ > {note}; exec sleep 1000"]
    code = f"from gpuops.host.process.command import ask; ask({argv!r}, 0.5)"
    asker = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: note.exists() and note.read_text().endswith("\n"), what="its number")
    asker.kill()
    asker.wait()
    pid = int(note.read_text())

    wait_until(lambda: not is_alive(pid), what="its end")


def test_output_that_is_no_text_is_kept_readable():
    assert ask([SHELL, "-c", "printf '\\377ok'"], 10).output == "\ufffdok"


def test_a_program_that_cannot_be_started_is_said_with_its_reason(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"\x7fELF nonsense")
    nonsense.chmod(0o755)
    for path, reason in [
        (tmp_path / "none", "missing_tool"),
        (plain, "no_permission"),
        (nonsense, "crash"),
    ]:
        with pytest.raises(ProbeError, match=str(path)) as caught:
            ask([path], 10)
        assert caught.value.reason == reason


def test_asking_leaves_no_file_and_no_process_behind():
    before = open_files(), children()
    for _ in range(3):
        ask([SHELL, "-c", "echo x"], 10)
        with pytest.raises(ProbeError):
            ask(["/does/not/exist"], 10)

    # Of what earlier tests began something may have ended meanwhile.
    assert open_files() <= before[0]
    assert children() <= before[1]


def test_programs_are_found_below_the_root_in_the_usual_folders(tmp_path):
    tool = tmp_path / "usr/sbin/tool"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    assert find(tmp_path, "tool") is None
    tool.chmod(0o755)

    assert find(tmp_path, "tool") == tool
    assert find(tmp_path, "/usr/sbin/tool") == tool
    assert find(tmp_path, "sbin") is None
    assert find(tmp_path, "other") is None


def test_a_detached_program_has_its_own_session_and_none_of_our_files(tmp_path):
    note = tmp_path / "note"
    code = (
        "import os; ends = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)];"
        f"text = f'{{os.getsid(0) == os.getpid()}} {{set(ends)}} {{os.environ}}';"
        f"open({str(note)!r} + '.part', 'w').write(text);"
        f"os.rename({str(note)!r} + '.part', {str(note)!r})"
    )
    pid = spawn_detached([sys.executable, "-c", code], {"ONLY": "this"})
    os.waitpid(pid, 0)
    wait_until(note.exists, what="its note")

    assert note.read_text().startswith("True {'/dev/null'}")
    assert "'ONLY': 'this'" in note.read_text()
    assert "HOME" not in note.read_text()
