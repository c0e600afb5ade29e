"""A fork of the process that stands ready is what starting the command would have been."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm_python import WarmPopen, warm_popen

pytestmark = pytest.mark.torch

SHOWS = """
import json, os, signal, sys, threading
from pathlib import Path

stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
print(json.dumps({
    "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
    "argv": [sys.argv, sys.orig_argv],
    "path": sys.path,
    "cwd": os.getcwd(),
    "cmdline": Path("/proc/self/cmdline").read_text(),
    "environ": sorted(Path("/proc/self/environ").read_text().split(chr(0))),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpgid(os.getppid())],
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 3),
    "open": len(os.listdir("/proc/self/fd")),
    "signals": {n: str(signal.getsignal(n)) for n in (1, 2, 3, 10, 13, 15, 17)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": threading.active_count(),
    "streams": [[s.line_buffering, s.write_through, s.errors] for s in (sys.stdout, sys.stderr)],
}))
"""


def shown(popen, path, *flags, **options):
    command = [sys.executable, *flags, str(path), "one", "two words"]
    with popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        found = json.loads(process.communicate(timeout=60)[0])
        assert process.returncode == 0
    assert found.pop("parent") == os.getpid()
    assert int(process.pid) > 0
    for name, value in found["signals"].items():
        # Where a handler is, not which object.
        found["signals"][name] = value.partition(" at ")[0]
    return found


@pytest.fixture(scope="module", autouse=True)
def server():
    with warm_popen(
        [sys.executable, "-m", "gpuops", "--version"], stdout=subprocess.DEVNULL
    ) as first:
        assert first.wait(60) == 0
    return WarmPopen.server


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_it_looks_like_a_started_process(tmp_path, flags, new_session):
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    options = {
        "env": {**os.environ, "ONE_MORE": "a b"},
        "cwd": tmp_path,
        "start_new_session": new_session,
    }

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        started = shown(subprocess.Popen, script, *flags, **options)
        forked = shown(warm_popen, script, *flags, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert forked == started
    assert started["blocked"] == [signal.SIGUSR2]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit, os; atexit.register(print, 'last')", 0),
        ("import threading; threading.Timer(0.05, print, ['late']).start()", 0),
    ],
)
def test_it_ends_like_a_started_process(tmp_path, text, code):
    script = tmp_path / "ends.py"
    script.write_text(f"{text}\n")

    ends = []
    for popen in (subprocess.Popen, warm_popen):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with popen([sys.executable, str(script)], text=True, **pipes) as process:
            ends.append((*process.communicate(timeout=60), process.returncode))

    assert ends[0] == ends[1]
    assert ends[0][2] == code


def test_a_crash_tells_the_stacks_of_all_threads(tmp_path):
    script = tmp_path / "crashes.py"
    script.write_text("import ctypes\ndef crash(): ctypes.string_at(8)\ncrash()\n")
    env = {**os.environ, "PYTHONFAULTHANDLER": "1"}

    with warm_popen([sys.executable, str(script)], text=True, stderr=subprocess.PIPE, env=env) as p:
        said = p.communicate(timeout=60)[1]

    assert p.returncode == -signal.SIGSEGV
    assert 'crashes.py", line 2 in crash' in said
    assert "frame #" in said  # of C++


def test_only_what_a_fork_can_be_is_forked(server):
    env = dict(os.environ)
    assert server.serves([sys.executable, "-m", "gpuops"], env)
    assert server.serves([sys.executable, "-u", str(Path(__file__))], env)
    assert not server.serves([sys.executable, "-P", "-m", "gpuops"], env)
    assert not server.serves([sys.executable, "-c", "pass"], env)
    assert not server.serves(["/bin/true"], env)
    assert server.serves([sys.executable, "-m", "gpuops"], env | {"PYTHONFAULTHANDLER": "1"})
    assert not server.serves([sys.executable, "-m", "gpuops"], env | {"LD_PRELOAD": "x.so"})
