"""The keeper's socket: admission, limits and timeouts of connections; one thread, non-blocking."""

import errno
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.checkpoint.keeper import messages
from gpuops.checkpoint.keeper.connection import short_path
from gpuops.checkpoint.keeper.core import KeeperCore
from gpuops.checkpoint.keeper.jobs import Waker
from gpuops.checkpoint.keeper.messages import MessageError
from gpuops.checkpoint.keeper.requests import ClientSession, KeeperRequests, NotReadyError
from gpuops.checkpoint.types import CheckpointError, CorruptError, RestoreUndecidedError

CONNECTIONS_MAX = 1024
# Connections without a hello, and those without a role.
UNAUTHENTICATED_MAX = 64
UNAUTHENTICATED_S = 10.0
DRAIN_S = 5.0
FINAL_PERSIST_S = 600.0
_BACKLOG = 128
_ACCEPT_BATCH = 32
_PAUSE_S = 1.0
_TICK_S = 1.0
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("gpuops.checkpoint.keeper.api")


class KeeperServerConnection:
    """One connection. ``pending``: the request without a reply yet, and since when."""

    def __init__(self, sock: socket.socket, pid: int, now_s: float) -> None:
        self.sock = sock
        self.session = ClientSession(self)
        self.opened_s = now_s
        self.pending: _PendingRequest | None = None
        self.is_open = True
        self.pid = pid

    @property
    def is_unauthenticated(self) -> bool:
        """Return whether it is neither a rank's nor the agent's."""
        return self.session.role in ("", "probe")

    def close(self) -> None:
        # The server closes the descriptor once nothing refers to its number any more.
        self.is_open = False
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def send(self, message_id: object, reply: object) -> None:
        """Send a reply; a peer that does not read it is disconnected. Number 0 has no reply."""
        fds, self.session.fds = self.session.fds, []
        try:
            if message_id != 0:
                socket.send_fds(self.sock, [_message(message_id, reply)], fds)
            elif isinstance(reply, CheckpointError):
                _log.warning("pid %d: %s", self.pid, reply)
        except (OSError, MessageError) as exc:
            _log.warning("pid %d does not read its reply: %s", self.pid, exc)
            self.close()
        finally:
            for fd in fds:
                os.close(fd)


def _message(message_id: object, reply: object) -> bytes:
    message: dict[str, object] = {"v": messages.VERSION, "id": message_id}
    if isinstance(reply, CheckpointError):
        kind = "refused"
        if isinstance(reply, RestoreUndecidedError | CorruptError):
            kind = messages.CORRUPT if isinstance(reply, CorruptError) else messages.UNDECIDED
        message |= {"error": str(reply)[:4000], "kind": kind}
    else:
        message["ok"] = {} if reply is None else reply
    return messages.to_bytes(message)


@dataclass(frozen=True, slots=True)
class _PendingRequest:
    message_id: int
    command: str
    fields: Mapping[str, Any]
    since_s: float
    wait_s: float


