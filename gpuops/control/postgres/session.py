"""Connections to Postgres that no caller has to wait for longer than it wants.

The driver's calls have no deadline of ours: a server that is stopped, or whose packets are lost,
holds them. So a thread makes them, and a caller who has waited long enough leaves that thread
behind with its connection shut, and continues with another.
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

from gpuops.control.fair_lock import FairLock
from gpuops.control.store import ControlStoreError, ControlStoreUnreachableError
from gpuops.scrub import scrub

if TYPE_CHECKING:
    from psycopg import Connection

T = TypeVar("T")
ConnectionOperation = Callable[["Connection[Any]"], T]

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
_CONNECT_TIMEOUT_MIN_S = 2  # libpq's own least
_FINAL_ERRORS = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
)


class PostgresSessions:
    """Runs acts on a connection, one at a time, each again until its deadline where it was lost.

    *prepare* is run once on each new connection; a `ControlStoreError` that it raises is raised.
    """

    def __init__(
        self, url: str, prepare: ConnectionOperation[None], *, connect_timeout_s: float
    ) -> None:
        # As SQLAlchemy names the driver.
        self._url = url.replace("postgresql+psycopg://", "postgresql://", 1)
        self._prepare = prepare
        self._connect_timeout_s = max(round(connect_timeout_s), _CONNECT_TIMEOUT_MIN_S)
        self._lock = FairLock()
        self._closed = threading.Event()
        self._session: _Session | None = None
        _check_driver(self._url)

    def run(self, operation: ConnectionOperation[T], timeout_s: float) -> T:
        """Return what *operation* does with a connection.

        Raises:
            ControlStoreUnreachableError: No answer within *timeout_s*, or closed.
            ControlStoreError: Postgres refuses, and would again.
        """
        end_s = time.monotonic() + timeout_s
        with self._lock.acquire(timeout_s) as acquired:
            if not acquired:
                raise _unreachable_error("an earlier call still waits for its answer")
            try:
                return self._run_until(operation, end_s)
            finally:
                if self._closed.is_set():
                    self._abandon()

    def wait(self, seconds: float) -> None:
        """Wait, less long where it is closed meanwhile."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Release the connection; a call that waits for its answer ends."""
        self._closed.set()
        self._abandon()

    def _run_until(self, operation: ConnectionOperation[T], end_s: float) -> T:
        from psycopg import Error, InterfaceError, OperationalError

        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                return self._try(operation, end_s)
            except (OperationalError, InterfaceError) as exc:
                self._abandon()
                wait_s = backoff_s * random.uniform(0.5, 1.5)  # noqa: S311 no secret
                error_text = _error_text(exc)
                if any(final_error in error_text for final_error in _FINAL_ERRORS):
                    raise ControlStoreError(
                        f"the control store in Postgres refuses: {error_text}"
                    ) from None
                if time.monotonic() + wait_s >= end_s:
                    raise _unreachable_error(error_text) from None
            except Error as exc:
                raise ControlStoreError(
                    f"the control store in Postgres refuses: {_error_text(exc)}"
                ) from None
            self._closed.wait(wait_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _try(self, operation: ConnectionOperation[T], end_s: float) -> T:
        if self._closed.is_set():
            raise _unreachable_error("this handle is closed")
        session = self._session
        if session is None:
            session = self._session = _Session(self._url, self._prepare, self._connect_timeout_s)
        has_answer = False
        try:
            answer = session.submit(operation).result(timeout=max(end_s - time.monotonic(), 0.0))
            has_answer = True
        except TimeoutError:
            raise _unreachable_error("no answer in time") from None
        except ControlStoreError:
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

    def __init__(
        self, url: str, prepare: ConnectionOperation[None], connect_timeout_s: int
    ) -> None:
        self._url = url
        self._prepare = prepare
        self._connect_timeout_s = connect_timeout_s
        self._connection: Connection[Any] | None = None
        self._abandoned = threading.Event()
        self._requests: queue.SimpleQueue[tuple[ConnectionOperation[Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="gpuops-postgres", daemon=True).start()

    def submit(self, operation: ConnectionOperation[T]) -> "Future[T]":
        """Return what will be the result of *operation*."""
        future: Future[T] = Future()
        self._requests.put((operation, future))
        return future

    def abandon(self) -> None:
        """End the thread as soon as it comes back from where it is; it begins nothing more."""
        self._abandoned.set()
        self._requests.put(None)
        connection = self._connection
        if connection is None:
            return
        # The thread is waiting on this socket; what the server says on it is of no use any more.
        with (
            suppress(Exception),  # boundary: closed by its thread meanwhile
            socket.socket(fileno=socket.dup(connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            operation, future = request
            try:
                connection = self._connect()
                if self._abandoned.is_set():
                    break
                future.set_result(operation(connection))
            except BaseException as exc:  # noqa: BLE001 boundary: it is the caller's
                future.set_exception(exc)
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> "Connection[Any]":
        if self._connection is None:
            from psycopg import connect

            # A prepared statement would not survive a pooler's change of servers.
            connection = connect(
                self._url,
                autocommit=True,
                connect_timeout=self._connect_timeout_s,
                prepare_threshold=None,
                application_name="gpuops board",
            )
            try:
                self._prepare(connection)
                self._connection = connection
            finally:
                if self._connection is None:
                    connection.close()
        return self._connection


def _check_driver(url: str) -> None:
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as exc:
        raise ControlStoreError(
            "a control store in Postgres needs the driver psycopg: pip install 'psycopg[binary]'"
        ) from exc
    try:
        conninfo_to_dict(url)
    except ProgrammingError:
        # The parser's own words may quote a part of the password.
        raise ControlStoreError(
            f"the URL {scrub(url)!r} of the control store is malformed"
        ) from None


def _error_text(exc: Exception) -> str:
    return scrub(" ".join(str(exc).split()))[:500]


def _unreachable_error(why: str) -> ControlStoreUnreachableError:
    return ControlStoreUnreachableError(f"the control store in Postgres does not answer: {why}")
