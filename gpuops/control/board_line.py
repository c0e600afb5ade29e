"""One line from a client to a board's server: opened when needed, dropped at the first doubt.

A line asks one thing at a time. After a deadline, a broken frame or an exception it is closed, so
no late answer is ever taken for the next one's; the server forgets what such a line still held as
soon as the client calls again.
"""

import ipaddress
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuops.control import board_wire as wire
from gpuops.control.board import BoardError, BoardUnreachableError
from gpuops.control.board_wire import How, Request
from gpuops.control.turns import Turns
from gpuops.host import job_proof as proof
from gpuops.host.frames import WireError, framed, take_frame
from gpuops.host.job_proof import Channel, Handshake, Welcome

PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
_CHUNK = 2**18

Address = tuple[socket.AddressFamily, tuple[object, ...]]
_WHY = {
    Welcome.OTHER_JOB: "it belongs to another run (--rdzv-id)",
    Welcome.WRONG_TOKEN: "it has another token",
}


class StrangeServerError(BoardError):
    """What listens there is no board of ours, or one of another run or token."""


class OtherRunError(StrangeServerError):
    """What listens there is the board of another run, which may be at its end."""


class Line:
    """A connection that renews itself. Several threads may ask; they take turns, as they came.

    *on_open* is given our own address and the server's instance each time that it is opened; what
    it raises is raised.
    """

    def __init__(
        self,
        place: tuple[str, int],
        hello: Callable[[], wire.Hello],
        key: bytes,
        on_open: Callable[[str, str], None],
    ) -> None:
        self._place = place
        self._hello = hello
        self._key = key
        self._on_open = on_open
        self._turns = Turns()
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._number = 0
        self._out = self._in = Channel(b"")

    def ask(self, build: Callable[[int, float], Request], end_s: float) -> tuple[How, bytes]:
        """Return the answer to what *build* makes of a number and the time of this try.

        It is asked again while it fails, up to *end_s* (monotonic).

        Raises:
            BoardUnreachableError: No answer until *end_s*, or the line was closed.
            StrangeServerError: See there.
            BoardError: The server refuses the request.
        """
        with self._turns.taken(max(end_s - time.monotonic(), 0.0)) as is_ours:
            if not is_ours:
                raise self._unreachable("an earlier call still waits for its answer")
            how, payload = self._ask_until(build, end_s)
        if how is How.REFUSED:
            raise BoardError(payload.decode("utf-8", errors="replace")[:500])
        return how, payload

    def close(self) -> None:
        """Close it for good; a call that waits for an answer ends."""
        self._closed.set()
        line = self._socket
        if line is not None:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        with self._turns.taken(1.0) as is_ours:
            if is_ours:
                self._drop()

    def _ask_until(self, build: Callable[[int, float], Request], end_s: float) -> tuple[How, bytes]:
        pause_s = PAUSE_MIN_S
        while True:
            if self._closed.is_set():
                raise self._unreachable("this handle is closed")
            try:
                return self._try(build, end_s)
            except (OSError, WireError) as exc:
                # Jitter: the agents of a whole cluster must not all come back at the same moment.
                wait_s = pause_s * random.uniform(0.5, 1.5)  # noqa: S311 no secret
                if time.monotonic() + wait_s >= end_s:
                    raise self._unreachable(_told(exc)) from exc
            self._closed.wait(wait_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _try(self, build: Callable[[int, float], Request], end_s: float) -> tuple[How, bytes]:
        is_whole = False
        try:
            if self._socket is None:
                self._open(end_s)
            self._number += 1
            request = build(self._number, time.monotonic())
            self._ready(end_s).sendall(self._out.frame(request.to_bytes()))
            message = self._in.message(self._receive(wire.FRAME_BYTES_MAX, end_s))
            number, how, payload = wire.read_answer(message)
            if number != self._number:
                raise WireError("the answer to another request")
            is_whole = True
        finally:
            # Also after an exception that a signal handler raised here: half an answer may be left.
            if not is_whole:
                self._drop()
        return how, payload

    def _open(self, end_s: float) -> None:
        self._socket = _connect(self._place, end_s)
        hello = self._hello()
        sent = hello.to_bytes()
        self._ready(end_s).sendall(framed(sent))
        got = self._receive_opening(end_s)
        try:
            challenge = wire.Challenge.from_bytes(got)
        except WireError:
            self._refused(got)
            raise
        shake = Handshake(self._key, sent + got)
        self._ready(end_s).sendall(framed(shake.proof("client")))
        got = self._receive_opening(end_s)
        self._refused(got)
        if not proof.same(proof.read_welcome(got)[1], shake.proof("server")):
            raise self._strange("it does not know the job's token")
        self._out, self._in = shake.channel("client"), shake.channel("server")
        self._on_open(str(self._socket.getsockname()[0]), challenge.instance.hex())

    def _refused(self, got: bytes) -> None:
        """Raise what the server's word, if it is one, says against us."""
        try:
            code, _proof = proof.read_welcome(got)
        except WireError as exc:
            raise self._strange("it is not a board of gpuops") from exc
        if code in _WHY:
            kind = OtherRunError if code is Welcome.OTHER_JOB else StrangeServerError
            raise self._strange(_WHY[code], kind)
        if code is Welcome.BUSY:
            raise ConnectionRefusedError("it has too many connections")

    def _receive_opening(self, end_s: float) -> bytes:
        try:
            return self._receive(wire.OPENING_BYTES_MAX, end_s)
        except WireError as exc:
            raise self._strange("it is not a board of gpuops") from exc

    def _receive(self, bytes_max: int, end_s: float) -> bytes:
        while (body := take_frame(self._buffer, bytes_max)) is None:
            chunk = self._ready(end_s).recv(_CHUNK)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            self._buffer += chunk
        return body

    def _ready(self, end_s: float) -> socket.socket:
        left_s = end_s - time.monotonic()
        if self._socket is None or self._closed.is_set():
            raise ConnectionResetError("the connection was closed")
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left_s)
        return self._socket

    def _drop(self) -> None:
        line, self._socket = self._socket, None
        self._buffer.clear()
        if line is not None:
            line.close()

    def _unreachable(self, why: str) -> BoardUnreachableError:
        return BoardUnreachableError(f"the board at {shown(self._place)} does not answer: {why}")

    def _strange(
        self, why: str, kind: type[StrangeServerError] = StrangeServerError
    ) -> StrangeServerError:
        return kind(f"what answers at {shown(self._place)} is not the board of this run: {why}")


