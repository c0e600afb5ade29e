"""Calls to etcd's JSON gateway: one at a time, each within its deadline, by any member."""

import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

from gpuops.control.etcd.address import EtcdAddress
from gpuops.control.fair_lock import FairLock
from gpuops.control.store import ControlStoreError, ControlStoreUnreachableError

# A member that is frozen or cut off costs this; where there is another, that one is asked.
MEMBER_TIMEOUT_S = 1.5
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 0.5
_UNAUTHENTICATED = 401  # of the gateway: the login has expired
# gRPC's codes for what another try may change: cancelled, deadline, aborted, internal, unavailable.
_PASSING = frozenset({1, 4, 10, 13, 14})


class MemberClock:
    """etcd's time, from the ``Date`` of its answers, which has a resolution of a second.

    Each answer says within which second the member's clock was between two moments of ours; the
    narrowest interval of all of them counts. Later answers that contradict it come from a clock
    that was set, or from another member, and are left out: the time of a handle never jumps.
    """

    def __init__(self) -> None:
        self._low_s, self._high_s = float("-inf"), float("inf")
        self._last_s = float("-inf")
        self._lock = threading.Lock()

    def observe(self, date_s: float, *, sent_s: float, received_s: float) -> None:
        """Note that etcd's clock showed *date_s*, in whole seconds, between the two moments."""
        with self._lock:
            low_s = max(self._low_s, date_s - received_s)
            high_s = min(self._high_s, date_s + 1.0 - sent_s)
            if low_s <= high_s:
                self._low_s, self._high_s = low_s, high_s

    def read_s(self, now_s: float) -> float:
        """Return etcd's time at *now_s*; never less than before."""
        with self._lock:
            self._last_s = max(self._last_s, now_s + (self._low_s + self._high_s) / 2)
            return self._last_s


class EtcdSession:
    """One connection to one member at a time; the next member is asked where it is lost.

    A call may be repeated: what it asks for must be safe to be done twice.
    """

    def __init__(self, address: EtcdAddress, clock: MemberClock) -> None:
        self._address = address
        self._clock = clock
        self._tls = address.tls_context()
        self._lock = FairLock()
        self._closed = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._login = ""
        self._member = 0

    def call(self, path: str, body: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Return etcd's answer to *body* at *path*, for example ``kv/txn``.

        Raises:
            ControlStoreUnreachableError: No answer within *timeout_s*, or closed.
            ControlStoreError: etcd refuses, and would again.
        """
        end_s = time.monotonic() + timeout_s
        data = json.dumps(body).encode()
        with self._lock.acquire(timeout_s) as acquired:
            if not acquired:
                raise self._unreachable("an earlier call still waits for its answer")
            backoff_s, why = BACKOFF_MIN_S, "no answer in time"
            while time.monotonic() < end_s and not self._closed.is_set():
                try:
                    return self._try(path, data, end_s)
                except (OSError, http.client.HTTPException, _PassingError) as exc:
                    why = str(exc) or type(exc).__name__
                    self._disconnect()
                    self._member += 1
                self._closed.wait(min(backoff_s * random.uniform(0.5, 1.5), 1.0))  # noqa: S311
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            raise self._unreachable("this handle is closed" if self._closed.is_set() else why)

    def wait(self, seconds: float) -> None:
        """Wait, less long where it is closed meanwhile."""
        self._closed.wait(seconds)

    def close(self) -> None:
        """Release the connection; a call that waits for its answer ends."""
        self._closed.set()
        self._disconnect()

    def _try(self, path: str, data: bytes, end_s: float) -> dict[str, Any]:
        if self._address.user and not self._login:
            login = {"name": self._address.user, "password": self._address.password}
            answer = self._post("auth/authenticate", json.dumps(login).encode(), end_s)[1]
            self._login = str(_checked(answer).get("token", ""))
        status, answer = self._post(path, data, end_s)
        if status == _UNAUTHENTICATED and self._login:
            self._login = ""  # a login lives five minutes after its last use
            raise _PassingError("the login has expired")
        return _checked(answer)

    def _post(self, path: str, data: bytes, end_s: float) -> tuple[int, dict[str, Any]]:
        left_s = max(end_s - time.monotonic(), 0.001)
        if len(self._address.members) > 1:
            left_s = min(left_s, MEMBER_TIMEOUT_S)
        connection = self._connect(left_s)
        headers = {"Content-Type": "application/json"}
        if self._login:
            headers["Authorization"] = self._login
        sent_s = time.monotonic()
        connection.request("POST", f"/v3/{path}", data, headers)
        response = connection.getresponse()
        received_s = time.monotonic()
        text = response.read()
        with suppress(TypeError, ValueError):
            date_s = parsedate_to_datetime(response.headers["Date"]).timestamp()
            self._clock.observe(date_s, sent_s=sent_s, received_s=received_s)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ControlStoreError(
                f"{self._address} answers HTTP {response.status} and no JSON to /v3/{path}; is it "
                "etcd 3.4 or later, with its gateway (--enable-grpc-gateway)?"
            )
        return response.status, answer

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = self._connection
        if connection is None:
            host, port = self._address.members[self._member % len(self._address.members)]
            if self._tls is None:
                connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            else:
                connection = http.client.HTTPSConnection(
                    host, port, timeout=timeout_s, context=self._tls
                )
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as exc:
                raise ControlStoreError(f"{self._address} is not who it should be: {exc}") from exc
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
            if self._closed.is_set():
                raise ConnectionError("this handle is closed")
        connection.sock.settimeout(timeout_s)
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with suppress(OSError, AttributeError):
            # Wakes a call of another thread that waits on this socket.
            connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _unreachable(self, why: str) -> ControlStoreUnreachableError:
        return ControlStoreUnreachableError(f"{self._address} does not answer: {why}")


class _PassingError(Exception):
    """etcd answered with an error that another try, or another member, may not have."""


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return *answer* unless it is an error."""
    error = answer.get("error")
    if error is None:
        return answer
    text = " ".join(str(answer.get("message", error)).split())[:300]
    if answer.get("code") in _PASSING:
        raise _PassingError(text)
    hint = ""
    if "too large" in text or "larger than max" in text:
        hint = "; start etcd with --max-request-bytes=8388608"
    elif "space exceeded" in text:
        hint = "; compact it, and start it with --auto-compaction-mode=revision"
    raise ControlStoreError(f"the control store in etcd refuses: {text}{hint}")
