"""The agent's window: ``/healthz``, ``/state`` and ``/metrics`` over HTTP, for reading only.

Whoever can reach it is a stranger: the size of a request, the time it may take and the number of
connections are bounded before anything is parsed. On loopback the Host header must name this
machine, so that a web page cannot read the state through a browser here (DNS rebinding).
"""

import contextlib
import ipaddress
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from socketserver import TCPServer
from typing import Any, Self

from gpuops.agent.status.metrics import metrics
from gpuops.agent.status.state import SCHEMA, AgentState, state_json, why_unhealthy
from gpuops.host.clock import Clock, SystemClock
from gpuops.model import Json, envelope
from gpuops.scrub import scrub_value

log = logging.getLogger(__name__)

HEAD_BYTES_MAX = 8192
REQUEST_S = 5.0  # for the whole of a request's head, however slowly it drips in
CONNECTIONS_MAX = 8
_END = b"\r\n\r\n"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"

ReadState = Callable[[], AgentState]


class AgentServer:
    """Serves the state that *read_state* returns, from threads of its own."""

    def __init__(
        self,
        address: str,
        port: int,
        read_state: ReadState,
        *,
        clock: Clock | None = None,
        request_s: float = REQUEST_S,
    ) -> None:
        self._address = address
        self._port = port
        self._read_state = read_state
        self._clock = clock or SystemClock()
        self._request_s = request_s
        self._server: _Server | None = None

    @property
    def port(self) -> int | None:
        """Return the port that is listened on, None where nothing listens."""
        return None if self._server is None else int(self._server.server_address[1])

    def start(self) -> Self:
        """Begin to listen. A port or an address that cannot be had is a warning and no more."""
        try:
            self._server = _Server(self._address, self._port, self._answer, self._request_s)
        except (OSError, ValueError, OverflowError) as exc:
            log.warning(
                "no /healthz, /state and /metrics: cannot listen on %s port %s: %s",
                self._address,
                self._port,
                exc,
            )
            return self
        threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},
            name="gpuops-http",
            daemon=True,
        ).start()
        return self

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Return what *path* is answered with."""
        if path not in ("/healthz", "/state", "/metrics"):
            return HTTPStatus.NOT_FOUND, _TEXT, b"/healthz, /state or /metrics\n"
        state, now_ns = self._read_state(), self._clock.mono_ns()
        if path == "/metrics":
            return HTTPStatus.OK, _METRICS, metrics(state, now_ns)
        if path == "/state":
            return HTTPStatus.OK, "application/json", _json(state_json(state, now_ns))
        reasons = why_unhealthy(state, now_ns)
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return status, _TEXT, "".join(f"{line}\n" for line in reasons or ["ok"]).encode()


def _json(body: Json) -> bytes:
    told: Any = scrub_value(body)
    return json.dumps(envelope(SCHEMA, told)).encode() + b"\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        address: str,
        port: int,
        answer: Callable[[str], tuple[HTTPStatus, str, bytes]],
        request_s: float,
    ) -> None:
        self.answer = answer
        self.request_s = request_s
        self.places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.is_loopback = ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def server_bind(self) -> None:
        # HTTPServer's own would ask a name server for this machine's name, for seconds at worst.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 as in socketserver
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002
        log.debug("an HTTP request could not be answered: %r", sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "gpuops"
    sys_version = ""

    def handle(self) -> None:
        head = self._head()
        if head is None:
            return
        self.rfile = BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            return
        self.close_connection = True
        if self.command != "GET":
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"GET only\n")
        elif self.server.is_loopback and not _names_loopback(self.headers.get("Host")):
            self._send(HTTPStatus.FORBIDDEN, _TEXT, b"this address is for this machine only\n")
        else:
            self._send(*self._answer(self.path.partition("?")[0]))

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        try:
            return self.server.answer(path)
        except Exception as exc:  # noqa: BLE001 boundary: our bug is told, and ends nothing
            log.debug("%s could not be answered: %r", path, exc)
            return HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, b"a bug in gpuops\n"

    def _head(self) -> bytes | None:
        """Return the head of the request, None for one that is too long, too slow or cut off."""
        until_s = time.monotonic() + self.server.request_s
        head = b""
        while _END not in head:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or len(head) > HEAD_BYTES_MAX:
                return None
            self.connection.settimeout(left_s)
            try:
                data = self.connection.recv(HEAD_BYTES_MAX)
            except OSError:
                return None
            if not data:
                return None
            head += data
        self.connection.settimeout(self.server.request_s)
        return head if head.index(_END) <= HEAD_BYTES_MAX else None

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 http.server's names
        log.debug(format, *args)


def _names_loopback(host: str | None) -> bool:
    """Say whether a Host header names this machine itself."""
    if not host:
        return False
    name = host.strip()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