def shown(place: tuple[str, int]) -> str:
    """Return *place* as people write it."""
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _told(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return getattr(exc, "strerror", None) or str(exc)


def _connect(place: tuple[str, int], end_s: float) -> socket.socket:
    addresses = resolve(*place, end_s)
    failed: OSError = OSError(f"{place[0]} has no address")
    for tried, (family, address) in enumerate(addresses):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        line = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A silent address leaves time for the others.
            line.settimeout(left_s / (len(addresses) - tried))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.connect(address)
        except OSError as exc:
            line.close()
            failed = exc
        else:
            return line
    raise failed


def resolve(host: str, port: int, end_s: float) -> Sequence[Address]:
    """Return the addresses of *host*; a name server that does not answer costs *end_s* at most.

    Raises:
        OSError: No such name, or no answer in time.
    """
    if is_literal(host):
        return _look_up(host, port)
    found: list[Sequence[Address] | OSError] = []

    def look_up() -> None:
        try:
            found.append(_look_up(host, port))
        except (OSError, UnicodeError) as exc:
            found.append(exc if isinstance(exc, OSError) else OSError(str(exc)))

    # getaddrinfo takes no deadline.
    thread = threading.Thread(target=look_up, name="gpuops-resolve", daemon=True)
    thread.start()
    thread.join(max(end_s - time.monotonic(), 0.0))
    if not found:
        raise TimeoutError(f"no name server told the address of {host}")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def is_literal(host: str) -> bool:
    """Say whether *host* is an address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(host: str, port: int) -> Sequence[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _type, _proto, _name, address in found]
