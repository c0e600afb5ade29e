"""One connection of a board's server: the opening, then request by request.

Nothing is read from a stranger but two short frames of fixed length; whoever has not proved the
job's token within a few seconds is cut off. Nothing that a client sends is more than bytes to us.
A client that is slow to read holds back only itself.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpuops.control import board_wire as wire
from gpuops.control.board import BoardError, Entry
from gpuops.control.board_room import Room
from gpuops.control.board_wire import How, Request, What
from gpuops.control.shelf import check_key, check_prefix
from gpuops.host import job_proof as proof
from gpuops.host.frames import WireError, framed, take_frame
from gpuops.host.job_proof import Channel, Handshake, Welcome
from gpuops.host.tcp import set_lasting

log = logging.getLogger(__name__)

HOLD_S_MAX = 60.0


@dataclass(slots=True)
class _Held:
    """A heartbeat that waits for its watched key."""

    number: int
    key: str
    seen: int
    timer: asyncio.TimerHandle


class Peer(asyncio.Protocol):
    """One connection."""

    __slots__ = (
        "_address",
        "_buffer",
        "_closed",
        "_handle",
        "_held",
        "_hello",
        "_in",
        "_out",
        "_paused",
        "_room",
        "_shake",
        "_timer",
        "_transport",
    )

    def __init__(self, room: Room) -> None:
        self._room = room
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._address = ""
        self._closed = False
        self._paused = False
        self._handle: Callable[[bytes], None] = self._on_hello
        self._hello: wire.Hello | None = None
        self._held: _Held | None = None
        self._shake: Handshake | None = None
        self._in: Channel | None = None
        self._out: Channel | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        room, limits = self._room, self._room.limits
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        room.connections += 1
        room.strangers[self._address] += 1
        if (
            room.connections > limits.connections_max
            or room.strangers[self._address] > limits.strangers_per_address_max
        ):
            room.figures.turned_away += 1
            self._turn_away(Welcome.BUSY)
            return
        set_lasting(transport.get_extra_info("socket"))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limits.stranger_s, self.cut)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._closed = True
        self._room.connections -= 1
        self._known()
        self._forget_held()
        hello = self._hello
        if hello is not None:
            name = (hello.client, hello.lane)
            if self._room.clients.get(name) is self:
                del self._room.clients[name]

    def pause_writing(self) -> None:
        # What it does not read piles up here, so nothing more of it is answered until it does.
        self._paused = True
        if self._transport is not None and not self._closed:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        if self._transport is not None and not self._closed:
            self._transport.resume_reading()
            self._handle_all()

    def data_received(self, data: bytes) -> None:
        self._room.figures.bytes_in += len(data)
        self._buffer += data
        self._handle_all()

    def _handle_all(self) -> None:
        try:
            while not (self._closed or self._paused) and (body := self._next_frame()) is not None:
                self._handle(body)
        except WireError as exc:
            log.debug("a peer at %s is cut off: %s", self._address, exc)
            self.cut()
        except Exception:  # boundary: one client's bytes must not end the run of all
            log.exception("a request from %s failed", self._address)
            self.cut()

    def _next_frame(self) -> bytes | None:
        is_stranger = self._in is None
        bytes_max = wire.OPENING_BYTES_MAX if is_stranger else wire.FRAME_BYTES_MAX
        return take_frame(self._buffer, bytes_max)

    # The opening.

    def _on_hello(self, body: bytes) -> None:
        hello = wire.Hello.from_bytes(body)
        if not proof.same(hello.run, self._room.run):
            self._turn_away(Welcome.OTHER_JOB)
            return
        challenge = wire.Challenge(proof.nonce(), self._room.instance).to_bytes()
        self._hello = hello
        self._shake = Handshake(self._room.key, body + challenge)
        self._send(framed(challenge))
        self._handle = self._on_proof

    def _on_proof(self, body: bytes) -> None:
        assert self._shake is not None
        assert self._hello is not None
        if not proof.same(body, self._shake.proof("client")):
            self._turn_away(Welcome.WRONG_TOKEN)
            return
        self._known()
        self._in = self._shake.channel("client")
        self._send(framed(proof.welcome(Welcome.COME_IN, self._shake.proof("server"))))
        self._out = self._shake.channel("server")
        self._handle = self._on_frame
        self._room.heard_s = time.monotonic()
        name = (self._hello.client, self._hello.lane)
        before = self._room.clients.get(name)
        self._room.clients[name] = self
        if before is not None:
            # The client gave that line up. What it still holds must not be done after what the
            # client says on this one.
            before.cut()

    def _known(self) -> None:
        """No longer count this connection among the strangers."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._in is None:
            strangers = self._room.strangers
            strangers[self._address] -= 1
            if strangers[self._address] <= 0:
                del strangers[self._address]

    # Requests.

    def _on_frame(self, body: bytes) -> None:
        assert self._in is not None
        request = Request.from_bytes(self._in.message(body))
        self._room.heard_s = time.monotonic()
        self._room.figures.requests += 1
        try:
            how, payload = self._answer(request)
        except BoardError as exc:
            how, payload = How.REFUSED, str(exc).encode()
        if how is not None:
            self._reply(request.number, how, payload)

    def _answer(self, request: Request) -> tuple[How | None, bytes]:
        shelf, key = self._room.shelf, request.key
        match request.what:
            case What.GET:
                return How.ENTRY, wire.entry_bytes(shelf.get(check_key(key)))
            case What.LIST:
                found, is_all = wire.page(shelf.list(check_prefix(key), request.place))
                return (How.LAST_PAGE if is_all else How.PAGE), found
            case What.SWAP:
                return self._on_swap(request)
            case What.BEAT:
                return self._on_beat(request)
            case What.PUT:
                shelf.put(key, request.value)
                self._room.tell(key)
            case What.DELETE:
                shelf.delete(check_prefix(key))
        return How.DONE, b""

    def _on_swap(self, request: Request) -> tuple[How, bytes]:
        written, entry = self._room.shelf.swap(request.key, request.value, request.place)
        if not written:
            return How.NOT_WRITTEN, wire.entry_bytes(entry)
        self._room.tell(request.key)
        # The client has the value.
        return How.WRITTEN, wire.entry_bytes(Entry(b"", entry.version, entry.order))

    def _on_beat(self, request: Request) -> tuple[How | None, bytes]:
        room = self._room
        check_key(request.watch)
        room.shelf.put(request.key, request.value)
        room.tell(request.key)
        self._end_hold()
        entry = room.shelf.get(request.watch)
        if entry.version > request.place:
            return How.BEATEN, wire.beaten_bytes(room.board_s, wire.entry_bytes(entry))
        if not (math.isfinite(request.hold_s) and request.hold_s > 0):
            return How.BEATEN, wire.beaten_bytes(room.board_s, None)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(min(request.hold_s, HOLD_S_MAX), self._end_hold)
        self._held = _Held(request.number, request.watch, request.place, timer)
        room.waiting.setdefault(request.watch, set()).add(self)
        return None, b""

    def wake(self, entry: Entry, packed: bytes) -> None:
        """Answer the held heartbeat, if *entry* is what it waits for."""
        held = self._held
        if held is None:
            return
        if entry.version <= held.seen:
            self._room.waiting.setdefault(held.key, set()).add(self)
            return
        self._forget_held()
        self._reply(held.number, How.BEATEN, wire.beaten_bytes(self._room.board_s, packed))

    def _end_hold(self) -> None:
        held = self._held
        if held is not None:
            self._forget_held()
            self._reply(held.number, How.BEATEN, wire.beaten_bytes(self._room.board_s, None))

    def _forget_held(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        held.timer.cancel()
        waiting = self._room.waiting.get(held.key)
        if waiting is not None:
            waiting.discard(self)
            if not waiting:
                del self._room.waiting[held.key]

    # Sending.

    def _reply(self, number: int, how: How, payload: bytes) -> None:
        assert self._out is not None
        self._send(self._out.frame(wire.answer(number, how, payload)))

    def _send(self, frame: bytes) -> None:
        if self._closed or self._transport is None:
            return
        self._room.figures.bytes_out += len(frame)
        self._transport.write(frame)

    def _turn_away(self, why: Welcome) -> None:
        self._send(framed(proof.welcome(why)))
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close the connection; nothing more of it is read."""
        self._closed = True
        self._forget_held()
        if self._transport is not None:
            self._transport.abort()
