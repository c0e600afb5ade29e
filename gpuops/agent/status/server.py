"""``/healthz``, ``/state`` and ``/metrics`` of an agent over HTTP, read-only.

Clients are not authenticated: the size of a request, the time it may take and the number of
connections are bounded before anything is parsed. A new connection takes the place of the oldest,
so that slow ones keep nobody out. On loopback the Host header must name this machine, so that a web
page cannot read the state through a browser here (DNS rebinding), and ``/state``, which has the
run's id and the last words of workers, is for the user of the run and root.

Names and labels of metrics are a contract. Labels are bounded: ranks of this node, classes of
failures, the phases of a run.
"""

import contextlib
import ipaddress
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from socketserver import TCPServer
from typing import Any, Self

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpuops.agent.status.state import (
    RANKS_MAX,
    SCHEMA,
    SKIP_REASONS_MAX,
    AgentState,
    state_json,
    why_unhealthy,
)
from gpuops.control.record import RunPhase
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.net.peer import peer_uid
from gpuops.model import Json, envelope
from gpuops.scrub import scrub_value
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

_CLASSES_MAX = 100
HEAD_BYTES_MAX = 8192
REQUEST_S = 5.0  # for the complete head of a request, however slowly it arrives
CONNECTIONS_MAX = 8
_END = b"\r\n\r\n"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
ReadState = Callable[[], AgentState]


class _State(Collector):
    """One state; ages are computed at *now_ns*."""

    def __init__(self, state: AgentState, now_ns: int) -> None:
        self._state = state
        self._now_ns = now_ns

    def collect(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "gpuops_run_generation", "Generation of the run, from 0.", value=state.generation
        )
        phase = GaugeMetricFamily(
            "gpuops_run_phase", "1 for the phase that the run is in.", labels=["phase"]
        )
        for known in RunPhase:
            phase.add_metric([known.value], float(known.value == state.phase))
        yield phase
        yield _counter(
            "gpuops_run_restarts",
            "Restarts that this agent saw, by the class of the failure.",
            "failure_class",
            dict(sorted(state.restarts_by_class.items())[:_CLASSES_MAX]),
        )
        yield _counter(
            "gpuops_run_lost_seconds",
            "Seconds lost to failures, by the phase of the recovery.",
            "phase",
            state.badput_s,
        )
        yield from self._ranks()
        yield from self._checkpoints()
        yield from self._agent()

    def _ranks(self) -> Iterator[Metric]:
        ranks = self._state.ranks[:RANKS_MAX]
        steps = GaugeMetricFamily(
            "gpuops_rank_step", "Last step of a rank of this node.", labels=["rank"]
        )
        silent = GaugeMetricFamily(
            "gpuops_rank_silent_seconds",
            "Seconds since the last heartbeat of a rank of this node.",
            labels=["rank"],
        )
        for rank in ranks:
            if rank.step is not None:
                steps.add_metric([str(rank.rank)], rank.step)
            if rank.beat_ns is not None:
                silent.add_metric([str(rank.rank)], self._seconds_since(rank.beat_ns))
        yield steps
        yield silent

    def _checkpoints(self) -> Iterator[Metric]:
        kept = self._state.checkpoint
        if kept is None:
            return
        yield GaugeMetricFamily(
            "gpuops_checkpoint_keeper_up",
            "1 while the process that keeps checkpoints in this node's memory runs.",
            value=float(kept.is_alive),
        )
        yield GaugeMetricFamily(
            "gpuops_checkpoint_copies",
            "Nodes that have this node's part of the newest checkpoint, itself among them.",
            value=kept.copies,
        )
        if kept.step is not None:
            yield GaugeMetricFamily(
                "gpuops_checkpoint_step",
                "Step of the newest checkpoint that all ranks of this node can resume from.",
                value=kept.step,
            )
        if kept.since_ns is not None:
            yield GaugeMetricFamily(
                "gpuops_checkpoint_age_seconds",
                "Seconds since that checkpoint was committed.",
                value=self._seconds_since(kept.since_ns),
            )
        if kept.persisted_step is not None:
            yield GaugeMetricFamily(
                "gpuops_checkpoint_persisted_step",
                "Step of the newest checkpoint in the persistent directory.",
                value=kept.persisted_step,
            )
        yield CounterMetricFamily(
            "gpuops_checkpoints_committed", "Checkpoints committed in memory.", kept.committed
        )
        yield _counter(
            "gpuops_checkpoints_skipped",
            "Saves that were skipped so that training did not wait, by reason.",
            "reason",
            dict(sorted(kept.skipped.items())[:SKIP_REASONS_MAX]),
        )

    def _agent(self) -> Iterator[Metric]:
        state = self._state
        yield GaugeMetricFamily(
            "gpuops_control_round_trip_seconds",
            "Last round trip to the control store, without the requested waiting time.",
            value=state.round_trip_s,
        )
        yield GaugeMetricFamily(
            "gpuops_control_silent_seconds",
            "Seconds since the last round trip to the control store.",
            value=self._seconds_since(state.control_ns),
        )
        yield CounterMetricFamily(
            "gpuops_agent_fences", "Times that this agent ended its own workers.", state.fences
        )
        yield CounterMetricFamily(
            "gpuops_agent_cpu_seconds", "CPU seconds that supervision has used.", state.cpu_s
        )

    def _seconds_since(self, then_ns: int) -> float:
        return max(0, self._now_ns - then_ns) / NS_PER_S


def metrics(state: AgentState, now_ns: int) -> bytes:
    """Return *state* in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_State(state, now_ns))
    return generate_latest(registry)


def _counter(
    name: str, help_text: str, label: str, values: Mapping[str, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class AgentServer:
    """Serves the state that *read_state* returns, in separate threads."""

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
        """Return the port of the server, None where it is not running."""
        return None if self._server is None else int(self._server.server_address[1])

    def start(self) -> Self:
        """Begin to listen. A port or an address that is not available is only a warning."""
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
        """Return status, content type and body of the answer to *path*."""
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
    scrubbed: Any = scrub_value(body)
    return json.dumps(envelope(SCHEMA, scrubbed)).encode() + b"\n"


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
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.is_loopback = ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def server_bind(self) -> None:
        # HTTPServer's own would look up this machine's name in DNS, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 as in socketserver
        with self._lock:
            while len(self._open) >= CONNECTIONS_MAX:
                # Its thread ends, and closes it. A client that sends its request has long gone.
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

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
        elif self._is_private() and peer_uid(self.connection) not in (0, os.geteuid()):
            self._send(HTTPStatus.FORBIDDEN, _TEXT, b"the state of a run is for its own user\n")
        else:
            self._send(*self._answer(self._path()))

    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _is_private(self) -> bool:
        return self.server.is_loopback and self._path() == "/state"

    def _answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        try:
            return self.server.answer(path)
        except Exception as exc:  # noqa: BLE001 boundary: our bug is an error 500, and ends nothing
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
    """Return whether a Host header names this machine itself."""
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
