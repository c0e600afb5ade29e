"""The client of a board's server."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpuops.control import board_wire as wire
from gpuops.control import seal
from gpuops.control.board import Beaten, BoardError, BoardForgotError, Entry
from gpuops.control.board_line import Line, shown
from gpuops.control.board_wire import How, Request, What
from gpuops.control.shelf import check_key, check_prefix, check_value
from gpuops.host.frames import WireError
from gpuops.host.job_proof import nonce

DEADLINE_S = 5.0
T = TypeVar("T")


class TcpBoard:
    """A `Board` on a server; safe from several threads.

    Calls take turns on one connection, heartbeats have their own, so that the wait of one delays no
    other call. Every call ends within *deadline_s* (a heartbeat: and its hold). Where it raises
    `BoardUnreachableError`, what it asked for may still have been done, and is not done later than
    the next call on this handle.
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
        self._place = (host, port)
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._instance = ""
        self._local_address = ""
        self._forgot = False
        run, client, key = seal.run_digest(run_key), secrets.token_bytes(16), seal.token_key(token)

        def line(lane: int) -> Line:
            def hello() -> wire.Hello:
                return wire.Hello(run, client, lane, nonce())

            return Line(self._place, hello, key, self._on_open)

        self._calls, self._beats = line(0), line(1)

    @property
    def instance(self) -> str:
        """Return the name of the server's memory, "" before the first answer."""
        return self._instance

    @property
    def local_address(self) -> str:
        """Return our own address on the way to the server, "" before the first answer."""
        return self._local_address

    def get(self, key: str) -> Entry:
        _how, payload = self._ask(What.GET, check_key(key))
        return _sound(wire.read_entry, payload)[0]

    def list(self, prefix: str) -> Mapping[str, Entry]:
        check_prefix(prefix)
        found: dict[str, Entry] = {}
        end_s = time.monotonic() + self._deadline_s
        after = 0
        while True:
            how, payload = self._ask(What.LIST, prefix, place=after, end_s=end_s)
            found |= _sound(wire.read_page, payload)
            after = next(reversed(found.values())).order if found else 0
            if how is not How.PAGE:
                return found

    def put(self, key: str, value: bytes) -> None:
        self._ask(What.PUT, check_key(key), check_value(key, value))

    def swap(self, key: str, value: bytes, *, version: int) -> tuple[bool, Entry]:
        check_key(key)
        how, payload = self._ask(What.SWAP, key, check_value(key, value), place=version)
        entry = _sound(wire.read_entry, payload)[0]
        if how is How.WRITTEN and not entry.value:
            return True, Entry(bytes(value), entry.version, entry.order)
        return how is How.WRITTEN, entry

    def beat(self, key: str, value: bytes, *, watch: str, seen: int, hold_s: float) -> Beaten:
        check_key(key)
        check_key(watch)
        check_value(key, value)
        self._check_same()
        hold_end_s = time.monotonic() + hold_s

        def build(number: int, now_s: float) -> Request:
            left_s = max(hold_end_s - now_s, 0.0)
            return Request(number, What.BEAT, key, value, seen, watch, left_s)

        _how, payload = self._beats.ask(build, hold_end_s + self._deadline_s)
        return _sound(wire.read_beaten, payload)

    def delete(self, prefix: str) -> None:
        self._ask(What.DELETE, check_prefix(prefix))

    def close(self) -> None:
        self._calls.close()
        self._beats.close()

    def _ask(
        self,
        what: What,
        key: str,
        value: bytes = b"",
        *,
        place: int = 0,
        end_s: float | None = None,
    ) -> tuple[How, bytes]:
        self._check_same()
        if end_s is None:
            end_s = time.monotonic() + self._deadline_s
        return self._calls.ask(lambda n, _now_s: Request(n, what, key, value, place), end_s)

    def _on_open(self, local_address: str, instance: str) -> None:
        with self._lock:
            self._local_address = local_address
            self._forgot = self._forgot or self._instance not in ("", instance)
            self._instance = self._instance or instance
        self._check_same()

    def _check_same(self) -> None:
        if self._forgot:
            raise BoardForgotError(
                f"the board at {shown(self._place)} was started anew and knows nothing of this run"
            )


def _sound(read: Callable[[bytes], T], payload: bytes) -> T:
    """Return what *read* makes of an answer whose tag was right."""
    try:
        return read(payload)
    except WireError as exc:
        raise BoardError(f"the board answers what this version does not know: {exc}") from exc
