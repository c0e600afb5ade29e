"""The client of a control store's server."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpuops.control import signing
from gpuops.control.memory import check_key, check_prefix, check_value
from gpuops.control.store import (
    ControlStoreError,
    ControlStoreResetError,
    Entry,
    HeartbeatReply,
)
from gpuops.control.tcp import wire
from gpuops.control.tcp.client_connection import ControlConnection, format_address
from gpuops.control.tcp.wire import ControlRequest, Operation, ReplyKind
from gpuops.host.net.frames import WireError
from gpuops.host.net.job_proof import nonce

DEADLINE_S = 5.0
T = TypeVar("T")


class TcpControlStore:
    """A `ControlStore` on a server; safe from several threads.

    Calls take turns on one connection, heartbeats have their own, so that the wait of one delays no
    other call. Every call ends within *deadline_s* (a heartbeat: and its hold). Where it raises
    `ControlStoreUnreachableError`, what it asked for may still have been done, and is not done
    later than the next call on this handle.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        run_key: str,
        token: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._address = (host, port)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._instance = ""
        self._local_address = ""
        self._was_reset = False
        run, client, key = (
            signing.run_digest(run_key),
            secrets.token_bytes(16),
            signing.token_key(token),
        )

        def line(lane: int) -> ControlConnection:
            def hello() -> wire.ControlHello:
                return wire.ControlHello(run, client, lane, nonce())

            return ControlConnection(self._address, hello, key, self._on_open)

        self._calls, self._heartbeats = map(line, wire.LANES)

    @property
    def instance(self) -> str:
        """Return the name of the server's memory, "" before the first answer."""
        return self._instance

    @property
    def local_address(self) -> str:
        """Return our own address on the way to the server, "" before the first answer."""
        return self._local_address

    def get(self, key: str) -> Entry:
        _how, payload = self._request(Operation.GET, check_key(key))
        return _decoded(wire.unpack_entry, payload)[0]

    def list(self, prefix: str) -> Mapping[str, Entry]:
        check_prefix(prefix)
        found: dict[str, Entry] = {}
        end_s = time.monotonic() + self._deadline_s
        after = 0
        while True:
            kind, payload = self._request(Operation.LIST, prefix, expected=after, end_s=end_s)
            found |= _decoded(wire.unpack_page, payload)
            after = next(reversed(found.values())).arrival if found else 0
            if kind is not ReplyKind.PAGE:
                return found

    def put(self, key: str, value: bytes) -> None:
        self._request(Operation.PUT, check_key(key), check_value(key, value))

    def compare_and_set(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        check_key(key)
        kind, payload = self._request(
            Operation.COMPARE_AND_SET, key, check_value(key, value), expected=version
        )
        entry = _decoded(wire.unpack_entry, payload)[0]
        if kind is ReplyKind.WRITTEN and not entry.value:
            return True, Entry(bytes(value), entry.version, entry.arrival)
        return kind is ReplyKind.WRITTEN, entry

    def heartbeat(
        self, key: str, value: bytes, *, watch: str, seen_version: int, hold_s: float
    ) -> HeartbeatReply:
        check_key(key)
        check_key(watch)
        check_value(key, value)
        self._check_not_reset()
        hold_end_s = time.monotonic() + hold_s

        def build(number: int, now_s: float) -> ControlRequest:
            left_s = max(hold_end_s - now_s, 0.0)
            return ControlRequest(
                number, Operation.HEARTBEAT, key, value, seen_version, watch, left_s
            )

        _how, payload = self._heartbeats.request(build, hold_end_s + self._deadline_s)
        return _decoded(wire.unpack_heartbeat_reply, payload)

    def delete(self, prefix: str) -> None:
        self._request(Operation.DELETE, check_prefix(prefix))

    def disconnected_s(self) -> float:
        return self._heartbeats.closed_s()

    def close(self) -> None:
        self._calls.close()
        self._heartbeats.close()

    def _request(
        self,
        operation: Operation,
        key: str,
        value: bytes = b"",
        *,
        expected: int = 0,
        end_s: float | None = None,
    ) -> tuple[ReplyKind, bytes]:
        self._check_not_reset()
        if end_s is None:
            end_s = time.monotonic() + self._deadline_s
        return self._calls.request(
            lambda n, _now_s: ControlRequest(n, operation, key, value, expected), end_s
        )

    def _on_open(self, local_address: str, instance: str) -> None:
        with self._lock:
            self._local_address = local_address
            self._was_reset = self._was_reset or self._instance not in ("", instance)
            self._instance = self._instance or instance
        self._check_not_reset()

    def _check_not_reset(self) -> None:
        if self._was_reset:
            raise ControlStoreResetError(
                f"the control store at {format_address(self._address)} was started anew and knows "
                "nothing of this run"
            )


def _decoded(decode: Callable[[bytes], T], payload: bytes) -> T:
    """Return what *decode* makes of an answer whose tag was right."""
    try:
        return decode(payload)
    except WireError as exc:
        raise ControlStoreError(
            f"the control store's answer is unknown to this version: {exc}"
        ) from exc
