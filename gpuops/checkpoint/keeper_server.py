"""The keeper's socket: who may connect, how much, and for how long; one thread, no waiting."""

import errno
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuops.checkpoint import messages
from gpuops.checkpoint.keeper_core import Core
from gpuops.checkpoint.keeper_jobs import Waker
from gpuops.checkpoint.keeper_requests import (
    Answer,
    Request,
    Visitor,
    answer,
    kind_of,
    wait_s_max,
)
from gpuops.checkpoint.messages import MessageError
from gpuops.checkpoint.socket_place import reachable
from gpuops.checkpoint.states import CheckpointError

CONNECTIONS_MAX = 1024
# Those that have not said who they are, or only look.
STRANGERS_MAX = 64
STRANGER_S = 10.0
PARTING_S = 5.0
LAST_SAVE_S = 600.0
_BACKLOG = 128
_ACCEPTED_AT_ONCE = 32
_PAUSE_S = 1.0
_TICK_S = 1.0
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger("gpuops.checkpoint.keeper")


class Line:
    """One connection. ``waiting`` is the request that has no answer yet, and since when."""

    def __init__(self, sock: socket.socket, pid: int, now_s: float) -> None:
        self.sock = sock
        self.visitor = Visitor(self)
        self.since_s = now_s
        self.waiting: _Waiting | None = None
        self.is_open = True
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_stranger(self) -> bool:
        """Say whether it is neither a rank's nor the agent's."""
        return self.visitor.role in ("", "probe")

    def close(self) -> None:
        # The server releases the descriptor, once nothing refers to its number any more.
        self.is_open = False
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def send(self, number: object, what: Answer | CheckpointError) -> None:
        """Send an answer; a peer that takes none of it is cut off. Number 0 wants none."""
        fds = what.fds if isinstance(what, Answer) else ()
        try:
            if number != 0:
                socket.send_fds(self.sock, [_message(number, what)], fds)
            elif not isinstance(what, Answer):
                _log.warning("pid %d: %s", self.pid, what)
        except (OSError, MessageError) as exc:
            _log.warning("pid %d cannot be answered: %s", self.pid, exc)
            self.close()
        finally:
            for fd in fds:
                os.close(fd)


def _message(number: object, what: Answer | CheckpointError) -> bytes:
    message: dict[str, object] = {"v": messages.VERSION, "id": number}
    if isinstance(what, Answer):
        message["ok"] = what.ok
    else:
        message |= {"error": str(what)[:4000], "kind": kind_of(what)}
    return messages.to_bytes(message)


@dataclass(frozen=True, slots=True)
class _Waiting:
    number: object
    request: Request
    since_s: float
    wait_s: float


