"""The asking side of a keeper's socket: one request at a time, each with a deadline."""

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
from gpuops.checkpoint.types import CheckpointError, KeeperError, RestoreUndecidedError
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

    The address of a socket has 107 bytes at most (unix(7)), which the folders of a run exceed.

    Raises:
        OSError: The folder cannot be opened.
    """
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


DEADLINE_S = 30.0
# How much longer than the keeper itself we wait for what it may take its time for.
SLACK_S = 5.0


class KeeperGoneError(KeeperError):
    """Nobody listens there, or no more."""


class KeeperTimeoutError(KeeperError):
    """It has not answered in the time that there was; the line goes on."""


class KeeperConnection:
    """A connection to the keeper at *path*; safe from several threads, which take turns.

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
                raise KeeperError(f"the keeper at {path} takes no connection") from exc
            raise KeeperGoneError(f"no keeper listens at {path}: {exc.strerror or exc}") from exc
        self._sock: socket.socket | None = sock
        self._awaited: str | None = None  # what was asked for and has no answer yet

    @property
    def is_open(self) -> bool:
        """Say whether questions can still be asked."""
        return self._sock is not None

    @property
    def pid(self) -> int:
        """The process that listens."""
        size = struct.calcsize("3i")
        with self._lock:
            raw = self._connected_socket().getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", raw)[0])

    def call(
        self, kind: type[T], command: str, *, wait_s: float | None = None, **fields: object
    ) -> T:
        """Return the reply, which is of *kind*.

        Raises:
            RestoreUndecidedError: As the keeper said it.
            KeeperError: It refused, or still owes an answer (the line goes on), or is gone (the
                line is closed).
        """
        reply, fds = self.call_for_fds(kind, command, wait_s=wait_s, **fields)
        _close_fds(fds)
        return reply

    def call_for_fds(
        self, kind: type[T], command: str, *, wait_s: float | None = None, **fields: object
    ) -> tuple[T, list[int]]:
        """Return the reply as `call` does, and the descriptors beside it; those are yours."""
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
            except BaseException:  # boundary: nobody else closes them
                _close_fds(fds)
                raise

    def call_within(self, kind: type[T], command: str, *, wait_s: float, **fields: object) -> T:
        """Return the reply, where it comes within *wait_s*.

        Where it does not, the keeper owes it: nothing else is asked until `late_reply` has it.

        Raises:
            KeeperTimeoutError: It did not, or a reply is owed.
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
        """Take in the reply that is owed, if any, and return it where it is one to *command*.

        Raises:
            KeeperTimeoutError: It is owed still, after *wait_s*.
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
        """Say something that has no answer; returns as soon as it is on its way.

        Raises:
            KeeperError: The keeper is gone; the line is closed.
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
        """Hang up."""
        with self._lock:
            self._disconnect()

    def _connected_socket(self) -> socket.socket:
        if os.getpid() != self._pid:
            raise KeeperError(
                f"the line to the keeper belongs to process {self._pid}, not to one it forked"
            )
        if self._sock is None:
            raise KeeperGoneError(f"the line to the keeper at {self._path} is closed")
        return self._sock

    def _send(self, command: str, end_s: float, fields: Mapping[str, object]) -> None:
        """Ask; TimeoutError where there is no room for the question."""
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
        """Return the answer that is owed; TimeoutError where it does not come until *end_s*."""
        data, fds = self._receive(command, end_s)
        self._awaited = None
        _close_fds(fds)
        return self._read(command, data)

    def _receive(self, command: str, end_s: float) -> tuple[bytes, list[int]]:
        """Return an answer; TimeoutError where none comes until *end_s*."""
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
                "its answer was cut short; too many files are open here" if is_cut else "it is gone"
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
            # One question is asked at a time: an answer to another is no answer.
            self._disconnect()
            raise KeeperError(f"the keeper at {self._path} ({command}) answers something else")
        if fields.get("kind") == messages.UNDECIDED:
            raise RestoreUndecidedError(str(why))
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
                # Data loaders that were forked have the descriptor as well, and would hold it open.
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = None


def as_keeper_error(error: CheckpointError) -> KeeperError:
    """Return *error* as one of the keeper's."""
    return error if isinstance(error, KeeperError) else KeeperError(str(error))


def _set_deadline(sock: socket.socket, end_s: float) -> None:
    sock.settimeout(max(end_s - time.monotonic(), 1e-3))


def _close_fds(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
