"""The bytes between a control store's server and its clients.

Short frames of fixed layout open a connection (`Hello`, `Challenge`, proofs: see `host.job_proof`);
after them every frame is a tag and a message: a request or an answer, both with the request's
number.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from gpuops.control.store import KEY_CHARS_MAX, VALUE_BYTES_MAX, Entry, HeartbeatReply
from gpuops.host.net.frames import FrameGreeting, WireError
from gpuops.host.net.job_proof import NONCE_BYTES, TAG_BYTES

MAGIC = b"gpuopsb1"
ID_BYTES = 16
LANES = 0, 1  # the connections of a client: of its calls, of its heartbeats
DIGEST_BYTES = 32
# One value, two keys and the numbers with them.
MESSAGE_BYTES_MAX = VALUE_BYTES_MAX + 2 * KEY_CHARS_MAX + 256
FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + TAG_BYTES
# Before the token is proved there is nothing longer to say.
HANDSHAKE_BYTES_MAX = 256
# Entries of one page of a list; a single larger one makes a page of its own.
PAGE_BYTES = 2**20

_REQUEST = struct.Struct(">IBQdBB")  # number, what, version or order, hold_s, lengths of two keys
_REPLY = struct.Struct(">IB")  # number, how
_ENTRY = struct.Struct(">QQI")  # version, order, length of the value
_HELLO = FrameGreeting("hello", MAGIC, f"{DIGEST_BYTES}s{ID_BYTES}sB{NONCE_BYTES}s")
_CHALLENGE = FrameGreeting("challenge", MAGIC, f"{NONCE_BYTES}s{ID_BYTES}s")
_HEARTBEAT_REPLY = struct.Struct(">d?")


class Operation(IntEnum):
    """What a request asks for."""

    GET = 1
    LIST = 2
    PUT = 3
    COMPARE_AND_SET = 4
    HEARTBEAT = 5
    DELETE = 6


class ReplyKind(IntEnum):
    """What an answer is."""

    DONE = 1
    ENTRY = 2
    WRITTEN = 3
    NOT_WRITTEN = 4
    PAGE = 5
    LAST_PAGE = 6
    HEARTBEAT = 7
    REFUSED = 8


@dataclass(frozen=True, slots=True)
class ControlHello:
    """Who calls: the digest of the run's key, a client's random name, which of its lines it is."""

    run: bytes
    client: bytes
    lane: int
    nonce: bytes

    def to_bytes(self) -> bytes:
        return _HELLO.pack(self.run, self.client, self.lane, self.nonce)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the hello in *data*; raises `WireError` where there is none."""
        return cls(*_HELLO.unpack(data))


@dataclass(frozen=True, slots=True)
class ControlChallenge:
    """The server's nonce, and the name of its memory: a server that was restarted has another."""

    nonce: bytes
    instance: bytes

    def to_bytes(self) -> bytes:
        return _CHALLENGE.pack(self.nonce, self.instance)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the challenge in *data*; raises `WireError` where there is none."""
        return cls(*_CHALLENGE.unpack(data))


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A request; ``expected`` is a swap's version, a list's last order, what a beat has seen."""

    number: int
    operation: Operation
    key: str
    value: bytes = b""
    expected: int = 0
    watch: str = ""
    hold_s: float = 0.0

    def to_bytes(self) -> bytes:
        key, watch = self.key.encode("ascii"), self.watch.encode("ascii")
        head = _REQUEST.pack(
            self.number, self.operation, self.expected, self.hold_s, len(key), len(watch)
        )
        return b"".join((head, key, watch, self.value))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the request in *data*; raises `WireError` where there is none."""
        try:
            number, operation, expected, hold_s, n_key, n_watch = _REQUEST.unpack_from(data)
            end = _REQUEST.size + n_key
            rest = end + n_watch
            if rest > len(data):
                raise WireError("a key is cut off")
            return cls(
                number=number,
                operation=Operation(operation),
                key=data[_REQUEST.size : end].decode("ascii"),
                value=data[rest:],
                expected=expected,
                watch=data[end:rest].decode("ascii"),
                hold_s=hold_s,
            )
        except (struct.error, ValueError) as exc:
            raise WireError(f"not a request: {exc}") from exc


def pack_reply(number: int, kind: ReplyKind, payload: bytes = b"") -> bytes:
    """Return an answer to the request *number*."""
    return _REPLY.pack(number, kind) + payload


def unpack_reply(data: bytes) -> tuple[int, ReplyKind, bytes]:
    """Return the number, the kind and the rest of an answer; raises `WireError`."""
    try:
        number, kind = _REPLY.unpack_from(data)
        return number, ReplyKind(kind), data[_REPLY.size :]
    except (struct.error, ValueError) as exc:
        raise WireError(f"not an answer: {exc}") from exc


def pack_entry(entry: Entry) -> bytes:
    """Return *entry* for an answer."""
    return _ENTRY.pack(entry.version, entry.arrival, len(entry.value)) + entry.value


def unpack_entry(data: bytes, at: int = 0) -> tuple[Entry, int]:
    """Return the entry in *data* and where it ends; raises `WireError`."""
    try:
        version, order, length = _ENTRY.unpack_from(data, at)
    except struct.error as exc:
        raise WireError(f"not an entry: {exc}") from exc
    start = at + _ENTRY.size
    if start + length > len(data):
        raise WireError("an entry is cut off")
    return Entry(data[start : start + length], version, order), start + length


def pack_page(entries: list[tuple[str, Entry]]) -> tuple[bytes, bool]:
    """Return as many of *entries* as fit into one answer, and whether these are all."""
    parts: list[bytes] = []
    size = 0
    for key, entry in entries:
        if parts and size + len(key) + len(entry.value) + _ENTRY.size + 1 > PAGE_BYTES:
            return b"".join(parts), False
        parts.append(bytes([len(key)]) + key.encode("ascii") + pack_entry(entry))
        size += len(parts[-1])
    return b"".join(parts), True


def unpack_page(data: bytes) -> dict[str, Entry]:
    """Return the entries of a page; raises `WireError`."""
    found: dict[str, Entry] = {}
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        try:
            key = data[at + 1 : end].decode("ascii")
        except UnicodeDecodeError as exc:
            raise WireError(f"not a key: {exc}") from exc
        found[key], at = unpack_entry(data, end)
    return found


def pack_heartbeat_reply(store_s: float, watched: bytes | None) -> bytes:
    """Return a heartbeat's answer; *watched* is an entry's bytes."""
    return _HEARTBEAT_REPLY.pack(store_s, watched is not None) + (watched or b"")


def unpack_heartbeat_reply(data: bytes) -> HeartbeatReply:
    """Return what a heartbeat brought back; raises `WireError`."""
    try:
        store_s, has_entry = _HEARTBEAT_REPLY.unpack_from(data)
    except struct.error as exc:
        raise WireError(f"not the answer to a heartbeat: {exc}") from exc
    return HeartbeatReply(
        unpack_entry(data, _HEARTBEAT_REPLY.size)[0] if has_entry else None, store_s
    )
