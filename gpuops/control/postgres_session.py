"""Connections to Postgres that no caller has to wait for longer than it wants.

The driver's calls have no deadline of ours: a server that is stopped, or whose packets are lost,
holds them. So a thread makes them, and a caller who has waited long enough leaves that thread
behind with its connection shut, and goes on with another.
"""

import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from gpuops.control.board import BoardError, BoardUnreachableError
from gpuops.control.turns import Turns
from gpuops.scrub import scrub

if TYPE_CHECKING:
    from psycopg import Connection

T = TypeVar("T")
Act = Callable[["Connection[Any]"], T]

PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
_CONNECT_S_MIN = 2  # libpq's own least
_FINAL = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry")


class Sessions:
    """Runs acts on a connection, one at a time, each again until its deadline where it was lost.

    *prepare* is run once on each new connection; a `BoardError` that it raises is raised.
    """

    def __init__(self, url: str, prepare: Act[None], *, connect_s: float) -> None:
        # As SQLAlchemy names the driver.
        self._url = url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._prepare = prepare
        self._connect_s = max(round(connect_s), _CONNECT_S_MIN)
        self._turns = Turns()
        self._closed = threading.Event()
        self._session: _Session | None = None
        _check_driver(self._url)

    def run(self, act: Act[T], within_s: float) -> T:
        """Return what *act* does with a connection.

        Raises:
            BoardUnreachableError: No answer within *within_s*, or closed.
            BoardError: Postgres refuses, and would again.
        """
        end_s = time.monotonic() + within_s
        with self._turns.taken(within_s) as is_ours:
            if not is_ours:
                raise _unreachable("an earlier call still waits for its answer")
            try:
                return self._run_until(act, end_s)
            finally:
                if self._closed.is_set():
                    self._abandon()

    def wait(self, seconds: float) -> None:
        """Wait, less long where it is closed meanwhile."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Let go of the connection; a call that waits for its answer ends."""
        self._closed.set()
        self._abandon()

    def _run_until(self, act: Act[T], end_s: float) -> T:
        from psycopg import Error, InterfaceError, OperationalError

        pause_s = PAUSE_MIN_S
        while True:
            try:
                return self._try(act, end_s)
            except (OperationalError, InterfaceError) as exc:
                self._abandon()
                wait_s = pause_s * random.uniform(0.5, 1.5)  # noqa: S311 no secret
                told = _told(exc)
                if any(words in told for words in _FINAL):
                    raise BoardError(f"the board in Postgres refuses: {told}") from None
                if time.monotonic() + wait_s >= end_s:
                    raise _unreachable(told) from None
            except Error as exc:
                raise BoardError(f"the board in Postgres refuses: {_told(exc)}") from None
            self._closed.wait(wait_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _try(self, act: Act[T], end_s: float) -> T:
        if self._closed.is_set():
            raise _unreachable("this handle is closed")
        session = self._session
        if session is None:
            session = self._session = _Session(self._url, self._prepare, self._connect_s)
        has_answer = False
        try:
            answer = session.ask(act).result(timeout=max(end_s - time.monotonic(), 0.0))
            has_answer = True
        except TimeoutError:
            raise _unreachable("no answer in time") from None
        except BoardError:
            has_answer = True
            raise
        finally:
            # Also after an exception that a signal handler raised here.
            if not has_answer:
                self._abandon()
        return answer

    def _abandon(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.abandon()


class _Session:
    """One connection and the thread that uses it."""

    def __init__(self, url: str, prepare: Act[None], connect_s: int) -> None:
        self._url = url
        self._prepare = prepare
        self._connect_s = connect_s
        self._line: Connection[Any] | None = None
        self._abandoned = threading.Event()
        self._asked: queue.SimpleQueue[tuple[Act[Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="gpuops-postgres", daemon=True).start()

    def ask(self, act: Act[T]) -> "Future[T]":
        """Return what will be the result of *act*."""
        future: Future[T] = Future()
        self._asked.put((act, future))
        return future

    def abandon(self) -> None:
        """End the thread as soon as it comes back from where it is; it begins nothing more."""
        self._abandoned.set()
        self._asked.put(None)
        line = self._line
        if line is None:
            return
        # The thread is waiting on this socket; what the server says on it is of no use any more.
        with (
            suppress(Exception),  # boundary: closed by its thread meanwhile
            socket.socket(fileno=socket.dup(line.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            act, future = asked
            try:
                line = self._connected()
                if self._abandoned.is_set():
                    break
                future.set_result(act(line))
            except BaseException as exc:  # noqa: BLE001 boundary: it is the caller's
                future.set_exception(exc)
        if self._line is not None:
            self._line.close()

    def _connected(self) -> "Connection[Any]":
        if self._line is None:
            from psycopg import connect

            # A prepared statement would not survive a pooler's change of servers.
            line = connect(
                self._url,
                autocommit=True,
                connect_timeout=self._connect_s,
                prepare_threshold=None,
                application_name="gpuops board",
            )
            try:
                self._prepare(line)
                self._line = line
            finally:
                if self._line is None:
                    line.close()
        return self._line


def _check_driver(url: str) -> None:
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as exc:
        raise BoardError(
            "a board in Postgres needs the driver psycopg: pip install 'psycopg[binary]'"
        ) from exc
    try:
        conninfo_to_dict(url)
    except ProgrammingError:
        # The parser's own words may quote a part of the password.
        raise BoardError(f"the URL {scrub(url)!r} of the board is malformed") from None


def _told(exc: Exception) -> str:
    return scrub(" ".join(str(exc).split()))[:500]


def _unreachable(why: str) -> BoardUnreachableError:
    return BoardUnreachableError(f"the board in Postgres does not answer: {why}")