class KeeperServer:
    """Serves *core* on a socket in *folder* until nobody needs it.

    Nobody does when neither an agent nor a rank has been connected for *lease_s* seconds.
    *deliver* is called each time *waker* was woken.
    """

    def __init__(
        self,
        core: Core,
        folder: Path,
        *,
        lease_s: float,
        clock_s: Callable[[], float] = time.monotonic,
        waker: Waker,
        deliver: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = core
        self.lease_s = lease_s
        self.is_parting = False
        self._clock_s = clock_s
        self._deliver = deliver
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Line] = {}
        self._alone_since_s = clock_s()
        self._paused_until_s: float | None = None
        self._listener = _listen(folder)
        self._waker = waker
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(waker, selectors.EVENT_READ, waker.drain)

    def part(self) -> None:
        """End soon after the last agent and rank: a signal to a whole job must not take its state.

        The agent, which has the same signal, has the newest state persisted first.
        """
        self.is_parting = True
        self._waker.wake()

    def serve(self) -> None:
        """Return when nobody needs the keeper any more."""
        while not self.core.is_ending and not self._is_over():
            for key, _events in self._selector.select(_TICK_S):
                key.data()
            self._deliver()
            self._look_round()
        _log.info("the keeper ends")

    def close(self) -> None:
        """Close all connections."""
        for line in list(self._lines.values()):
            self._drop(line)
        self._listener.close()
        self._selector.close()

    def _is_over(self) -> bool:
        """Say whether nobody was here for long enough; a last state is persisted before."""
        now_s = self._clock_s()
        if any(not line.is_stranger for line in self._lines.values()):
            self._alone_since_s = now_s
            return False
        alone_s = now_s - self._alone_since_s
        if self.is_parting:
            return alone_s >= min(PARTING_S, self.lease_s)
        if alone_s < self.lease_s:
            return False
        return not self._is_saving_the_last() or alone_s >= self.lease_s + LAST_SAVE_S

    def _is_saving_the_last(self) -> bool:
        """Persist what would be gone with us; say whether that is under way."""
        persister, newest = self.core.persister, self.core.memory.gate.newest
        if newest is None or persister.schedule.has(newest) or persister.failure:
            return False
        persister.is_flushing = True
        persister.persist_if_due()
        return persister.schedule.busy_with is not None

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _FULL:
                    # It would be ready again at once, for as long as there is no room.
                    self._selector.unregister(self._listener)
                    self._paused_until_s = self._clock_s() + _PAUSE_S
                    _log.warning("no connection can be taken just now: %s", exc)
                return
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pid, uid = _peer(sock)
        line = Line(sock, pid, self._clock_s())
        n_strangers = sum(other.is_stranger for other in self._lines.values())
        why = ""
        if uid not in (os.geteuid(), 0):
            why = f"this keeper serves uid {os.geteuid()}, not {uid}"
        elif n_strangers >= STRANGERS_MAX or len(self._lines) >= CONNECTIONS_MAX:
            why = f"too many connections: {len(self._lines)}, {n_strangers} without a hello"
        if why:
            line.send(None, MessageError(why))
            sock.close()
            return
        self._lines[sock.fileno()] = line
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(line))

    def _read(self, line: Line) -> None:
        if not line.is_open:
            return
        try:
            data = messages.receive(line.sock)
            if not data or line.waiting is not None:
                # Gone; or it does not wait for its answers, which no client of ours does.
                self._drop(line)
                return
            fields = messages.from_bytes(data)
            number = fields.integer("id", 0, messages.ID_MAX)
            request = Request(line.visitor, fields.text("what", 40), fields)
            wait_s = wait_s_max(request)
        except BlockingIOError:
            return
        except OSError:
            self._drop(line)
            return
        except MessageError as exc:
            line.send(None, exc)
            self._drop(line)
            return
        if not self._answer(line, number, request):
            line.waiting = _Waiting(number, request, self._clock_s(), wait_s)

    def _answer(self, line: Line, number: object, request: Request) -> bool:
        """Answer *request* where it can be answered by now; say whether it was."""
        try:
            found = answer(self.core, request)
        except CheckpointError as exc:
            line.send(number, exc)
            return True
        except Exception as exc:  # noqa: BLE001 boundary: a bug must not cost the node its states
            _log.error("%s of pid %d failed", request.what, line.pid, exc_info=exc)
            line.send(number, CheckpointError(f"the keeper failed: {exc!r}"))
            return True
        if found is None:
            return False
        line.send(number, found)
        return True

    def _look_round(self) -> None:
        """Answer what can be answered by now; drop who is gone or has said nothing for too long."""
        now_s = self._clock_s()
        self.core.tick()
        for line in list(self._lines.values()):
            waiting = line.waiting
            if line.is_open and waiting is not None:
                self._answer_again(line, waiting, now_s)
            is_brief = line.visitor.role == "probe" or (not line.visitor.role and not waiting)
            if not line.is_open or (is_brief and now_s - line.since_s > STRANGER_S):
                self._drop(line)
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _answer_again(self, line: Line, waiting: _Waiting, now_s: float) -> None:
        waited_s = now_s - waiting.since_s
        old = waiting.request
        line.waiting = None
        if waited_s > waiting.wait_s:
            why = f"{old.what} was not done within {waiting.wait_s:g} s"
            line.send(waiting.number, CheckpointError(why))
            return
        request = Request(old.visitor, old.what, old.fields, waited_s)
        if not self._answer(line, waiting.number, request):
            line.waiting = waiting

    def _drop(self, line: Line) -> None:
        fd = line.sock.fileno()
        if self._lines.get(fd) is line:
            del self._lines[fd]
            self._selector.unregister(fd)
        line.close()
        line.sock.close()
        self.core.lost(line)


def _listen(folder: Path) -> socket.socket:
    """Return a socket that listens in *folder*, in place of what a dead keeper left there.

    Raises:
        OSError: It cannot be had.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with reachable(folder) as place:
            with suppress(FileNotFoundError):
                os.unlink(place)  # noqa: PTH108 a path under /proc/self/fd
            sock.bind(place)
            os.chmod(place, 0o600)  # noqa: PTH101 likewise
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other side (SO_PEERCRED, unix(7))."""
    size = struct.calcsize("3i")
    pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, uid
