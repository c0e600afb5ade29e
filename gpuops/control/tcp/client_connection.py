"""A client's connection to a control store's server: opened when needed, dropped at any error.

A line asks one thing at a time. After a deadline, a broken frame or an exception it is used no
more, so no late answer is ever taken for the next one's; the server forgets what such a line still
held as soon as the client calls again. Until then it stays open: the server takes a client that
closes its connection and opens no other for dead.
"""

import ipaddress
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuops.control.fair_lock import FairLock
from gpuops.control.store import (
    CLOSED_FENCE_S,
    ControlStoreError,
    ControlStoreUnreachableError,
    OtherTokenError,
)
from gpuops.control.tcp import wire
from gpuops.control.tcp.wire import ControlRequest, ReplyKind
from gpuops.host.net import job_proof as proof
from gpuops.host.net.frames import WireError, framed, take_frame
from gpuops.host.net.job_proof import JobHandshake, ProofChannel, ProofWelcome

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
# While there is still time to come back before the server takes this client for dead.
BACKOFF_CLOSED_MAX_S = 0.2
_CHUNK = 2**18

SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]


class WrongServerError(ControlStoreError):
    """What listens there is not a gpuops control store, or that of another run."""


class OtherRunError(WrongServerError):
    """What listens there is the control store of another run, which may be at its end."""


_WELCOME_ERRORS: dict[ProofWelcome, tuple[type[ControlStoreError], str]] = {
    ProofWelcome.OTHER_JOB: (OtherRunError, "it belongs to another run (--rdzv-id)"),
    ProofWelcome.WRONG_TOKEN: (OtherTokenError, "it has another token"),
}


