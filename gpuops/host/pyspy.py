"""``py-spy dump``: the Python stacks of a process and who holds its interpreter lock.

It reads the memory of the process without stopping it (``--nonblocking``), so neither a held lock
nor a stopped process keeps it waiting; what it reads of a running one may be torn. It needs the
right to do so: root, the same user without ptrace restrictions, or CAP_SYS_PTRACE.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import IO

BYTES_MAX = 4 * 2**20
_LOOK_EVERY_S = 0.02
_REAP_S = 0.2


def find_pyspy(path: str | None) -> str | None:
    """Return the program on the search *path*, None where it is not installed."""
    return shutil.which("py-spy", path=path)


def dump(program: str, pids: Mapping[int, int], deadline_s: float) -> dict[int, bytes]:
    """Return what py-spy prints (JSON) for those of *pids* (by rank) that it could read.

    All at once; what is not there after *deadline_s* is killed and left out. May be called from
    any thread.
    """
    with contextlib.ExitStack() as files:
        running = {rank: _start(program, pid, files) for rank, pid in pids.items()}
        end_s = time.monotonic() + deadline_s
        children = [child for child, _file in running.values() if child is not None]
        while time.monotonic() < end_s and any(child.poll() is None for child in children):
            time.sleep(_LOOK_EVERY_S)
        for child in children:
            child.kill()  # does nothing to those that have ended
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_S)  # one that is stuck in the kernel is left behind
        return {
            rank: text
            for rank, (child, file) in running.items()
            if child is not None and child.poll() == 0 and (text := _read(file))
        }


def _start(
    program: str, pid: int, files: contextlib.ExitStack
) -> tuple["subprocess.Popen[bytes] | None", IO[bytes]]:
    # A file, not a pipe: nobody has to read while it writes.
    file = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 closed by the stack
    words = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        ), file
    except OSError:
        return None, file


def _read(file: IO[bytes]) -> bytes:
    file.seek(0, os.SEEK_SET)
    return file.read(BYTES_MAX)
