"""Frames between two processes: a length, then as many bytes, read once the length is allowed."""

import socket
import struct
from typing import Any

# A peer whose machine has failed does not close its connection: detected after 60 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


def configure_socket(sock: socket.socket) -> None:
    """Send small messages at once, and detect a failed machine of the peer within 60 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)


LENGTH = struct.Struct(">I")


class WireError(ValueError):
    """The bytes are not of the expected protocol."""


def framed(*parts: bytes) -> bytes:
    """Return *parts* as one frame."""
    return b"".join((LENGTH.pack(sum(map(len, parts))), *parts))


def length_of(head: bytes | bytearray, bytes_max: int, *, bytes_min: int = 0) -> int:
    """Return the size in bytes of the body that *head*, the beginning of a frame, announces.

    Raises:
        WireError: It is not within *bytes_min* and *bytes_max*.
    """
    length: int = LENGTH.unpack_from(head)[0]
    if not bytes_min <= length <= bytes_max:
        raise WireError(f"a frame of {length} bytes")
    return length


def take_frame(buffer: bytearray, bytes_max: int) -> bytes | None:
    """Remove the first frame from *buffer* and return its body, None until it is complete.

    Raises:
        WireError: Its announced length is above *bytes_max*.
    """
    if len(buffer) < LENGTH.size:
        return None
    end = LENGTH.size + length_of(buffer, bytes_max)
    if len(buffer) < end:
        return None
    body = bytes(memoryview(buffer)[LENGTH.size : end])
    del buffer[:end]
    return body


class FrameGreeting:
    """A body of fixed layout that begins with the name of its protocol."""

    __slots__ = ("_layout", "_magic", "_what")

    def __init__(self, what: str, magic: bytes, fields: str) -> None:
        """*fields*: the `struct` format after *magic*; *what*: its name in errors."""
        self._what = what
        self._magic = magic
        self._layout = struct.Struct(f">{len(magic)}s{fields}")

    def pack(self, *values: bytes | int) -> bytes:
        """Return the body that holds *values*."""
        return self._layout.pack(self._magic, *values)

    def unpack(self, body: bytes) -> tuple[Any, ...]:
        """Return the values in *body*.

        Raises:
            WireError: It is of another protocol or size.
        """
        if len(body) != self._layout.size or not body.startswith(self._magic):
            raise WireError(f"not a {self._what}")
        return self._layout.unpack(body)[1:]
