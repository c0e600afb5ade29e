"""The processes of a cluster of ours: all that name its folder, whoever started them.

As a program, ``python slurm_processes.py FOLDER``: wait until the end of standard input, which
comes when the test session ends in whatever way, then end what is left and remove the folder.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

END_S = 60


def processes_of(home, program=None):
    """Return the living processes that name *home*, by pid with their command lines.

    In the command line or in the environment with which they began; only those that have the word
    *program* in the former, where one is given.
    """
    needle, found = os.fsencode(home), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            ours = program is None or program in words.split(b"\0")
            if ours and needle in words + (folder / "environ").read_bytes():
                found[int(folder.name)] = words.replace(b"\0", b" ").decode(errors="replace")
    return {pid: words for pid, words in found.items() if _is_living(pid)}


def _is_living(pid):
    """Say whether *pid* is neither this process nor its guard, and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and pid != os.getpid() and os.fsencode(__file__) not in words


def end_all(find, seconds=END_S):
    """End every process that *find* returns, and those that they start meanwhile.

    Raises:
        AssertionError: Some are left; names them.
    """
    until, pause = time.monotonic() + seconds, threading.Event()
    while left := find():
        assert time.monotonic() < until, f"these cannot be ended: {left}"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pause.wait(0.02)


def main(home):
    """See the module."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_all(lambda: processes_of(home))
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
