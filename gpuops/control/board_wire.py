"""The bytes between a board's server and its clients.

Short frames of fixed layout open a connection (`Hello`, `Challenge`, proofs: see `host.job_proof`);
after them every frame is a tag and a message: a request or an answer, both with the request's
number.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from gpuops.control.board import KEY_CHARS_MAX, VALUE_BYTES_MAX, Beaten, Entry
from gpuops.host.frames import Greeting, WireError
from gpuops.host.job_proof import NONCE_BYTES, TAG_BYTES

MAGIC = b"gpuopsb1"
ID_BYTES = 16
DIGEST_BYTES = 32
# One value, two keys and the numbers beside them.
MESSAGE_BYTES_MAX = VALUE_BYTES_MAX + 2 * KEY_CHARS_MAX + 256
FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + TAG_BYTES
# Before the token is proved there is nothing longer to say.
OPENING_BYTES_MAX = 256
# Entries of one page of a list; a single larger one makes a page of its own.
PAGE_BYTES = 2**20

_REQUEST = struct.Struct(">IBQdBB")  # number, what, version or order, hold_s, lengths of two keys
_ANSWER = struct.Struct(">IB")  # number, how
_ENTRY = struct.Struct(">QQI")  # version, order, length of the value
_HELLO = Greeting("hello", MAGIC, f"{DIGEST_BYTES}s{ID_BYTES}sB{NONCE_BYTES}s")
_CHALLENGE = Greeting("challenge", MAGIC, f"{NONCE_BYTES}s{ID_BYTES}s")
_TIME = struct.Struct(">d?")


class What(IntEnum):
    """What a request asks for."""

    GET = 1
    LIST = 2
    PUT = 3
    SWAP = 4
    BEAT = 5
    DELETE = 6


class How(IntEnum):
    """What an answer is."""

    DONE = 1
    ENTRY = 2
    WRITTEN = 3
    NOT_WRITTEN = 4
    PAGE = 5
    LAST_PAGE = 6
    BEATEN = 7
    REFUSED = 8


@dataclass(frozen=True, slots=True)
class Hello:
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
class Challenge:
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
class Request:
    """A request; ``place`` is a swap's version, a list's last order, what a beat has seen."""

    number: int
    what: What
    key: str
    value: bytes = b""
    place: int = 0
    watch: str = ""
    hold_s: float = 0.0

    def to_bytes(self) -> bytes:
        key, watch = self.key.encode("ascii"), self.watch.encode("ascii")
        head = _REQUEST.pack(self.number, self.what, self.place, self.hold_s, len(key), len(watch))
        return b"".join((head, key, watch, self.value))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the request in *data*; raises `WireError` where there is none."""
        try:
            number, what, place, hold_s, n_key, n_watch = _REQUEST.unpack_from(data)
            end = _REQUEST.size + n_key
            rest = end + n_watch
            if rest > len(data):
                raise WireError("a key is cut off")
            return cls(
                number=number,
                what=What(what),
                key=data[_REQUEST.size : end].decode("ascii"),
                value=data[rest:],
                place=place,
                watch=data[end:rest].decode("ascii"),
                hold_s=hold_s,
            )
        except (struct.error, ValueError) as exc:
            raise WireError(f"not a request: {exc}") from exc


def answer(number: int, how: How, payload: bytes = b"") -> bytes:
    """Return an answer to the request *number*."""
    return _ANSWER.pack(number, how) + payload


def read_answer(data: bytes) -> tuple[int, How, bytes]:
    """Return the number, the kind and the rest of an answer; raises `WireError`."""
    try:
        number, how = _ANSWER.unpack_from(data)
        return number, How(how), data[_ANSWER.size :]
    except (struct.error, ValueError) as exc:
        raise WireError(f"not an answer: {exc}") from exc


def entry_bytes(entry: Entry) -> bytes:
    """Return *entry* for an answer."""
    return _ENTRY.pack(entry.version, entry.order, len(entry.value)) + entry.value


def read_entry(data: bytes, at: int = 0) -> tuple[Entry, int]:
    """Return the entry in *data* and where it ends; raises `WireError`."""
    try:
        version, order, length = _ENTRY.unpack_from(data, at)
    except struct.error as exc:
        raise WireError(f"not an entry: {exc}") from exc
    start = at + _ENTRY.size
    if start + length > len(data):
        raise WireError("an entry is cut off")
    return Entry(data[start : start + length], version, order), start + length


def page(entries: list[tuple[str, Entry]]) -> tuple[bytes, bool]:
    """Return as many of *entries* as fit into one answer, and whether these are all."""
    parts: list[bytes] = []
    size = 0
    for key, entry in entries:
        if parts and size + len(key) + len(entry.value) + _ENTRY.size + 1 > PAGE_BYTES:
            return b"".join(parts), False
        parts.append(bytes([len(key)]) + key.encode("ascii") + entry_bytes(entry))
        size += len(parts[-1])
    return b"".join(parts), True


def read_page(data: bytes) -> dict[str, Entry]:
    """Return the entries of a page; raises `WireError`."""
    found: dict[str, Entry] = {}
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        try:
            key = data[at + 1 : end].decode("ascii")
        except UnicodeDecodeError as exc:
            raise WireError(f"not a key: {exc}") from exc
        found[key], at = read_entry(data, end)
    return found


def beaten_bytes(board_s: float, watched: bytes | None) -> bytes:
    """Return a heartbeat's answer; *watched* is an entry's bytes."""
    return _TIME.pack(board_s, watched is not None) + (watched or b"")


def read_beaten(data: bytes) -> Beaten:
    """Return what a heartbeat brought back; raises `WireError`."""
    try:
        board_s, is_there = _TIME.unpack_from(data)
    except struct.error as exc:
        raise WireError(f"not the answer to a heartbeat: {exc}") from exc
    return Beaten(read_entry(data, _TIME.size)[0] if is_there else None, board_s)
