"""py-spy: the Python stacks of a process and the holder of its interpreter lock.

It reads the memory of the process without stopping it (``--nonblocking``), so neither a held lock
nor a stopped process blocks it; the data of a running one may be inconsistent. It needs permission:
root, the same user without ptrace restrictions, or CAP_SYS_PTRACE.
"""

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import IO

BYTES_MAX = 4 * 2**20
TRIES = 3
_POLL_S = 0.02
_REAP_S = 0.2
# A second; a prime, so that a loop with a round period is not met at the same place each time.
_RATE = 97
_COUNT = re.compile(r"^thread \((\d+)\)[:;].* (\d+)$", re.MULTILINE)


def find_pyspy(path: str | None, fallback: Path | None = None) -> str | None:
    """Return the program on the search *path*, else in *fallback* (this interpreter's folder).

    The environment of this installation may not have been activated.
    """
    folder = Path(sys.executable).parent if fallback is None else fallback
    return shutil.which("py-spy", path=path) or shutil.which("py-spy", path=str(folder))


def dump(program: str, pids: Mapping[int, int], deadline_s: float) -> dict[int, bytes]:
    """Return what py-spy prints (JSON) for those of *pids* (by rank) that it could read.

    All in parallel; a failed read is repeated, since its data was inconsistent. Reads that take
    longer than *deadline_s* are killed and omitted. May be called from any thread.
    """
    with contextlib.ExitStack() as files:
        readings = {rank: _Reading(program, pid, files) for rank, pid in pids.items()}
        end_s = time.monotonic() + deadline_s
        waited_for = list(readings.values())
        while waited_for and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            waited_for = [reading for reading in waited_for if not reading.is_over()]
        return {rank: text for rank, reading in readings.items() if (text := reading.end())}


class _Reading:
    """One process read by py-spy, repeatedly if it fails."""

    def __init__(self, program: str, pid: int, files: contextlib.ExitStack) -> None:
        self._words = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        # A file, not a pipe, which would have to be read while it writes.
        self._file: IO[bytes] = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 closed by the stack
        self._tries = 0
        self._child = self._start()

    def is_over(self) -> bool:
        """Return whether there is nothing left to wait for; restart after a failure."""
        if self._child is None or self._child.poll() == 0:
            return True
        if self._child.returncode is None:
            return False
        if self._tries == TRIES:
            return True
        self._file.seek(0)
        self._file.truncate()
        self._child = self._start()
        return self._child is None

    def end(self) -> bytes:
        """Kill a running read and return the output, b"" after a failure."""
        if self._child is None:
            return b""
        if _ended_with(self._child, 0.0) != 0:
            return b""
        self._file.seek(0)
        return self._file.read(BYTES_MAX)

    def _start(self) -> Popen[bytes] | None:
        self._tries += 1
        return _start(self._words, self._file)


class StackRecordings:
    """``py-spy record`` of several processes (by rank) for some seconds, all in parallel.

    Hundreds of samples of a process take 0.1 s of processor time.
    """

    def __init__(self, program: str, pids: Mapping[int, int], seconds: int) -> None:
        self._pids = pids
        self._folder = tempfile.TemporaryDirectory(prefix="gpuops-py-spy-")
        words = ["record", "--nonblocking", "--idle", "--threads", "--full-filenames"]
        words += ["--format", "raw", "--rate", str(_RATE), "--duration", str(seconds)]
        self._children = {
            rank: _start([program, *words, "--output", str(self._path(rank)), "--pid", str(pid)])
            for rank, pid in pids.items()
        }

    def end(self, deadline_s: float) -> dict[int, list[int]]:
        """Return by rank how often each stack of the main thread was seen, if any was.

        Those that have not ended after *deadline_s* are killed and omitted.
        """
        end_s = time.monotonic() + deadline_s
        found: dict[int, list[int]] = {}
        for rank, child in self._children.items():
            if child is not None and _ended_with(child, end_s - time.monotonic()) == 0:
                text = _text_of(self._path(rank))
                counts = [int(n) for tid, n in _COUNT.findall(text) if int(tid) == self._pids[rank]]
                found |= {rank: counts} if counts else {}
        with contextlib.suppress(OSError):
            self._folder.cleanup()
        return found

    def _path(self, rank: int) -> Path:
        return Path(self._folder.name, str(rank))


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(BYTES_MAX).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _ended_with(child: Popen[bytes], wait_s: float) -> int | None:
    """Return the exit code of *child*, None for one that had to be killed."""
    with contextlib.suppress(TimeoutExpired):
        return child.wait(max(0.0, wait_s))
    child.kill()
    with contextlib.suppress(TimeoutExpired):
        child.wait(_REAP_S)  # one that is stuck in the kernel is abandoned
    return None


def _start(words: Sequence[str], output: int | IO[bytes] = DEVNULL) -> Popen[bytes] | None:
    try:
        return Popen(
            words,
            stdin=DEVNULL,
            stdout=output,
            stderr=DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        return None