class ControlConnection:
    """A connection that renews itself. Several threads may ask; they take turns, as they came.

    *on_open* is given our own address and the server's instance each time that it is opened; what
    it raises is raised.
    """

    def __init__(
        self,
        address: tuple[str, int],
        make_hello: Callable[[], wire.ControlHello],
        key: bytes,
        on_open: Callable[[str, str], None],
    ) -> None:
        self._address = address
        self._make_hello = make_hello
        self._key = key
        self._on_open = on_open
        self._lock = FairLock()
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._opened = OpenedSocket()
        self._buffer = bytearray()
        self._number = 0
        self._out = self._in = ProofChannel(b"")

    def request(
        self, build_request: Callable[[int, float], ControlRequest], end_s: float
    ) -> tuple[ReplyKind, bytes]:
        """Return the answer to what *build_request* makes of a number and the time of this try.

        It is asked again while it fails, up to *end_s* (monotonic).

        Raises:
            ControlStoreUnreachableError: No answer until *end_s*, or the line was closed.
            WrongServerError, OtherTokenError: See there.
            ControlStoreError: The server refuses the request.
        """
        with self._lock.acquire(max(end_s - time.monotonic(), 0.0)) as acquired:
            if not acquired:
                raise self._unreachable_error("an earlier call still waits for its answer")
            self._opened.forget_outage()
            kind, payload = self._request_until(build_request, end_s)
        if kind is ReplyKind.REFUSED:
            raise ControlStoreError(payload.decode("utf-8", errors="replace")[:500])
        return kind, payload

    def closed_s(self) -> float:
        """Return for how long the other side had closed it, or has, since the last request."""
        return self._opened.closed_s(time.monotonic())

    def close(self) -> None:
        """Close it for good; a call that waits for an answer ends."""
        self._closed.set()
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock.acquire(1.0) as acquired:
            if acquired:
                self._disconnect()
                self._opened.close()

    def _request_until(
        self, build_request: Callable[[int, float], ControlRequest], end_s: float
    ) -> tuple[ReplyKind, bytes]:
        backoff_s, why = BACKOFF_MIN_S, ""
        while True:
            if self._closed.is_set():
                raise self._unreachable_error("this handle is closed")
            has_time = time.monotonic() < end_s
            try:
                return self._try(build_request, end_s)
            except (OSError, WireError) as exc:
                # A try that began too late says nothing of the server; the one before did.
                why = _error_text(exc) if has_time or not why else why
                # Jitter: the agents of a whole cluster must not all come back at the same moment.
                wait_s = backoff_s * random.uniform(0.5, 1.5)  # noqa: S311 no secret
                if time.monotonic() + wait_s >= end_s:
                    raise self._unreachable_error(why) from exc
            self._closed.wait(wait_s)
            is_urgent = 0 < self.closed_s() < CLOSED_FENCE_S
            backoff_s = min(2 * backoff_s, BACKOFF_CLOSED_MAX_S if is_urgent else BACKOFF_MAX_S)

    def _try(
        self, build_request: Callable[[int, float], ControlRequest], end_s: float
    ) -> tuple[ReplyKind, bytes]:
        is_complete = False
        try:
            if self._socket is None:
                self._connect(end_s)
            self._number += 1
            request = build_request(self._number, time.monotonic())
            self._ready_socket(end_s).sendall(self._out.frame(request.to_bytes()))
            message = self._in.message(self._receive(wire.FRAME_BYTES_MAX, end_s))
            number, kind, payload = wire.unpack_reply(message)
            if number != self._number:
                raise WireError("the answer to another request")
            is_complete = True
        finally:
            # Also after an exception that a signal handler raised here: half an answer may be left.
            if not is_complete:
                self._disconnect()
        return kind, payload

    def _connect(self, end_s: float) -> None:
        self._socket = _open_socket(self._address, end_s)
        hello = self._make_hello()
        sent = hello.to_bytes()
        self._ready_socket(end_s).sendall(framed(sent))
        received = self._receive_handshake(end_s)
        try:
            challenge = wire.ControlChallenge.from_bytes(received)
        except WireError:
            self._raise_if_refused(received)
            raise
        handshake = JobHandshake(self._key, sent + received)
        self._ready_socket(end_s).sendall(framed(handshake.proof("client")))
        received = self._receive_handshake(end_s)
        self._raise_if_refused(received)
        if not proof.same(proof.read_welcome(received)[1], handshake.proof("server")):
            raise self._wrong_server_error("it does not know the job's token")
        self._out, self._in = handshake.channel("client"), handshake.channel("server")
        self._opened.replace(self._socket, time.monotonic())
        self._on_open(str(self._socket.getsockname()[0]), challenge.instance.hex())

    def _raise_if_refused(self, received: bytes) -> None:
        """Raise what the server answered, where that is an error."""
        try:
            code, _proof = proof.read_welcome(received)
        except WireError as exc:
            raise self._wrong_server_error("it is not a gpuops control store") from exc
        if code in _WELCOME_ERRORS:
            kind, why = _WELCOME_ERRORS[code]
            raise self._wrong_server_error(why, kind)
        if code is ProofWelcome.BUSY:
            raise ConnectionRefusedError("it has too many connections")

    def _receive_handshake(self, end_s: float) -> bytes:
        try:
            return self._receive(wire.HANDSHAKE_BYTES_MAX, end_s)
        except WireError as exc:
            raise self._wrong_server_error("it is not a gpuops control store") from exc

    def _receive(self, bytes_max: int, end_s: float) -> bytes:
        while (body := take_frame(self._buffer, bytes_max)) is None:
            chunk = self._ready_socket(end_s).recv(_CHUNK)
            if not chunk:
                raise ConnectionResetError("the connection was closed")
            self._buffer += chunk
        return body

    def _ready_socket(self, end_s: float) -> socket.socket:
        left_s = end_s - time.monotonic()
        if self._socket is None or self._closed.is_set():
            raise ConnectionResetError("the connection was closed")
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left_s)
        return self._socket

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        self._buffer.clear()
        if connection is not None and not self._opened.holds(connection):
            connection.close()

    def _unreachable_error(self, why: str) -> ControlStoreUnreachableError:
        return ControlStoreUnreachableError(
            f"the control store at {format_address(self._address)} does not answer: {why}"
        )

    def _wrong_server_error(
        self, why: str, kind: type[ControlStoreError] = WrongServerError
    ) -> ControlStoreError:
        return kind(
            f"what answers at {format_address(self._address)} is not the control store of the run: "
            f"{why}"
        )


