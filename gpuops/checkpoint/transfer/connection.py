"""One connection between two keepers: the handshake, frames, and the bytes of images.

Every wait is bounded: a peer that accepts and never reads, sends one byte a second, or is stopped
delays only the user of its own connection, by at most `Limits.stall_s`. The socket is blocking,
with kernel timeouts, because a thread that receives a whole slice in one system call leaves the
interpreter to the other connections meanwhile.
"""

import errno
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from blake3 import blake3

from gpuops.checkpoint.transfer import wire
from gpuops.checkpoint.transfer.pacing import RECHECK_S, SendPace, set_socket_pacing
from gpuops.checkpoint.transfer.wire import (
    JobCredentials,
    TransferFrameKind,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import CHUNK_BYTES
from gpuops.host.net import frames
from gpuops.host.net import job_proof as proof
from gpuops.host.net.admission import UNKNOWN_HANDSHAKE_S
from gpuops.host.net.frames import WireError, configure_socket
from gpuops.host.net.job_proof import JobHandshake, ProofChannel, ProofWelcome

# Of image bytes: at most this many between two checks of the time, the pace and the hash.
SLICE_BYTES = 2**18
# sendfile(2) starts its timeout anew with each filling of its pipe, so calls are kept short.
_SEND_RECHECK_S = 1.0
_FRAME_BYTES_MIN = proof.TAG_BYTES + wire.HEAD.size
_TIMEVAL = struct.Struct("@ll")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """One side's limits for the other; connections are counted by a server only.

    Both sides must cut images into chunks of the same size.
    """

    handshake_s: float = 5.0  # for the whole handshake, of a node of the job
    unknown_handshake_s: float = UNKNOWN_HANDSHAKE_S
    stall_s: float = 10.0  # for a frame that has begun, or for `SLICE_BYTES` of an image
    idle_s: float = 30.0  # without a request
    connections_max: int = 256
    unknown_max: int = 64
    unauthenticated_per_address_max: int = 32
    chunk_bytes: int = CHUNK_BYTES


class UnauthenticatedError(WireError):
    """The other side is not a keeper of this job, or does not know its token."""


class StaleEpochError(TransferRefusedError):
    """The other side's epoch is over; it may not know the new one yet."""


class TooManyConnectionsError(ConnectionError):
    """It has too many connections."""


class Hasher(Protocol):
    """Is updated with every received byte."""

    def update(self, data: memoryview, /) -> None: ...


class SendableImage(Protocol):
    """The bytes to send: a descriptor, and their mapping if there is one; or *read*.

    *read* returns a copy of so many bytes from an offset on, where they are not in one memory.
    """

    @property
    def fd(self) -> int: ...

    @property
    def view(self) -> memoryview | None: ...

    @property
    def read(self) -> Callable[[int, int], memoryview] | None: ...


class TransferConnection:
    """A connection on which both sides have proved that they know the job's token.

    One thread uses it; any other may `abort` it. After an exception it must be closed: OSError
    (TimeoutError where the peer is slow), `WireError`, or an exception of the caller's objects.
    """

    def __init__(self, sock: socket.socket, job: JobCredentials, limits: TransferLimits) -> None:
        self._socket = sock
        self._job = job
        self.limits = limits
        self.sent_bytes = 0  # of images
        self.received_bytes = 0
        self._out = self._in = ProofChannel(b"")
        self._is_aborted = threading.Event()
        self._rate: float | None = None
        self._receive_s = 0.0
        sock.settimeout(None)
        ends = _addresses(sock)
        self._is_local = ends[0] == ends[1]
        self._is_tagged = is_on_network(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _packed_s(_SEND_RECHECK_S))
        configure_socket(sock)

    def abort(self) -> None:
        """Close it from another thread: a thread that waits on it gets an OSError at once."""
        self._is_aborted.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, from the thread that uses it."""
        self._socket.close()

    # Handshake.

    def client_handshake(self) -> None:
        """Handshake as the client.

        Raises:
            UnauthenticatedError: The other side is not a keeper of this job, or has another token.
            TooManyConnectionsError: It has too many connections.
        """
        deadline_s = time.monotonic() + self.limits.handshake_s
        hello = wire.TransferHello(self._job.job, proof.nonce()).to_bytes()
        self._send_short(hello, deadline_s)
        received = self._receive_opening(deadline_s)
        if len(received) == 1 + proof.PROOF_BYTES:
            self._raise_rejected(proof.read_welcome(received)[0])
        _parse_opening(wire.TransferChallenge.from_bytes, received)
        handshake = JobHandshake(self._job.key, hello + received)
        self._send_short(handshake.proof("client"), deadline_s)
        code, server_proof = _parse_opening(proof.read_welcome, self._receive_opening(deadline_s))
        self._raise_rejected(code)
        if code is not ProofWelcome.ACCEPTED or not proof.same(
            server_proof, handshake.proof("server")
        ):
            raise UnauthenticatedError("it does not know the job's token")
        self._out, self._in = handshake.channel("client"), handshake.channel("server")

    def server_handshake(
        self,
        within_s: float,
        on_proof: Callable[[], None],
        on_hello: Callable[[], None] = lambda: None,
    ) -> None:
        """Handshake as the server; *on_proof* is called before the client is accepted.

        *on_hello* is called once it has named this job. Raises `UnauthenticatedError` after telling
        the client why.
        """
        deadline_s = time.monotonic() + within_s
        received = self._receive_opening(deadline_s)
        hello = _parse_opening(wire.TransferHello.from_bytes, received)
        if not proof.same(hello.job, self._job.job):
            self.reject(ProofWelcome.OTHER_JOB)
            raise UnauthenticatedError("it is of another job")
        on_hello()
        challenge = wire.TransferChallenge(proof.nonce()).to_bytes()
        handshake = JobHandshake(self._job.key, received + challenge)
        self._send_short(challenge, deadline_s)
        if not proof.same(self._receive_opening(deadline_s), handshake.proof("client")):
            self.reject(ProofWelcome.WRONG_TOKEN)
            raise UnauthenticatedError("it does not know the job's token")
        on_proof()
        self._send_short(
            proof.welcome(ProofWelcome.ACCEPTED, handshake.proof("server")), deadline_s
        )
        self._out, self._in = handshake.channel("server"), handshake.channel("client")

    def reject(self, code: ProofWelcome) -> None:
        """Send the reason why the client is rejected."""
        self._send_short(proof.welcome(code), time.monotonic() + _SEND_RECHECK_S)

    # Frames.

    def send(self, kind: TransferFrameKind, body: bytes = b"", tail: bytes = b"") -> None:
        """Send a frame, and *tail* (a table) after it."""
        message = wire.HEAD.pack(self._job.job, self._job.epoch, kind) + body
        self._write(self._out.frame(message) + tail, time.monotonic() + self.limits.stall_s)

    def receive(self, wait_s: float) -> tuple[TransferFrameKind, bytes]:
        """Return the next frame, which must begin within *wait_s*.

        Raises:
            TransferRefusedError: It is a refusal; or `OLD_EPOCH`: the other side's epoch is over.
        """
        head = self._read(frames.LENGTH.size, wait_s)
        length = frames.length_of(head, wire.FRAME_BYTES_MAX, bytes_min=_FRAME_BYTES_MIN)
        message = self._in.message(self._read(length, self.limits.stall_s))
        job, epoch, number = wire.HEAD.unpack_from(message)
        if job != self._job.job:
            raise WireError("a message of another job")
        try:
            kind = TransferFrameKind(number)
        except ValueError as exc:
            raise WireError(str(exc)) from exc
        if kind is TransferFrameKind.REFUSED:
            raise wire.read_refused(message[wire.HEAD.size :])
        if epoch < self._job.epoch:
            raise StaleEpochError(
                TransferRefusal.OLD_EPOCH,
                f"a message of epoch {epoch} is refused: epoch {self._job.epoch} has begun",
            )
        return kind, message[wire.HEAD.size :]

    # Bytes outside of frames.

    def receive_bytes(self, nbytes: int) -> bytes:
        """Return so many bytes that follow a frame: a table, whose size was checked."""
        return self._read(nbytes, self.limits.stall_s)

    def receive_chunk(self, view: memoryview, hasher: Hasher) -> bool:
        """Fill *view*; return whether these are the bytes that the other side sent.

        *hasher* is updated with each slice while it is in the cache.
        """
        sent = blake3()
        for begin in range(0, len(view), SLICE_BYTES):
            # Released at once, also on an error: the memory's owner may want to unmap it.
            with view[begin : begin + SLICE_BYTES] as slice_view:
                self._read_into(slice_view, self.limits.stall_s)
                self.received_bytes += len(slice_view)
                hasher.update(slice_view)
                if self._is_tagged:
                    sent.update(slice_view)
        if not self._is_tagged:
            return True
        expected = self._in.tag(sent.digest())
        return proof.same(self._read(proof.TAG_BYTES, self.limits.stall_s), expected)

    def send_chunk(self, image: SendableImage, offset: int, nbytes: int, pace: SendPace) -> None:
        """Send *nbytes* bytes of *image* from *offset* on, no faster than *pace*, and their tag.

        A network card gathers the pages itself (sendfile(2)). Within one machine each page of 4 KiB
        would be copied separately: a third slower than sending from the mapping.
        """
        if pace.bytes_per_s != self._rate:
            self._rate = pace.bytes_per_s
            set_socket_pacing(self._socket, self._rate)
        sent, end = blake3(), offset + nbytes
        while offset < end:
            n_bytes = min(SLICE_BYTES, end - offset)
            position = pace.enqueue(n_bytes)
            while (wait_s := pace.wait_s(position)) > 0:
                if self._is_aborted.wait(min(wait_s, RECHECK_S)):
                    raise ConnectionAbortedError("the connection was cut")
            if self._is_tagged:
                with slice_of(image, offset, n_bytes) as slice_view:
                    sent.update(slice_view)
            if image.read is not None or (self._is_local and image.view is not None):
                with slice_of(image, offset, n_bytes) as slice_view:
                    self._write(slice_view, time.monotonic() + self.limits.stall_s)
            else:
                self._send_file(image.fd, offset, n_bytes)
            self.sent_bytes += n_bytes
            offset += n_bytes
        if self._is_tagged:
            tag = self._out.tag(sent.digest())
            self._write(tag, time.monotonic() + self.limits.stall_s)

    def _send_file(self, fd: int, offset: int, nbytes: int) -> None:
        sock = self._socket.fileno()

        def push(done: int) -> int:
            sent = os.sendfile(sock, fd, offset + done, nbytes - done)
            if sent == 0:
                raise WireError("the image ends before its length")
            return sent

        self._send_all(push, nbytes, time.monotonic() + self.limits.stall_s)

    def _write(self, data: bytes | memoryview, deadline_s: float) -> None:
        with memoryview(data) as view:

            def push(done: int) -> int:
                with view[done:] as rest:
                    return self._socket.send(rest)

            self._send_all(push, len(data), deadline_s)

    def _send_all(self, push: Callable[[int], int], nbytes: int, deadline_s: float) -> None:
        """Call *push* with the number of bytes done until all are; it returns how many it did."""
        done = 0
        while True:
            with suppress(BlockingIOError):
                done += push(done)
            if done == nbytes:
                return
            if time.monotonic() >= deadline_s:
                raise TimeoutError("the other side read too little in time")

    def _send_short(self, body: bytes, deadline_s: float) -> None:
        self._write(frames.framed(body), deadline_s)

    def _receive_opening(self, deadline_s: float) -> bytes:
        head = self._read(frames.LENGTH.size, deadline_s - time.monotonic())
        length = _parse_opening(partial(frames.length_of, bytes_max=wire.OPENING_BYTES_MAX), head)
        return self._read(length, deadline_s - time.monotonic())

    def _raise_rejected(self, code: ProofWelcome) -> None:
        if code is ProofWelcome.BUSY:
            raise TooManyConnectionsError("it has too many connections")
        if code is ProofWelcome.OTHER_JOB:
            raise UnauthenticatedError("it is of another job")
        if code is ProofWelcome.WRONG_TOKEN:
            raise UnauthenticatedError("it has another token")

    def _read(self, nbytes: int, wait_s: float) -> bytes:
        data = bytearray(nbytes)
        self._read_into(memoryview(data), wait_s)
        return bytes(data)

    def _read_into(self, view: memoryview, wait_s: float) -> None:
        """Fill *view* within *wait_s*; the kernel applies its timeout to each call."""
        begin_s = time.monotonic()
        left_s = wait_s
        received = 0
        while received < len(view):
            if left_s <= 0:
                raise TimeoutError(f"the other side sent too little for {wait_s:.3g} s")
            self._wait_at_most(left_s)
            with suppress(BlockingIOError):
                with view[received:] as rest:
                    n_bytes = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
                if n_bytes == 0:
                    raise ConnectionResetError("the other side closed the connection")
                received += n_bytes
            if received < len(view):
                left_s = begin_s + wait_s - time.monotonic()

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._receive_s:
            self._receive_s = seconds
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _packed_s(seconds))


def is_on_network(sock: socket.socket) -> bool:
    """Return whether others may change what *sock* sends and receives: chunks get a tag then.

    The hashes of a digest are for accidents: other bytes with the same xxh3 are made in
    microseconds. A tag costs each side a BLAKE3 of the chunk, 0.1 s of a core for 1 GB.
    """
    return not all(
        ipaddress.ip_address(end.partition("%")[0]).is_loopback for end in _addresses(sock)
    )


def _addresses(sock: socket.socket) -> tuple[str, str]:
    """Return the addresses of this side and of the other.

    Raises:
        ConnectionResetError: The other side has reset the connection already.
    """
    try:
        return sock.getsockname()[0], sock.getpeername()[0]
    except OSError as exc:
        if exc.errno != errno.ENOTCONN:
            raise
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from exc


def slice_of(image: SendableImage, offset: int, nbytes: int) -> memoryview:
    """Return *nbytes* bytes of *image* from *offset* on; raises `WireError` if it ends before."""
    if image.read is not None:
        return image.read(offset, nbytes)
    if image.view is not None:
        return image.view[offset : offset + nbytes]
    data = os.pread(image.fd, nbytes, offset)
    if len(data) < nbytes:
        raise WireError("the image ends before its length")
    return memoryview(data)


def _packed_s(seconds: float) -> bytes:
    # Zero would mean: wait for ever.
    micros = max(round(seconds * 1e6), 1000)
    return _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)


def _parse_opening(read: Callable[[bytes], T], data: bytes) -> T:
    try:
        return read(data)
    except WireError as exc:
        raise UnauthenticatedError("it is not a gpuops keeper") from exc
