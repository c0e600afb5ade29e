"""When each worker ended, to the millisecond.

torchelastic looks ten times a second and cannot say which of two dead workers died first. Here a
thread sleeps on one pidfd per worker (pidfd_open(2)) and stamps the moment that it wakes. It
leaves the zombie to torch to reap, so a pid cannot name another process while we may signal it.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuops.host.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedExit:
    """One end: ``code`` as in `subprocess` (negative: a signal), None where torch was faster."""

    pid: int
    code: int | None
    seen_us: int
    seen_mono_ns: int


class ExitWatcher:
    """Watches the workers of one generation by local rank."""

    def __init__(self, pids: Mapping[int, int], clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[int, ObservedExit] = {}
        self._changed = threading.Condition()
        self._fds: dict[int, tuple[int, int]] = {}
        self.sees_all = True
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for local_rank, pid in pids.items():
            self._open(local_rank, pid)
        self._thread = threading.Thread(target=self._run, name="gpuops-exits", daemon=True)
        self._thread.start()

    def _open(self, local_rank: int, pid: int) -> None:
        try:
            self._fds[os.pidfd_open(pid)] = (local_rank, pid)
        except ProcessLookupError:
            self._note(local_rank, pid, None, self._clock.mono_ns(), self._clock.now_us())
        except OSError as exc:
            # Then only torch's own look, ten times a second, dates this worker's end.
            self.sees_all = False
            log.warning("cannot watch worker %d (pid %d): %s", local_rank, pid, exc)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        while self._fds:
            ready = poll.poll()
            # One look, one time: what it finds together has no order that we know of.
            now = self._clock.mono_ns(), self._clock.now_us()
            for fd, _events in ready:
                if fd == self._wake_read:
                    return
                local_rank, pid = self._fds.pop(fd)
                self._note(local_rank, pid, fd, *now)
                poll.unregister(fd)
                os.close(fd)

    def _note(self, local_rank: int, pid: int, fd: int | None, mono_ns: int, now_us: int) -> None:
        code = None if fd is None else _status(fd)
        with self._changed:
            self._seen[local_rank] = ObservedExit(pid, code, now_us, mono_ns)
            self._changed.notify_all()

    def seen(self) -> dict[int, ObservedExit]:
        """Return the ends so far by local rank."""
        with self._changed:
            return dict(self._seen)

    def wait(self, enough: Callable[[Mapping[int, ObservedExit]], bool], timeout_s: float) -> bool:
        """Wait until *enough* says so of what was seen; say whether it did within *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: enough(self._seen), timeout_s)

    def close(self) -> None:
        """End the thread and close what it held."""
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=1)
        if self._thread.is_alive():
            return
        for fd in (*self._fds, self._wake_read, self._wake_write):
            os.close(fd)
        self._fds.clear()


def _status(fd: int) -> int | None:
    try:
        result = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def signal_name(code: int | None) -> str | None:
    """Return ``"SIGKILL"`` for -9, None where no signal ended the process."""
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
