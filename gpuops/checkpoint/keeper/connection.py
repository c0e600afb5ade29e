"""The client side of a keeper's socket: one request at a time, each with a deadline."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from gpuops.checkpoint.keeper import messages
from gpuops.checkpoint.keeper.messages import MessageError
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    KeeperError,
    RestoreUndecidedError,
)
from gpuops.wire.messages import MessageFormatError, read

T = TypeVar("T")
SOCKET_NAME = "keeper.sock"
LOCK_NAME = "keeper.lock"


def keeper_socket_path(folder: Path) -> Path:
    """Return the path of the socket in *folder*."""
    return folder / SOCKET_NAME


@contextmanager
def short_path(folder: Path, name: str = SOCKET_NAME) -> Iterator[str]:
    """Yield a short path to *name* in *folder*.

    A socket address has 107 bytes at most (unix(7)); the folders of a run are longer.

    Raises:
        OSError: The folder cannot be opened.
    """
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


DEADLINE_S = 30.0
# How much longer the client waits than the deadline that it gave to the keeper.
SLACK_S = 5.0


class KeeperGoneError(KeeperError):
    """No keeper listens there, or it is gone."""


class KeeperTimeoutError(KeeperError):
    """There was no reply within the deadline; the connection stays open."""


class KeeperConnection:
    """A connection to the keeper at *path*; thread-safe, calls are serialised.

    Raises:
        KeeperGoneError: There is no keeper.
        KeeperError: It does not answer, or refuses.
    """

    def __init__(self, path: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._number = 0
        self._pid = os.getpid()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(deadline_s)
            with short_path(path.parent, path.name) as short:
                sock.connect(short)
        except OSError as exc:
            sock.close()
            if isinstance(exc, TimeoutError):
                raise KeeperError(f"the keeper at {path} accepts no connection") from exc
            raise KeeperGoneError(f"no keeper listens at {path}: {exc.strerror or exc}") from exc
        self._sock: socket.socket | None = sock
        self._awaited: str | None = None  # the command whose reply is outstanding

    @property
    def is_open(self) -> bool:
        """Return whether requests can still be sent."""
        return self._sock is not None

    @property
    def pid(self) -> int:
        """The pid of the listening process."""
        size = struct.calcsize("3i")
        with self._lock:
            raw = self._connected_socket().getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", raw)[0])

    def call(
        self, kind: type[T], command: str, *, wait_s: float | None = None, **fields: object
    ) -> T:
        """Return the reply, which is of *kind*.

        Raises:
            RestoreUndecidedError: The keeper cannot determine the state to resume from.
            CorruptError: No copy of what was requested is intact.
            KeeperError: It refused, or a reply is outstanding (the connection stays open), or it is
                gone (the connection is closed).
        """
        reply, fds = self.call_for_fds(kind, command, wait_s=wait_s, **fields)
        _close_fds(fds)
        return reply

    def call_for_fds(
        self, kind: type[T], command: str, *, wait_s: float | None = None, **fields: object
    ) -> tuple[T, list[int]]:
        """Return the reply as `call` does, and its descriptors, which the caller has to close."""
        with self._lock:
            end_s = time.monotonic() + (self._deadline_s if wait_s is None else wait_s)
            try:
                self._send(command, end_s, fields)
                data, fds = self._receive(command, end_s)
            except TimeoutError as exc:
                self._disconnect()
                raise KeeperError(
                    f"the keeper at {self._path} does not answer ({command}); is it stopped?"
                ) from exc
            try:
                return self._reply(kind, command, self._read(command, data)), fds
            except BaseException:  # boundary: no one else closes them
                _close_fds(fds)
                raise

    def call_within(self, kind: type[T], command: str, *, wait_s: float, **fields: object) -> T:
        """Return the reply if it comes within *wait_s*.

        Otherwise the reply is outstanding: no other request is sent until `late_reply` returns it.

        Raises:
            KeeperTimeoutError: There was none, or an older reply is outstanding.
            KeeperError: As for `call`.
        """
        with self._lock:
            end_s = time.monotonic() + min(wait_s, self._deadline_s)
            try:
                self._send(command, end_s, fields)
                self._awaited = command
                return self._reply(kind, command, self._receive_awaited(command, end_s))
            except TimeoutError as exc:
                raise KeeperTimeoutError(
                    f"the keeper at {self._path} has not answered yet ({command})"
                ) from exc

    def late_reply(self, kind: type[T], command: str, wait_s: float = 0.0) -> T | None:
        """Receive the outstanding reply, if any, and return it where it is one to *command*.

        Raises:
            KeeperTimeoutError: It is still outstanding after *wait_s*.
            KeeperError: As for `call`.
        """
        with self._lock:
            awaited = self._awaited
            if awaited is None:
                return None
            try:
                reply = self._receive_awaited(awaited, time.monotonic() + wait_s)
            except TimeoutError as exc:
                raise KeeperTimeoutError(
                    f"the keeper at {self._path} has not answered yet ({awaited})"
                ) from exc
            return self._reply(kind, command, reply) if awaited == command else None

    def notify(self, command: str, **fields: object) -> None:
        """Send a message that has no reply; returns as soon as it is sent.

        Raises:
            KeeperError: The keeper is gone; the connection is closed.
        """
        message = {"v": messages.VERSION, "id": 0, "what": command, **fields}
        with self._lock:
            sock = self._connected_socket()
            try:
                _set_deadline(sock, time.monotonic() + self._deadline_s)
                sock.send(messages.to_bytes(message))
            except OSError as exc:
                self._disconnect()
                why = "does not answer" if isinstance(exc, TimeoutError) else "is gone"
                raise KeeperGoneError(f"the keeper at {self._path} {why} ({command})") from exc

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _connected_socket(self) -> socket.socket:
        if os.getpid() != self._pid:
            raise KeeperError(
                f"the connection to the keeper belongs to process {self._pid}, not to its child"
            )
        if self._sock is None:
            raise KeeperGoneError(f"the connection to the keeper at {self._path} is closed")
        return self._sock

    def _send(self, command: str, end_s: float, fields: Mapping[str, object]) -> None:
        """Send a request; TimeoutError where the socket does not accept it in time."""
        sock = self._connected_socket()
        if self._awaited is not None:
            raise KeeperTimeoutError(
                f"the keeper at {self._path} has not answered yet ({self._awaited})"
            )
        request = {"v": messages.VERSION, "id": self._number + 1, "what": command, **fields}
        data = messages.to_bytes(request)
        self._number += 1
        _set_deadline(sock, end_s)
        try:
            sock.send(data)
        except TimeoutError:
            raise
        except OSError as exc:
            raise self._gone_error(command, exc) from exc

    def _receive_awaited(self, command: str, end_s: float) -> object:
        """Return the outstanding reply; TimeoutError where it does not come before *end_s*."""
        data, fds = self._receive(command, end_s)
        self._awaited = None
        _close_fds(fds)
        return self._read(command, data)

    def _receive(self, command: str, end_s: float) -> tuple[bytes, list[int]]:
        """Return a reply; TimeoutError where none comes before *end_s*."""
        sock = self._connected_socket()
        _set_deadline(sock, end_s)
        try:
            data, fds, flags, _ = socket.recv_fds(
                sock, messages.MESSAGE_BYTES_MAX, messages.FDS_MAX
            )
        except TimeoutError:
            raise
        except OSError as exc:
            raise self._gone_error(command, exc) from exc
        is_cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
        if is_cut or not data:
            _close_fds(fds)
            self._disconnect()
            why = (
                "its reply was truncated; too many files are open here" if is_cut else "it is gone"
            )
            raise KeeperGoneError(f"the keeper at {self._path} ({command}): {why}")
        return data, fds

    def _gone_error(self, command: str, error: OSError) -> KeeperGoneError:
        self._disconnect()
        return KeeperGoneError(
            f"the keeper at {self._path} is gone ({command}): {error.strerror or error}"
        )

    def _read(self, command: str, data: bytes) -> object:
        try:
            fields = messages.from_bytes(data)
        except MessageError as exc:
            self._disconnect()
            raise KeeperError(f"the keeper at {self._path} ({command}): {exc}") from exc
        why = fields.get("error")
        if why is None and fields.get("id") == self._number and "ok" in fields:
            return fields["ok"]
        if why is None:
            # Only one request is outstanding: a reply to another one is invalid.
            self._disconnect()
            raise KeeperError(f"the keeper at {self._path} ({command}) sent an unexpected reply")
        if fields.get("kind") == messages.UNDECIDED:
            raise RestoreUndecidedError(str(why))
        if fields.get("kind") == messages.CORRUPT:
            raise CorruptError(str(why))
        raise KeeperError(f"the keeper refuses ({command}): {why}")

    def _reply(self, kind: type[T], command: str, reply: object) -> T:
        try:
            return read(kind, reply)
        except MessageFormatError as exc:
            self._disconnect()
            raise KeeperError(f"the keeper at {self._path} ({command}): {exc}") from exc

    def _disconnect(self) -> None:
        if self._sock is not None:
            if os.getpid() == self._pid:
                # Forked data loaders have inherited the descriptor, and would keep it open.
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = None


def as_keeper_error(error: CheckpointError) -> KeeperError:
    """Return *error* as a `KeeperError`."""
    return error if isinstance(error, KeeperError) else KeeperError(str(error))


def _set_deadline(sock: socket.socket, end_s: float) -> None:
    sock.settimeout(max(end_s - time.monotonic(), 1e-3))


def _close_fds(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