class KeeperServer:
    """Serves *core* on a socket in *folder* until it is idle.

    Idle: neither an agent nor a rank has been connected for *lease_s* seconds.
    *run_callbacks* is called each time *waker* is woken.
    """

    def __init__(
        self,
        core: KeeperCore,
        folder: Path,
        *,
        lease_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        waker: Waker,
        run_callbacks: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core
        self.lease_s = lease_s
        self.is_shutting_down = False
        self._requests = KeeperRequests(core)
        self._clock_s = clock_s
        self._run_callbacks = run_callbacks
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, KeeperServerConnection] = {}
        self._idle_since_s = clock_s()
        self._has_flushed = False
        self._paused_until_s: float | None = None
        self._listener = _listen(folder)
        self._waker = waker
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(waker, selectors.EVENT_READ, waker.drain)

    def begin_shutdown(self) -> None:
        """End soon after the last agent and rank: a signal to a whole job must not lose its state.

        Ranks and the agent, which receive the same signal, may still save and persist.
        """
        self.is_shutting_down = True
        self._waker.wake()

    def serve(self) -> None:
        """Return when the keeper is no longer needed."""
        while not self.core.is_ending and not self._is_idle_for_good():
            for key, _events in self._selector.select(_TICK_S):
                key.data()
            self._run_callbacks()
            self._poll_connections()
        _log.info("the keeper ends")

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    def _is_idle_for_good(self) -> bool:
        """Return whether the lease has expired; the last state is persisted before."""
        now_s = self._clock_s()
        if any(not connection.is_unauthenticated for connection in self._connections.values()):
            self._idle_since_s, self._has_flushed = now_s, False
            return False
        idle_s = now_s - self._idle_since_s
        group = self.core.group
        ends_soon = self.is_shutting_down or (group is not None and group.is_handed_over)
        lease_s = min(DRAIN_S, self.lease_s) if ends_soon else self.lease_s
        if idle_s < lease_s:
            return False
        return not self._is_persisting_final() or idle_s >= lease_s + FINAL_PERSIST_S

    def _is_persisting_final(self) -> bool:
        """Persist the states that only memory holds; return whether that is in progress."""
        persister, newest = self.core.persister, self.core.memory.buffer_table.last_committed
        if newest is None:
            return False
        if persister.schedule.has_persisted(newest):
            return persister.awaits_read_back(newest)
        if not self._has_flushed:  # once: what fails now fails again
            self._has_flushed = persister.is_flushing = True
            persister.persist_if_due()
        return persister.schedule.in_progress is not None

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _OUT_OF_RESOURCES:
                    # It would be ready again at once, as long as there are no resources.
                    self._selector.unregister(self._listener)
                    self._paused_until_s = self._clock_s() + _PAUSE_S
                    _log.warning("no connection can be accepted for now: %s", exc)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pid, uid = _peer_credentials(sock)
        connection = KeeperServerConnection(sock, pid, self._clock_s())
        n_unauthenticated = sum(other.is_unauthenticated for other in self._connections.values())
        why = ""
        if uid not in (os.geteuid(), 0):
            why = f"this keeper serves uid {os.geteuid()}, not {uid}"
        elif n_unauthenticated >= UNAUTHENTICATED_MAX or len(self._connections) >= CONNECTIONS_MAX:
            why = (
                f"too many connections: {len(self._connections)}, {n_unauthenticated} without "
                "a hello"
            )
        if why:
            connection.send(None, MessageError(why))
            sock.close()
            return
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: KeeperServerConnection) -> None:
        if not connection.is_open:
            return
        try:
            data = messages.receive(connection.sock)
            if not data or connection.pending is not None:
                # It has closed, or does not wait for its replies, which no client of ours does.
                self._drop(connection)
                return
            fields = messages.from_bytes(data)
            message_id, command = messages.number_and_command(fields)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        except MessageError as exc:
            connection.send(None, exc)
            self._drop(connection)
            return
        wait_s = self._requests.wait_s_max(command, fields)
        request = _PendingRequest(message_id, command, fields, self._clock_s(), wait_s)
        self._reply_or_wait(connection, request, 0.0)

    def _reply_or_wait(
        self, connection: KeeperServerConnection, request: _PendingRequest, waited_s: float
    ) -> None:
        """Handle *request* and reply, unless it has to wait."""
        connection.pending, reply = None, None
        session, command = connection.session, request.command
        try:
            reply = self._requests.handle(session, command, request.fields, waited_s)
        except NotReadyError:
            connection.pending = request
            return
        except CheckpointError as exc:
            reply = exc
        except Exception as exc:  # noqa: BLE001 boundary: a bug must not lose the node's states
            _log.error("%s of pid %d failed", command, connection.pid, exc_info=exc)
            reply = CheckpointError(f"the keeper failed: {exc!r}")
        connection.send(request.message_id, reply)

    def _poll_connections(self) -> None:
        """Handle pending requests; disconnect peers that are gone or sent nothing for too long."""
        now_s = self._clock_s()
        self.core.tick()
        for connection in list(self._connections.values()):
            pending = connection.pending
            if connection.is_open and pending is not None:
                self._retry(connection, pending, now_s)
            is_brief = connection.session.role == "probe" or (
                not connection.session.role and not pending
            )
            if not connection.is_open or (
                is_brief and now_s - connection.opened_s > UNAUTHENTICATED_S
            ):
                self._drop(connection)
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _retry(
        self, connection: KeeperServerConnection, pending: _PendingRequest, now_s: float
    ) -> None:
        waited_s = now_s - pending.since_s
        if waited_s > pending.wait_s:
            connection.pending = None
            why = f"{pending.command} was not done within {pending.wait_s:g} s"
            connection.send(pending.message_id, CheckpointError(why))
        else:
            self._reply_or_wait(connection, pending, waited_s)

    def _drop(self, connection: KeeperServerConnection) -> None:
        fd = connection.sock.fileno()
        if self._connections.get(fd) is connection:
            del self._connections[fd]
            self._selector.unregister(fd)
        connection.close()
        connection.sock.close()
        self.core.disconnected(connection)


def _listen(folder: Path) -> socket.socket:
    """Return a socket that listens in *folder*; the one of a dead keeper is replaced.

    Raises:
        OSError: It cannot be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_path(folder) as path:
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 a path under /proc/self/fd
            sock.bind(path)
            os.chmod(path, 0o600)  # noqa: PTH101 likewise
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other side (SO_PEERCRED, unix(7))."""
    size = struct.calcsize("3i")
    pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, uid
