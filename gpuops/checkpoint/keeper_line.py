"""The asking side of a keeper's socket: one question at a time, each with a deadline."""

import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpuops.checkpoint import messages
from gpuops.checkpoint.messages import Fields, MessageError
from gpuops.checkpoint.offering import CannotTellError
from gpuops.checkpoint.socket_place import reachable
from gpuops.checkpoint.states import CheckpointError, KeeperError

DEADLINE_S = 30.0
# How much longer than the keeper itself we wait for what it may take its time for.
SLACK_S = 5.0


class KeeperGoneError(KeeperError):
    """Nobody listens there, or no more."""


class KeeperSilentError(KeeperError):
    """It has not answered in the time that there was; the line goes on."""


class KeeperLine:
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
            with reachable(path.parent, path.name) as place:
                sock.connect(place)
        except OSError as exc:
            sock.close()
            if isinstance(exc, TimeoutError):
                raise KeeperError(f"the keeper at {path} takes no connection") from exc
            raise KeeperGoneError(f"no keeper listens at {path}: {exc.strerror or exc}") from exc
        self._sock: socket.socket | None = sock
        self._owed: str | None = None  # what was asked for and has no answer yet

    @property
    def is_open(self) -> bool:
        """Say whether questions can still be asked."""
        return self._sock is not None

    @property
    def pid(self) -> int:
        """The process that listens."""
        size = struct.calcsize("3i")
        with self._lock:
            raw = self._open().getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", raw)[0])

    def ask(
        self, what: str, *, wait_s: float | None = None, **fields: object
    ) -> tuple[Fields, list[int]]:
        """Return the answer's fields, and the descriptors that came with it; those are yours.

        Raises:
            CannotTellError: As the keeper said it.
            KeeperError: It refused, or still owes an answer (the line goes on), or is gone (the
                line is closed).
        """
        with self._lock:
            end_s = time.monotonic() + (self._deadline_s if wait_s is None else wait_s)
            try:
                self._send(what, end_s, fields)
                data, fds = self._receive(what, end_s)
            except TimeoutError as exc:
                self._shut()
                raise KeeperError(
                    f"the keeper at {self._path} does not answer ({what}); is it stopped?"
                ) from exc
            try:
                return self._read(what, data), fds
            except BaseException:  # boundary: nobody else closes them
                _close(fds)
                raise

    def ask_soon(self, what: str, *, wait_s: float, **fields: object) -> Fields:
        """Return the answer's fields, where they come within *wait_s*.

        Where they do not, the keeper owes them: nothing else is asked until `owed` has them.

        Raises:
            KeeperSilentError: They did not, or an answer is owed.
            KeeperError: As for `ask`.
        """
        with self._lock:
            end_s = time.monotonic() + min(wait_s, self._deadline_s)
            try:
                self._send(what, end_s, fields)
                self._owed = what
                return self._answered(what, end_s)
            except TimeoutError as exc:
                raise KeeperSilentError(
                    f"the keeper at {self._path} has not answered yet ({what})"
                ) from exc

    def owed(self, wait_s: float = 0.0) -> tuple[str, Fields] | None:
        """Return what was asked for, and the answer, where one was owed; None where none was.

        Raises:
            KeeperSilentError: It is owed still, after *wait_s*.
            KeeperError: As for `ask`.
        """
        with self._lock:
            what = self._owed
            if what is None:
                return None
            try:
                return what, self._answered(what, time.monotonic() + wait_s)
            except TimeoutError as exc:
                raise KeeperSilentError(
                    f"the keeper at {self._path} has not answered yet ({what})"
                ) from exc

    def tell(self, what: str, **fields: object) -> None:
        """Say something that has no answer; returns as soon as it is on its way.

        Raises:
            KeeperError: The keeper is gone; the line is closed.
        """
        message = {"v": messages.VERSION, "id": 0, "what": what, **fields}
        with self._lock:
            sock = self._open()
            try:
                _until(sock, time.monotonic() + self._deadline_s)
                sock.send(messages.to_bytes(message))
            except OSError as exc:
                self._shut()
                why = "does not answer" if isinstance(exc, TimeoutError) else "is gone"
                raise KeeperGoneError(f"the keeper at {self._path} {why} ({what})") from exc

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._shut()

    def _open(self) -> socket.socket:
        if os.getpid() != self._pid:
            raise KeeperError(
                f"the line to the keeper belongs to process {self._pid}, not to one it forked"
            )
        if self._sock is None:
            raise KeeperGoneError(f"the line to the keeper at {self._path} is closed")
        return self._sock

    def _send(self, what: str, end_s: float, fields: Mapping[str, object]) -> None:
        """Ask; TimeoutError where there is no room for the question."""
        sock = self._open()
        if self._owed is not None:
            raise KeeperSilentError(
                f"the keeper at {self._path} has not answered yet ({self._owed})"
            )
        request = {"v": messages.VERSION, "id": self._number + 1, "what": what, **fields}
        data = messages.to_bytes(request)
        self._number += 1
        _until(sock, end_s)
        try:
            sock.send(data)
        except TimeoutError:
            raise
        except OSError as exc:
            raise self._gone(what, exc) from exc

    def _answered(self, what: str, end_s: float) -> Fields:
        """Return the answer that is owed; TimeoutError where it does not come until *end_s*."""
        data, fds = self._receive(what, end_s)
        self._owed = None
        _close(fds)
        return self._read(what, data)

    def _receive(self, what: str, end_s: float) -> tuple[bytes, list[int]]:
        """Return an answer; TimeoutError where none comes until *end_s*."""
        sock = self._open()
        _until(sock, end_s)
        try:
            data, fds, flags, _ = socket.recv_fds(
                sock, messages.MESSAGE_BYTES_MAX, messages.FDS_MAX
            )
        except TimeoutError:
            raise
        except OSError as exc:
            raise self._gone(what, exc) from exc
        is_cut = bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
        if is_cut or not data:
            _close(fds)
            self._shut()
            why = (
                "its answer was cut short; too many files are open here" if is_cut else "it is gone"
            )
            raise KeeperGoneError(f"the keeper at {self._path} ({what}): {why}")
        return data, fds

    def _gone(self, what: str, error: OSError) -> KeeperGoneError:
        self._shut()
        return KeeperGoneError(
            f"the keeper at {self._path} is gone ({what}): {error.strerror or error}"
        )

    def _read(self, what: str, data: bytes) -> Fields:
        try:
            fields = messages.from_bytes(data)
            if "error" in fields:
                why = fields.text("error", 5000)
                kind = fields.text("kind", 40)
            else:
                # One question is asked at a time: an answer to another is no answer.
                fields.integer("id", self._number, self._number)
                return fields.part("ok")
        except MessageError as exc:
            self._shut()
            raise KeeperError(f"the keeper at {self._path} ({what}): {exc}") from exc
        if kind == "cannot_tell":
            raise CannotTellError(why)
        raise KeeperError(f"the keeper refuses ({what}): {why}")

    def _shut(self) -> None:
        if self._sock is not None:
            if os.getpid() == self._pid:
                # Data loaders that were forked have the descriptor as well, and would hold it open.
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
            self._sock = None


def checked(error: CheckpointError) -> KeeperError:
    """Return *error* as one of the keeper's."""
    return error if isinstance(error, KeeperError) else KeeperError(str(error))


def _until(sock: socket.socket, end_s: float) -> None:
    sock.settimeout(max(end_s - time.monotonic(), 1e-3))


def _close(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
