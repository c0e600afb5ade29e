"""Peers of a transfer that misbehave after, or before, they have proved the token."""

import contextlib
import socket

from gpuops.checkpoint.transfer import wire
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.connection import TransferConnection
from gpuops.checkpoint.transfer.wire import TransferError, TransferFrameKind
from gpuops.host.net import job_proof as proof
from gpuops.host.net.frames import WireError, framed
from support.listening import Listening
from support.transfers import job_pass, limits, no_pace


class BadServer(Listening):
    """Hands each connection to *behave*; says how many came."""

    def __init__(self, behave):
        self._behave = behave
        super().__init__()

    def serve(self, sock):
        with contextlib.suppress(WireError, TransferError):
            self._behave(self, sock)


def opened(sock, epoch=3):
    """Return the server's side of a connection that was opened as it should be."""
    line = TransferConnection(sock, job_pass(epoch=epoch), limits())
    line.server_handshake(5.0, lambda: None)
    return line


def called(port, epoch=3, **bounds):
    """Return the client's side of a connection to *port*."""
    sock = socket.create_connection(("127.0.0.1", port), 10)
    line = TransferConnection(sock, job_pass(epoch=epoch), limits(**bounds))
    line.client_handshake()
    return line


def trickle(server, sock, data=b"\0"):
    """Send *data* again and again, a byte at a time, until the end."""
    while not server.ends.wait(0.1):
        for byte in data:
            sock.sendall(bytes([byte]))
            if server.ends.wait(0.1):
                return


def hold(server, _sock):
    """Accept, and neither read nor write."""
    server.ends.wait(60)


def babble(_server, sock):
    """Speak another protocol."""
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
    sock.recv(1 << 16)


def reset(_server, sock):
    """Send a reset at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def cut_in_the_handshake(_server, sock):
    """Answer the hello, and hang up in place of a welcome."""
    sock.recv(1 << 12)
    sock.sendall(framed(wire.TransferChallenge(bytes(32)).to_bytes()))
    sock.recv(1 << 12)


def impostor(_server, sock):
    """Open without the token, and say welcome all the same."""
    sock.recv(1 << 12)
    challenge = wire.TransferChallenge(bytes(32)).to_bytes()
    sock.sendall(framed(challenge))
    sock.recv(1 << 12)
    welcome = proof.welcome(proof.ProofWelcome.ACCEPTED, bytes(32))
    sock.sendall(framed(welcome))
    sock.recv(1 << 12)


def _copy_told(sock, copy):
    line = opened(sock)
    line.receive(5)
    digest = copy.digest
    line.send(TransferFrameKind.COPY, wire.copy_bytes(digest.nbytes, digest.root), digest.table)
    return line


def serves_one_byte_at_a_time(copy):
    """Answer the first request so slowly that it never ends."""

    def behave(server, sock):
        line = _copy_told(sock, copy)
        _kind, body = line.receive(5)
        line.send(TransferFrameKind.DATA, wire.GetChunks(*_range(body)).to_bytes())
        trickle(server, sock)

    return behave


def stops_after_a_request(copy):
    """Answer the first request with the beginning of a chunk and nothing after it."""

    def behave(server, sock):
        line = _copy_told(sock, copy)
        _kind, body = line.receive(5)
        line.send(TransferFrameKind.DATA, wire.GetChunks(*_range(body)).to_bytes())
        sock.sendall(bytes(100))
        server.ends.wait(60)

    return behave


def serves_other_chunks(copy):
    """Answer with a range that was not asked for."""

    def behave(_server, sock):
        line = _copy_told(sock, copy)
        line.receive(5)
        line.send(TransferFrameKind.DATA, wire.GetChunks(0, 4_000_000_000).to_bytes())
        line.receive(5)

    return behave


def serves_rubbish(copy):
    """Answer each request with as many bytes as it asks for, none of them right."""

    def behave(_server, sock):
        line = _copy_told(sock, copy)
        while True:
            _kind, body = line.receive(5)
            first, count = _range(body)
            line.send(TransferFrameKind.DATA, wire.GetChunks(first, count).to_bytes())
            rubbish = PinnedCopy(-1, copy.digest, view=memoryview(bytes(4096)))
            for begin in range(first * 4096, (first + count) * 4096, 4096):
                line.send_chunk(rubbish, 0, min(4096, copy.digest.nbytes - begin), no_pace())

    return behave


def lies_about_the_size(copy):
    """Say that the image is much longer."""

    def behave(_server, sock):
        line = opened(sock)
        line.receive(5)
        line.send(
            TransferFrameKind.COPY, wire.copy_bytes(copy.digest.nbytes * 1000, copy.digest.root)
        )
        line.receive(5)

    return behave


def huge_frame(_server, sock):
    """Announce a frame of 4 GB, after the opening."""
    line = opened(sock)
    line.receive(5)
    sock.sendall(b"\xff\xff\xff\xff" + bytes(1000))
    line.receive(5)


def wrong_tag(_server, sock):
    """Send a frame that is whole but has another tag."""
    line = opened(sock)
    line.receive(5)
    message = wire.HEAD.pack(job_pass().job, 3, TransferFrameKind.DONE)
    sock.sendall(framed(bytes(proof.TAG_BYTES), message))
    line.receive(5)


def says_done(_server, sock):
    """Claim at once that there is nothing to do."""
    line = opened(sock)
    line.receive(5)
    line.send(TransferFrameKind.DONE)
    line.receive(5)


def _range(body):
    get = wire.GetChunks.from_bytes(body)
    return get.first, get.count
