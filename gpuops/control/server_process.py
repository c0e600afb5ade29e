"""Starting the server of a board from an agent: whoever is first does, the others find it."""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from gpuops.config import environ
from gpuops.control.board import BoardError, BoardUnreachableError
from gpuops.control.board_line import OtherRunError, shown
from gpuops.control.board_server import LEASE_S, OVER
from gpuops.control.local_host import listen_address
from gpuops.control.tcp_board import TcpBoard
from gpuops.host.companion import start_companion

READY_S = 20.0


class PortTakenError(BoardError):
    """The port is taken by the board of another run, or by one that has just ended."""


@dataclass(slots=True)
class ServerProcess:
    """A board's server. ``pid`` is None where another agent had started it."""

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
        """End the process that we started, with all that the board holds."""
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
    ready_s: float = READY_S,
) -> ServerProcess:
    """Return the server of *run_key* at *host* (an address of this machine) and *port*.

    It is started where none is there; 0 is any free port.

    Raises:
        PortTakenError: See there; it may be free in a moment.
        BoardError: The port is taken by something else, or Python cannot be started.
        BoardUnreachableError: It did not begin within *ready_s*.
    """
    try:
        address = listen_address(host)
    except OSError as exc:
        raise BoardError(f"cannot start the board's server: {exc}") from exc
    # -P: never import from the directory in which the job happens to be.
    argv = [sys.executable, "-P", "-m", "gpuops.control.serve", "--host", address]
    argv += [
        "--port",
        str(port),
        "--run-key",
        run_key,
        "--lease",
        f"{lease_s:g}",
        "--token-fd",
        "0",
    ]
    end_s = time.monotonic() + ready_s
    try:
        process = start_companion(argv, environ())
    except OSError as exc:
        raise BoardError(f"cannot start the board's server: {exc.strerror}") from exc
    word, _, rest = process.first_line(end_s, token.encode()).partition(" ")
    if word == "ready" and rest.isdecimal():
        return ServerProcess(host, int(rest), process.pid)
    ServerProcess(host, port, process.pid).kill()
    place = shown((host, port))
    if word == "failed":
        raise BoardError(f"the board's server cannot listen on {place}: {rest}")
    if word != "taken":
        raise BoardUnreachableError(f"the board's server at {place} did not begin in {ready_s:g} s")
    _check_ours(host, port, run_key, token)
    return ServerProcess(host, port, None)


def _check_ours(host: str, port: int, run_key: str, token: str) -> None:
    """Raise unless the one who has the port is the board of this run."""
    board = TcpBoard(host, port, run_key=run_key, token=token)
    try:
        board.get(OVER)
    except BoardError as exc:
        may_end = isinstance(exc, OtherRunError | BoardUnreachableError)
        kind = PortTakenError if may_end else BoardError
        raise kind(f"the port is taken on this machine, and {exc}") from exc
    finally:
        board.close()
