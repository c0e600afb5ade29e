"""One connection of a control store's server: the opening, then request by request.

Nothing is read from an unauthenticated client but two short frames of fixed length; one from an
unknown address that has not proved the job's token within a second is cut off, and sooner where
its place is needed (`gpuops.host.net.admission`). Nothing that a client sends is more than bytes to
us. A client that is slow to read holds back only itself.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gpuops.control import signing
from gpuops.control.memory import KvMap, check_key, check_prefix
from gpuops.control.store import CLOSED_DEAD_S, ControlStoreError, Entry
from gpuops.control.tcp import wire
from gpuops.control.tcp.wire import ControlRequest, Operation, ReplyKind
from gpuops.host.net import job_proof as proof
from gpuops.host.net.admission import UNKNOWN_HANDSHAKE_S, AdmissionLimits, ConnectionAdmission
from gpuops.host.net.frames import WireError, configure_socket, framed, take_frame
from gpuops.host.net.job_proof import JobHandshake, ProofChannel, ProofWelcome

# For known addresses, which have proved the job's token before.
HANDSHAKE_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 16_384  # two for each of 8,192 agents
# With it begin the keys of refused agents; the values say who was refused and why.
REFUSED_PREFIX = "refused/"
_REFUSED_ADDRESSES_MAX = 16
_REFUSED_WHY = {
    ProofWelcome.OTHER_JOB: "it has another --rdzv-id",
    ProofWelcome.WRONG_TOKEN: "it has another token",
}
# Of one address, without proof: enough for the agents of one machine that all start now.
UNAUTHENTICATED_PER_ADDRESS_MAX = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server takes."""

    connections_max: int = CONNECTIONS_MAX
    unauthenticated_per_address_max: int = UNAUTHENTICATED_PER_ADDRESS_MAX
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    unknown_handshake_s: float = UNKNOWN_HANDSHAKE_S
    closed_dead_s: float = CLOSED_DEAD_S


@dataclass(slots=True)
class ServerCounters:
    """What the server did so far; for the benchmark and the log."""

    n_requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    n_rejected: int = 0
    n_cut_off: int = 0  # without proof, for a newer connection


class HeartbeatWaiter(Protocol):
    """What the others see of one connection."""

    def wake(self, entry: Entry, packed: bytes) -> None:
        """Answer the heartbeat that is held, if *entry* (*packed*: its bytes) is awaited."""
        ...

    def abort(self) -> None:
        """Close the connection; nothing more of it is read."""
        ...

    @property
    def heartbeat_key(self) -> str:
        """Return the key of its client's heartbeats, "" before the first one."""
        ...