class OpenedSocket:
    """The newest connection that the server has accepted, and whether the server's side is closed.

    It is asked by the thread that watches over the workers, whatever the others wait for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._seen_open_s = 0.0
        self._closed_since_s: float | None = None
        self._outage_s = 0.0  # that has ended since the last request

    def holds(self, connection: socket.socket) -> bool:
        """Say whether *connection* is this one."""
        return connection is self._socket

    def replace(self, connection: socket.socket, now_s: float) -> None:
        """Take *connection*, which the server has just accepted, in place of the one before."""
        with self._lock:
            self._outage_s = max(self._outage_s, self._closed_s(now_s))
            previous, self._socket = self._socket, connection
            self._seen_open_s, self._closed_since_s = now_s, None
            if previous is not None:
                previous.close()

    def forget_outage(self) -> None:
        """Count an outage that is over no more."""
        with self._lock:
            self._outage_s = 0.0

    def closed_s(self, now_s: float) -> float:
        """Return for how long it was or has been closed."""
        with self._lock:
            return max(self._outage_s, self._closed_s(now_s))

    def close(self) -> None:
        """Close it for good."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket, self._closed_since_s = None, None

    def _closed_s(self, now_s: float) -> float:
        if self._socket is None:
            return 0.0
        if self._closed_since_s is None:
            if not _is_hung_up(self._socket):
                self._seen_open_s = now_s
                return 0.0
            # It may have been closed while this process was frozen.
            self._closed_since_s = self._seen_open_s
        return now_s - self._closed_since_s


def _is_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def format_address(address: tuple[str, int]) -> str:
    """Return *address* as people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _error_text(exc: Exception) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return getattr(exc, "strerror", None) or str(exc)


def _open_socket(address: tuple[str, int], end_s: float) -> socket.socket:
    addresses = resolve(*address, end_s)
    failed: OSError = OSError(f"{address[0]} has no address")
    for tried, (family, socket_address) in enumerate(addresses):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A silent address leaves time for the others.
            connection.settimeout(left_s / (len(addresses) - tried))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(socket_address)
        except OSError as exc:
            connection.close()
            failed = exc
        else:
            return connection
    raise failed


def resolve(host: str, port: int, end_s: float) -> Sequence[SocketAddress]:
    """Return the addresses of *host*; a name server that does not answer costs *end_s* at most.

    Raises:
        OSError: No such name, or no answer in time.
    """
    if is_literal(host):
        return _getaddrinfo(host, port)
    found: list[Sequence[SocketAddress] | OSError] = []

    def look_up() -> None:
        try:
            found.append(_getaddrinfo(host, port))
        except (OSError, UnicodeError) as exc:
            found.append(exc if isinstance(exc, OSError) else OSError(str(exc)))

    # getaddrinfo takes no deadline.
    thread = threading.Thread(target=look_up, name="gpuops-resolve", daemon=True)
    thread.start()
    thread.join(max(end_s - time.monotonic(), 0.0))
    if not found:
        raise TimeoutError(f"no name server answered for {host}")
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


def _getaddrinfo(host: str, port: int) -> Sequence[SocketAddress]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _type, _proto, _name, address in found]


RESOLVE_TIMEOUT_S = 5.0
_DISCARD_PORT = 9
_LOCAL_NAMES = ("localhost", "ip6-localhost")


def is_local(host: str, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> bool:
    """Say whether *host* (a name or an address) is an address of this machine.

    False where no name server knows it.
    """
    return bool(_local_addresses(host, timeout_s))


def listen_address(host: str, *, timeout_s: float = RESOLVE_TIMEOUT_S) -> str:
    """Return the address to listen on so that others reach us as *host*.

    Debian's ``/etc/hosts`` gives a machine's own name the address 127.0.1.1, where others do not
    come: every address then, guarded by the job's token.

    Raises:
        OSError: *host* is no address of this machine.
    """
    local = _local_addresses(host, timeout_s)
    if not local:
        raise OSError(f"{host} is no address of this machine")
    if is_literal(host) or host in _LOCAL_NAMES:
        return local[0]
    reachable = [address for address in local if not ipaddress.ip_address(address).is_loopback]
    return reachable[0] if reachable else "::" if ":" in local[0] else "0.0.0.0"  # noqa: S104 see above


def _local_addresses(host: str, timeout_s: float) -> list[str]:
    try:
        found = resolve(host, 0, time.monotonic() + timeout_s)
    except OSError:
        return []
    return [str(address[1][0]) for address in found if _is_local_address(address)]


def _is_local_address(address: SocketAddress) -> bool:
    family, (host, _port, *rest) = address
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0, *rest))
    except OSError:
        return False
    plain = ipaddress.ip_address(str(host).partition("%")[0])
    if plain.is_unspecified or plain.is_loopback:
        return True
    # Machines with floating addresses (ip_nonlocal_bind) bind any; but the way to an address of
    # another machine begins at one of ours. Nothing is sent.
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT, *rest))
        return bool(probe.getsockname()[0] == host)
    return False
