"""A child that watches something which may hang or crash its watcher, and reports in lines.

The agent only takes lines that a thread has read: no call here waits for the child or the driver. A
child that ends is restarted, with increasing back-off, a limited number of times.
"""

import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpuops.errors import EXIT_UNKNOWN

log = logging.getLogger(__name__)

LINES_MAX = 4096  # waiting to be taken; the oldest are kept, which show the first event
LINE_BYTES_MAX = 64 * 1024
RESTARTS_MAX = 8
BACK_OFF_S = 1.0
BACK_OFF_MAX_S = 60.0
# A child inside the kernel does not end on SIGKILL; it is not waited for longer.
KILLED_S = 0.5


class WatchingChild:
    """Runs *command* until `close`; one that exits with 3 has nothing to watch: no restart.

    ``given_up`` is set once it will not be restarted.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        back_off_s: float = BACK_OFF_S,
        restarts_max: int = RESTARTS_MAX,
    ) -> None:
        self.given_up = threading.Event()
        self.restarts = 0
        self._name = name
        self._command = list(command)
        self._env = dict(env)
        self._back_off_s = back_off_s
        self._restarts_max = restarts_max
        self._lines: deque[bytes] = deque()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"gpuops-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Return the process id of the running child, None between two."""
        process = self._process
        return None if process is None else process.pid

    def take(self, lines_max: int = LINES_MAX) -> list[bytes]:
        """Return the lines since the last call, the oldest first; never waits."""
        taken: list[bytes] = []
        while len(taken) < lines_max:
            try:
                taken.append(self._lines.popleft())
            except IndexError:
                break
        return taken

    def close(self, wait_s: float = 0.0) -> None:
        """Kill the child; if it does not end within *wait_s*, its thread waits for it."""
        self._closing.set()
        process = self._process
        if process is not None:
            _kill(process)
        self._thread.join(wait_s)

    def _run(self) -> None:
        back_off_s = self._back_off_s
        while not self._closing.is_set():
            if self._watch_once() == EXIT_UNKNOWN or self.restarts >= self._restarts_max:
                break
            self._closing.wait(back_off_s)
            back_off_s = min(2 * back_off_s, BACK_OFF_MAX_S)
            self.restarts += 1
        self.given_up.set()

    def _watch_once(self) -> int | None:
        """Return the exit code of one child, None without one."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._env,
                cwd="/",
                start_new_session=True,
            )
        except OSError as exc:
            log.debug("%s cannot be started: %s", self._name, exc)
            return None
        self._process = process
        if self._closing.is_set():
            _kill(process)
        self._listen(process)
        self._process = None
        log.debug("%s ended with %s", self._name, process.returncode)
        return process.returncode

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout as output:
            for line in iter(lambda: output.readline(LINE_BYTES_MAX), b""):
                if len(self._lines) < LINES_MAX:
                    self._lines.append(line)
        _kill(process)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill *process* and its group, whose number is its own until it is reaped."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