@dataclass(slots=True)
class ServerState:
    """What all connections of one server share."""

    run_key: str
    token: str = field(repr=False)
    limits: ServerLimits = field(default_factory=ServerLimits)
    kv_map: KvMap = field(default_factory=KvMap)
    counters: ServerCounters = field(default_factory=ServerCounters)
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(wire.ID_BYTES))
    key: bytes = field(init=False, repr=False)
    run: bytes = field(init=False)
    started_s: float = field(init=False, default_factory=time.monotonic)
    last_request_s: float = field(init=False, default_factory=time.monotonic)
    admission: ConnectionAdmission["ControlServerConnection"] = field(init=False)
    clients: dict[tuple[bytes, int], HeartbeatWaiter] = field(init=False, default_factory=dict)
    waiting: dict[str, set[HeartbeatWaiter]] = field(init=False, default_factory=dict)
    # Clients that have lost one of their connections: if one had come to its end; the heartbeat.
    closed: dict[bytes, tuple[bool, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.key = signing.token_key(self.token)
        self.run = signing.run_digest(self.run_key)
        limits = self.limits
        self.admission = ConnectionAdmission(
            AdmissionLimits(
                connections_max=limits.connections_max,
                # Before the first agent has joined no address is known, and a connection is cheap.
                unknown_max=limits.connections_max,
                per_address_max=limits.unauthenticated_per_address_max,
            )
        )

    @property
    def store_s(self) -> float:
        """Return the control store's time: seconds since this server began."""
        return time.monotonic() - self.started_s

    def notify(self, key: str) -> None:
        """Answer those who wait for *key*."""
        connections = self.waiting.pop(key, None)
        if not connections:
            return
        entry = self.kv_map.get(key)
        packed = wire.pack_entry(entry)
        for connection in tuple(connections):
            connection.wake(entry, packed)

    def note_refusal(self, address: str, code: ProofWelcome) -> None:
        """Keep that a client was refused, for the agents that wait for it."""
        why = _REFUSED_WHY.get(code)
        if why is not None and len(self.kv_map.list(REFUSED_PREFIX)) < _REFUSED_ADDRESSES_MAX:
            with suppress(ControlStoreError):
                text = f"an agent at {address} was refused: {why}"
                self.kv_map.put(f"{REFUSED_PREFIX}{address}", text.encode())

    def on_closed(self, client: bytes, heartbeat_key: str, *, has_ended: bool) -> None:
        """Take in that a connection of *client* was closed; *has_ended*: by the client.

        A process that ends closes all of its connections; one that is frozen or cut off closes
        none. Where it had not read all, its kernel resets that one; a reset alone proves nothing,
        because something between the two may send it.
        """
        ended_before, key_before = self.closed.pop(client, (False, ""))
        has_ended, heartbeat_key = has_ended or ended_before, heartbeat_key or key_before
        if self._is_connected(client):
            self.closed[client] = has_ended, heartbeat_key
        elif has_ended:
            self._await_return(client, heartbeat_key)

    def _is_connected(self, client: bytes) -> bool:
        return any((client, lane) in self.clients for lane in wire.LANES)

    def _await_return(self, client: bytes, heartbeat_key: str) -> None:
        """Remove the heartbeat of *client*, unless it comes back."""
        version = self.kv_map.get(heartbeat_key).version

        def remove() -> None:
            is_unchanged = self.kv_map.get(heartbeat_key).version == version
            if is_unchanged and not self._is_connected(client):
                self.kv_map.delete(heartbeat_key)

        if version:
            asyncio.get_running_loop().call_later(self.limits.closed_dead_s, remove)


log = logging.getLogger(__name__)

HOLD_S_MAX = 60.0


@dataclass(slots=True)
class _PendingHeartbeat:
    """A heartbeat that waits for its watched key."""

    number: int
    key: str
    seen_version: int
    timer: asyncio.TimerHandle


class ControlServerConnection(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_address",
        "_buffer",
        "_closed",
        "_handshake",
        "_has_ended",
        "_hello",
        "_in",
        "_on_body",
        "_out",
        "_paused",
        "_pending",
        "_state",
        "_timer",
        "_transport",
        "heartbeat_key",
    )

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._address = ""
        self._closed = False
        self._has_ended = False
        self._paused = False
        self.heartbeat_key = ""
        self._on_body: Callable[[bytes], None] = self._on_hello
        self._hello: wire.ControlHello | None = None
        self._pending: _PendingHeartbeat | None = None
        self._handshake: JobHandshake | None = None
        self._in: ProofChannel | None = None
        self._out: ProofChannel | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        state, limits = self._state, self._state.limits
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        cut_off = state.admission.admit(self, self._address)
        if cut_off is None:
            state.counters.n_rejected += 1
            self._reject(ProofWelcome.BUSY)
            return
        state.counters.n_cut_off += len(cut_off)
        for oldest in cut_off:
            oldest.abort()
        configure_socket(transport.get_extra_info("socket"))
        is_known = state.admission.is_known(self._address)
        within_s = limits.handshake_timeout_s if is_known else limits.unknown_handshake_s
        self._timer = asyncio.get_running_loop().call_later(within_s, self.abort)

    def eof_received(self) -> None:
        self._has_ended = True  # and nothing more comes: the transport closes itself

    def connection_lost(self, _exc: Exception | None) -> None:
        self._closed = True
        self._state.admission.remove(self)
        self._cancel_timer()
        self._drop_pending()
        hello = self._hello
        if hello is not None:
            client_key = (hello.client, hello.lane)
            if self._state.clients.get(client_key) is self:
                del self._state.clients[client_key]
                self._state.on_closed(hello.client, self.heartbeat_key, has_ended=self._has_ended)

    def pause_writing(self) -> None:
        # What it does not read piles up here, so nothing more of it is answered until it does.
        self._paused = True
        if self._transport is not None and not self._closed:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._closed:
            self._transport.resume_reading()
            self._process_buffer()

    def data_received(self, data: bytes) -> None:
        self._state.counters.bytes_in += len(data)
        self._buffer += data
        self._process_buffer()

    def _process_buffer(self) -> None:
        try:
            while not (self._closed or self._paused) and (body := self._next_frame()) is not None:
                self._on_body(body)
        except WireError as exc:
            log.debug("a peer at %s is cut off: %s", self._address, exc)
            self.abort()
        except Exception:  # boundary: one client's bytes must not end the run of all
            log.exception("a request from %s failed", self._address)
            self.abort()

    def _next_frame(self) -> bytes | None:
        is_authenticating = self._in is None
        bytes_max = wire.HANDSHAKE_BYTES_MAX if is_authenticating else wire.FRAME_BYTES_MAX
        return take_frame(self._buffer, bytes_max)

    # The opening.

    def _on_hello(self, body: bytes) -> None:
        hello = wire.ControlHello.from_bytes(body)
        if not proof.same(hello.run, self._state.run):
            self._reject(ProofWelcome.OTHER_JOB)
            return
        self._state.admission.refresh(self)
        challenge = wire.ControlChallenge(proof.nonce(), self._state.instance).to_bytes()
        self._hello = hello
        self._handshake = JobHandshake(self._state.key, body + challenge)
        self._send(framed(challenge))
        self._on_body = self._on_proof

    def _on_proof(self, body: bytes) -> None:
        assert self._handshake is not None
        assert self._hello is not None
        if not proof.same(body, self._handshake.proof("client")):
            self._reject(ProofWelcome.WRONG_TOKEN)
            return
        if not self._state.admission.authenticate(self):
            self.abort()
            return
        self._state.admission.add_known(self._address)
        self._cancel_timer()
        self._in = self._handshake.channel("client")
        self._send(framed(proof.welcome(ProofWelcome.ACCEPTED, self._handshake.proof("server"))))
        self._out = self._handshake.channel("server")
        self._on_body = self._on_frame
        self._state.last_request_s = time.monotonic()
        client_key = (self._hello.client, self._hello.lane)
        previous = self._state.clients.get(client_key)
        self._state.clients[client_key] = self
        self._state.closed.pop(self._hello.client, None)
        if previous is not None:
            # The client gave that line up. What it still holds must not be done after what the
            # client says on this one.
            previous.abort()
            self.heartbeat_key = previous.heartbeat_key

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Requests.

    def _on_frame(self, body: bytes) -> None:
        assert self._in is not None
        request = ControlRequest.from_bytes(self._in.message(body))
        self._state.last_request_s = time.monotonic()
        self._state.counters.n_requests += 1
        try:
            kind, payload = self._execute(request)
        except ControlStoreError as exc:
            kind, payload = ReplyKind.REFUSED, str(exc).encode()
        if kind is not None:
            self._reply(request.number, kind, payload)

    def _execute(self, request: ControlRequest) -> tuple[ReplyKind | None, bytes]:
        kv_map, key = self._state.kv_map, request.key
        match request.operation:
            case Operation.GET:
                return ReplyKind.ENTRY, wire.pack_entry(kv_map.get(check_key(key)))
            case Operation.LIST:
                found, is_complete = wire.pack_page(
                    kv_map.list(check_prefix(key), request.expected)
                )
                return (ReplyKind.LAST_PAGE if is_complete else ReplyKind.PAGE), found
            case Operation.COMPARE_AND_SET:
                return self._on_compare_and_set(request)
            case Operation.HEARTBEAT:
                return self._on_heartbeat(request)
            case Operation.PUT:
                kv_map.put(key, request.value)
                self._state.notify(key)
            case Operation.DELETE:
                kv_map.delete(check_prefix(key))
        return ReplyKind.DONE, b""

    def _on_compare_and_set(self, request: ControlRequest) -> tuple[ReplyKind, bytes]:
        written, entry = self._state.kv_map.compare_and_set(
            request.key, request.value, request.expected
        )
        if not written:
            return ReplyKind.NOT_WRITTEN, wire.pack_entry(entry)
        self._state.notify(request.key)
        # The client has the value.
        return ReplyKind.WRITTEN, wire.pack_entry(Entry(b"", entry.version, entry.arrival))

    def _on_heartbeat(self, request: ControlRequest) -> tuple[ReplyKind | None, bytes]:
        state = self._state
        check_key(request.watch)
        state.kv_map.put(request.key, request.value)
        self.heartbeat_key = request.key
        state.notify(request.key)
        self._finish_hold()
        entry = state.kv_map.get(request.watch)
        if entry.version > request.expected:
            return ReplyKind.HEARTBEAT, wire.pack_heartbeat_reply(
                state.store_s, wire.pack_entry(entry)
            )
        if not (math.isfinite(request.hold_s) and request.hold_s > 0):
            return ReplyKind.HEARTBEAT, wire.pack_heartbeat_reply(state.store_s, None)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(min(request.hold_s, HOLD_S_MAX), self._finish_hold)
        self._pending = _PendingHeartbeat(request.number, request.watch, request.expected, timer)
        state.waiting.setdefault(request.watch, set()).add(self)
        return None, b""

    def wake(self, entry: Entry, packed: bytes) -> None:
        """Answer the held heartbeat, if *entry* is what it waits for."""
        pending = self._pending
        if pending is None:
            return
        if entry.version <= pending.seen_version:
            self._state.waiting.setdefault(pending.key, set()).add(self)
            return
        self._drop_pending()
        self._reply(
            pending.number,
            ReplyKind.HEARTBEAT,
            wire.pack_heartbeat_reply(self._state.store_s, packed),
        )

    def _finish_hold(self) -> None:
        pending = self._pending
        if pending is not None:
            self._drop_pending()
            self._reply(
                pending.number,
                ReplyKind.HEARTBEAT,
                wire.pack_heartbeat_reply(self._state.store_s, None),
            )

    def _drop_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.timer.cancel()
        waiting = self._state.waiting.get(pending.key)
        if waiting is not None:
            waiting.discard(self)
            if not waiting:
                del self._state.waiting[pending.key]

    # Sending.

    def _reply(self, number: int, kind: ReplyKind, payload: bytes) -> None:
        assert self._out is not None
        self._send(self._out.frame(wire.pack_reply(number, kind, payload)))

    def _send(self, frame: bytes) -> None:
        if self._closed or self._transport is None:
            return
        self._state.counters.bytes_out += len(frame)
        self._transport.write(frame)

    def _reject(self, code: ProofWelcome) -> None:
        self._state.note_refusal(self._address, code)
        self._send(framed(proof.welcome(code)))
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection; nothing more of it is read."""
        self._closed = True
        self._drop_pending()
        if self._transport is not None:
            self._transport.abort()
