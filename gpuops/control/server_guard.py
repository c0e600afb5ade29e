"""Notices at once that the server of a board was killed, and puts an empty one in its place.

What the agents had agreed on is gone with it. The new server tells every agent so, as soon as it
calls (`BoardForgotError`): they end their run within seconds, rather than wait a minute for a board
that nobody will bring back.
"""

import logging
import os
import select
import threading
from collections.abc import Callable

from gpuops.control.board import BoardError
from gpuops.control.server_process import ServerProcess

log = logging.getLogger(__name__)

# For the agents of the lost run to call, and for those of the next one to come.
LEASE_S = 20.0


class ServerGuard:
    """Waits for the end of *server* in a thread of its own; calls *restart* once, if it was killed.

    A server that nobody needed any more ends with exit code 0 and is left alone.
    """

    def __init__(self, server: ServerProcess, restart: Callable[[], ServerProcess]) -> None:
        self._server = server
        self._restart = restart
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gpuops-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more; the server goes on by itself."""
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        if not self._has_ended() or self._server.wait() == 0:
            return
        log.warning("the board's server was killed: what the agents agreed on is lost")
        try:
            self._restart()
        except BoardError as exc:
            log.warning("%s", exc)

    def _has_ended(self) -> bool:
        """Wait; say whether it was for the server's end rather than for our own."""
        if self._server.pid is None:
            return False
        try:
            fd = os.pidfd_open(self._server.pid)
        except OSError as exc:
            log.debug("the board's server cannot be watched: %s", exc)
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        try:
            ready = [found for found, _events in poll.poll()]
        finally:
            os.close(fd)
        return self._wake_read not in ready
