"""Starting the server of a control store from an agent: whoever is first does, the others find it.

Notices at once that the server of a control store was killed, and puts an empty one in its place.

What the agents had agreed on is gone with it. The new server says so to every agent, as soon as it
calls (`ControlStoreResetError`): they end their run within seconds, rather than wait a minute for a
control store that nobody will start again.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpuops.config.resolve import environ
from gpuops.control.store import (
    ControlStoreError,
    ControlStoreUnreachableError,
    OtherTokenError,
)
from gpuops.control.tcp.client_connection import OtherRunError, format_address, listen_address
from gpuops.control.tcp.server import LEASE_S, RUN_OVER_KEY
from gpuops.control.tcp.store import TcpControlStore
from gpuops.host.process.command import module_command
from gpuops.host.process.sidecar import start_sidecar

START_TIMEOUT_S = 20.0


class PortTakenError(ControlStoreError):
    """The port is taken by the control store of another run, or by one that has just ended."""


@dataclass(slots=True)
class ServerProcess:
    """A control store's server. ``pid`` is None where another agent had started it."""

    host: str
    port: int
    pid: int | None

    def is_running(self) -> bool:
        """Say whether the process that we started runs; it is reaped where it does not."""
        if self.pid is None:
            return False
        try:
            pid, _status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            # Somebody else in this process reaped it.
            pid = self.pid
        if pid:
            self.pid = None
        return not pid

    def wait(self) -> int | None:
        """Wait for its end; return its exit code, None where somebody else reaped it."""
        if self.pid is None:
            return None
        pid, self.pid = self.pid, None
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except ChildProcessError:
            return None

    def kill(self) -> None:
        """End the process that we started, with all that the control store holds."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = None


def start_server(
    host: str,
    port: int,
    *,
    run_key: str,
    token: str = "",
    lease_s: float = LEASE_S,
    start_timeout_s: float = START_TIMEOUT_S,
) -> ServerProcess:
    """Return the server of *run_key* at *host* (an address of this machine) and *port*.

    It is started where none is there; 0 is any free port.

    Raises:
        PortTakenError: See there; it may be free in a moment.
        ControlStoreError: The port is taken by something else, or Python cannot be started.
        ControlStoreUnreachableError: It did not begin within *start_timeout_s*.
    """
    try:
        address = listen_address(host)
    except OSError as exc:
        raise ControlStoreError(f"cannot start the control store's server: {exc}") from exc
    argv = [*module_command("gpuops.control.tcp.serve"), "--host", address]
    argv += ["--port", str(port), "--run-key", run_key, "--lease", f"{lease_s:g}"]
    argv += ["--token-fd", "0"] if token else []
    end_s = time.monotonic() + start_timeout_s
    try:
        process = start_sidecar(argv, environ())
    except OSError as exc:
        raise ControlStoreError(f"cannot start the control store's server: {exc.strerror}") from exc
    try:
        status, _, detail = process.first_line(end_s, token.encode()).partition(" ")
    except BaseException:  # boundary: at Ctrl-C nobody else would end it
        ServerProcess(host, port, process.pid).kill()
        raise
    if status == "ready" and detail.isdecimal():
        return ServerProcess(host, int(detail), process.pid)
    ServerProcess(host, port, process.pid).kill()
    address_text = format_address((host, port))
    if status == "failed":
        raise ControlStoreError(
            f"the control store's server cannot listen on {address_text}: {detail}"
        )
    if status != "taken":
        raise ControlStoreUnreachableError(
            f"the control store's server at {address_text} did not begin in {start_timeout_s:g} s"
        )
    _check_same_run(host, port, run_key, token)
    return ServerProcess(host, port, None)


def _check_same_run(host: str, port: int, run_key: str, token: str) -> None:
    """Raise unless the one who has the port is the control store of this run."""
    store = TcpControlStore(host, port, run_key=run_key, token=token)
    try:
        store.get(RUN_OVER_KEY)
    except ControlStoreError as exc:
        kind = ControlStoreError
        if isinstance(exc, OtherRunError | ControlStoreUnreachableError):
            kind = PortTakenError  # that run may end
        elif isinstance(exc, OtherTokenError):
            kind = OtherTokenError
        raise kind(f"the port is taken on this machine, and {exc}") from exc
    finally:
        store.close()


log = logging.getLogger(__name__)

# For the agents of the lost run to call, and for those of the next one to come.
RESTART_LEASE_S = 20.0


RECORD_LOST = "what the agents agreed on is lost"
# Under a quorum the server only introduces agents to each other.
INTRODUCTION_LOST = "the run goes on, and another one takes its place"


class ServerGuard:
    """Waits in a thread for the end of *server*; calls *restart_server* once, if it was killed.

    A server that nobody needed any more ends with exit code 0 and is left alone.
    """

    def __init__(
        self,
        server: ServerProcess,
        restart_server: Callable[[], ServerProcess],
        consequence: str = RECORD_LOST,
    ) -> None:
        self._server = server
        self._consequence = consequence
        self._restart = restart_server
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gpuops-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more; the server keeps running."""
        os.write(self._wake_write, b"x")
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _run(self) -> None:
        if not self._has_ended() or self._server.wait() == 0:
            return
        log.warning("the control store's server was killed: %s", self._consequence)
        try:
            self._restart()
        except ControlStoreError as exc:
            log.warning("%s", exc)

    def _has_ended(self) -> bool:
        """Wait; say whether it was for the server's end rather than for our own."""
        if self._server.pid is None:
            return False
        try:
            fd = os.pidfd_open(self._server.pid)
        except OSError as exc:
            log.debug("the control store's server cannot be watched: %s", exc)
            return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        try:
            ready = [found for found, _events in poll.poll()]
        finally:
            os.close(fd)
        return self._wake_read not in ready
