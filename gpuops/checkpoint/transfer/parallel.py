"""Several connections to one peer for one image, each reopened while that makes sense."""

import ipaddress
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gpuops.checkpoint.transfer.connection import (
    StaleEpochError,
    TransferConnection,
    TransferLimits,
    UnauthenticatedError,
)
from gpuops.checkpoint.transfer.wire import (
    JobCredentials,
    TransferError,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import CorruptError, KeeperAddress
from gpuops.host.net.frames import WireError

# A corrupt handshake looks like another token; only three in a row count as one.
UNAUTHENTICATED_MAX = 3
PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 0.5
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How long a transfer may take.

    *deadline_s*: for all of it. A peer without progress for *no_progress_s* is given up. *stop*,
    once set, ends the transfer.
    """

    deadline_s: float
    no_progress_s: float = 15.0
    n_connections: int = 4
    limits: TransferLimits = field(default_factory=TransferLimits)
    stop: threading.Event | None = None


class ParallelConnections:
    """Runs *work* on each of several connections to *peer*, until one call returns.

    *progress* returns a number that grows with progress. *is_done* returns whether the work is
    done: a connection that broke after that is not reopened.
    """

    def __init__(
        self,
        peer: KeeperAddress,
        job: JobCredentials,
        options: TransferOptions,
        work: Callable[[TransferConnection], None],
        progress: Callable[[], int],
    ) -> None:
        self._peer, self._job, self._options = peer, job, options
        self._work, self._progress = work, progress
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._sockets: dict[socket.socket, TransferConnection | None] = {}
        self._error: Exception | None = None
        self._last_error = "it was not reached"
        self._n_unauthenticated = 0
        self._moved = (progress(), time.monotonic())

    def run(self, n_connections: int, end_s: float) -> None:
        """Return when the work is done; no thread of it runs any more, also where this raises.

        Raises:
            TransferRefusedError: The peer refuses for good.
            CorruptError: Its bytes arrive corrupt, or its copy is.
            TransferError: Not reached, too slow, not of this job, or after *end_s* (monotonic).
        """
        threads = self._start(n_connections)
        stop = self._options.stop
        while not self._over.wait(_POLL_S):
            if stop is not None and stop.is_set():
                self._fail(TransferError("the transfer was stopped"))
            elif time.monotonic() >= end_s:
                self._fail(
                    TransferError(
                        f"not finished after {self._options.deadline_s:g} s, its deadline: "
                        f"{self._last_error}"
                    )
                )
        self._abort_all()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _start(self, n_threads: int) -> list[threading.Thread]:
        threads: list[threading.Thread] = []
        for _ in range(n_threads):
            thread = threading.Thread(target=self._run, name="gpuops-transfer", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                # No more threads can be started: the existing ones do the work.
                if not threads:
                    raise TransferError(f"no connection can be made: {exc}") from exc
                break
            threads.append(thread)
        return threads

    def _run(self) -> None:
        pause_s = PAUSE_MIN_S
        while not self._over.is_set():
            before = self._progress()
            try:
                self._run_connection()
            except (TransferRefusedError, CorruptError) as exc:
                if _is_final(exc):
                    self._fail(exc)
                    return
                self._record_error(str(exc))
            except UnauthenticatedError as exc:
                self._on_unauthenticated(str(exc))
            except (OSError, WireError) as exc:
                self._record_error(_describe(exc))
            except Exception as exc:  # noqa: BLE001 boundary: the caller waits for an error
                self._fail(exc)
                return
            else:
                self._over.set()
                return
            pause_s = PAUSE_MIN_S if self._progress() > before else min(2 * pause_s, PAUSE_MAX_S)
            # Jitter: the connections of a whole cluster must not all come back at once.
            self._over.wait(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 no secret

    def _run_connection(self) -> None:
        sock = _socket(self._peer)
        with self._lock:
            self._sockets[sock] = None
        connection = None
        try:
            if self._over.is_set():
                return
            limits = self._options.limits
            sock.settimeout(limits.stall_s)
            sock.connect((self._peer.host, self._peer.port))
            connection = TransferConnection(sock, self._job, limits)
            with self._lock:
                self._sockets[sock] = connection
            if self._over.is_set():
                return
            connection.client_handshake()
            self._n_unauthenticated = 0
            self._work(connection)
        finally:
            with self._lock:
                del self._sockets[sock]
            sock.close()

    def _abort_all(self) -> None:
        with self._lock:
            for sock, connection in self._sockets.items():
                if connection is not None:
                    connection.abort()
                else:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._error is None and not self._over.is_set():
                self._error = error
        self._over.set()

    def _record_error(self, why: str) -> None:
        """Record why a connection ended; give the peer up where there is no progress for long."""
        now_s, progress = time.monotonic(), self._progress()
        with self._lock:
            self._last_error = why
            if progress > self._moved[0]:
                self._moved = (progress, now_s)
            is_lost = now_s - self._moved[1] >= self._options.no_progress_s
        if is_lost:
            self._fail(TransferError(f"no progress: {why}"))

    def _on_unauthenticated(self, why: str) -> None:
        self._n_unauthenticated += 1
        if self._n_unauthenticated >= UNAUTHENTICATED_MAX:
            self._fail(TransferError(f"the other side is not a keeper of this job: {why}"))
        self._record_error(why)


def _is_final(error: Exception) -> bool:
    if isinstance(error, StaleEpochError):
        # It will learn of the new epoch.
        return False
    return not isinstance(error, TransferRefusedError) or error.code is not TransferRefusal.BUSY


def _socket(peer: KeeperAddress) -> socket.socket:
    try:
        version = ipaddress.ip_address(peer.host).version
    except ValueError as exc:
        raise TransferError(f"{peer.host!r} is not an address of {peer.name}") from exc
    return socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)


def _describe(exc: Exception) -> str:
    if isinstance(exc, ConnectionRefusedError):
        return "nobody listens there"
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
