"""The server of a keeper's copies: serves its own, and receives replicas of others.

One thread per connection, because each is either inside one long system call or idle. An
unauthenticated peer may send two short frames of fixed length within a second; every input is
bounded before it is read. A slow or broken peer affects only its own connection, and idle clients
keep no peer out (`gpuops.host.net.admission`).
"""

import logging
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from gpuops.checkpoint.digest import digest_root
from gpuops.checkpoint.transfer import wire
from gpuops.checkpoint.transfer.chunks import (
    ChunkDamagedError,
    ChunkTracker,
    PinnedCopy,
    request_chunks,
    serve_chunks,
)
from gpuops.checkpoint.transfer.connection import (
    StaleEpochError,
    TransferConnection,
    TransferLimits,
)
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.parts import PartServer
from gpuops.checkpoint.transfer.wire import (
    JobCredentials,
    OpenCopy,
    PushOffer,
    TransferError,
    TransferFrameKind,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import CheckpointError, Digest, Shard, StateId
from gpuops.host.net.admission import AdmissionLimits, ConnectionAdmission
from gpuops.host.net.frames import WireError
from gpuops.host.net.job_proof import ProofWelcome

log = logging.getLogger(__name__)

_BACKLOG = 256
_PAUSE_S = 0.1
T = TypeVar("T")


class CopySource(Protocol):
    """The source of a server's copies; thread-safe."""

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return a verified copy, pinned; None where there is none."""
        ...


class Inbox(Protocol):
    """A replica that is received into a holder's memory, over any number of connections."""

    @property
    def tracker(self) -> ChunkTracker:
        """Return the chunks that have arrived."""
        ...

    def is_wanted(self) -> bool:
        """Return whether it is still needed; its memory may be needed for something newer."""
        ...

    def check(self) -> Generator[None, None, None]:
        """Verify the image of a received remainder, and yield after each chunk.

        Raises:
            TransferRefusedError: What the holder has itself is something else, or not there.
        """
        ...

    def complete(self) -> None:
        """Make it a copy once it is verified; may be repeated; raises `CheckpointError`."""
        ...

    def detach(self) -> None:
        """Report that one connection no longer writes into the memory."""
        ...


class ReplicaSink(Protocol):
    """The target of pushed replicas; thread-safe."""

    def accept(
        self, push_offer: PushOffer, digest: Digest, image: Digest | None = None
    ) -> Inbox | None:
        """Return the inbox for *push_offer*, to be left once; None where all of it is already here.

        *digest* is of the bytes to request, *image* of the whole image where they are its
        remainder. All connections that offer the same content get the same inbox.

        Raises:
            TransferRefusedError: It is not needed, or there is no room.
        """
        ...


@dataclass(slots=True)
class TransferCounters:
    """Counters of a server."""

    connections: int = 0  # accepted
    turned_away: int = 0  # because there were too many
    unauthenticated_cut: int = 0  # handshake failed or too slow, or its place was needed
    refused: int = 0  # requests
    sent_bytes: int = 0  # of images
    received_bytes: int = 0


class TransferServer:
    """Serves *source* and receives into *sink* (None: refuses replicas) until `close`.

    Raises:
        TransferError: The address cannot be listened on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        job: JobCredentials,
        source: CopySource,
        sink: ReplicaSink | None,
        pace: SendPace,
        limits: TransferLimits | None = None,
    ) -> None:
        self._job, self._source, self._sink, self._pace = job, source, sink, pace
        self._limits = limits or TransferLimits()
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._connections: dict[TransferConnection, threading.Thread] = {}
        self._admission = ConnectionAdmission[TransferConnection](
            AdmissionLimits(
                connections_max=self._limits.connections_max,
                unknown_max=self._limits.unknown_max,
                per_address_max=self._limits.unauthenticated_per_address_max,
            )
        )
        self._counters = TransferCounters()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as exc:
            raise TransferError(
                f"cannot listen on {address[0]} port {address[1]} for copies of checkpoints: {exc}"
            ) from exc
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="gpuops-copies", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        with self._lock:
            found = asdict(self._counters)
            found["sent_bytes"] += sum(connection.sent_bytes for connection in self._connections)
            found["received_bytes"] += sum(
                connection.received_bytes for connection in self._connections
            )
            return found

    def set_peers(self, addresses: Iterable[str]) -> None:
        """Keep places for connections from *addresses*, the nodes of the job."""
        with self._lock:
            self._admission.set_known(addresses)

    def close(self) -> None:
        """Stop listening, abort every connection, return when their threads have ended."""
        self._is_closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.abort()
        for thread in connections.values():
            thread.join()

    # Connections.

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as exc:
                # Too many open files, or the client is already gone: the others must not suffer.
                if not self._is_closing.wait(_PAUSE_S):
                    log.debug("a connection could not be accepted: %s", exc)
                continue
            try:
                self._admit(sock, str(address[0]))
            except (OSError, RuntimeError) as exc:
                # RuntimeError: no more threads.
                log.debug("a connection from %s was dropped: %s", address[0], exc)
                sock.close()

    def _admit(self, sock: socket.socket, address: str) -> None:
        limits = self._limits
        connection = TransferConnection(sock, self._job, limits)
        with self._lock:
            # Threads of connections that were cut off may still be about to end.
            is_room = len(self._connections) < limits.connections_max + limits.unknown_max
            cut_off = self._admission.admit(connection, address) if is_room else None
            if cut_off is None:
                self._counters.turned_away += 1
            else:
                is_known = self._admission.is_known(address)
                handshake_s = limits.handshake_s if is_known else limits.unknown_handshake_s
                thread = threading.Thread(
                    target=self._serve,
                    args=(connection, address, handshake_s),
                    name="gpuops-copy",
                    daemon=True,
                )
                self._connections[connection] = thread
                self._counters.connections += 1
                for oldest in cut_off:
                    oldest.abort()
        if cut_off is None:
            with suppress(OSError):
                connection.reject(ProofWelcome.BUSY)
            connection.close()
            return
        try:
            thread.start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _serve(self, connection: TransferConnection, address: str, handshake_s: float) -> None:
        try:
            try:
                # Recorded before the client learns it: from then on it must not be cut off.
                connection.server_handshake(
                    handshake_s,
                    lambda: self._authenticate(connection),
                    lambda: self._refresh(connection),
                )
            except (OSError, WireError):
                self._count("unauthenticated_cut")
                raise
            self._serve_requests(connection)
        except (OSError, WireError) as exc:
            log.debug("the connection from %s ends: %s", address, exc)
        except Exception:  # boundary: one peer's bytes must not end the serving of all
            log.exception("a connection from %s failed", address)
        finally:
            with self._lock:
                # Before it is closed: its descriptor may be another connection's next.
                self._admission.remove(connection)
            connection.close()
            self._forget(connection)

    def _refresh(self, connection: TransferConnection) -> None:
        with self._lock:
            self._admission.refresh(connection)

    def _authenticate(self, connection: TransferConnection) -> None:
        with self._lock:
            if not self._admission.authenticate(connection):
                raise ConnectionAbortedError("a newer connection took its place")

    def _forget(self, connection: TransferConnection) -> None:
        with self._lock:
            self._admission.remove(connection)
            if self._connections.pop(connection, None) is not None:
                self._counters.sent_bytes += connection.sent_bytes
                self._counters.received_bytes += connection.received_bytes

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self._counters, name, getattr(self._counters, name) + 1)

    # Requests.

    def _serve_requests(self, connection: TransferConnection) -> None:
        pinned: list[PinnedCopy] = []
        parts: PartServer | None = None
        try:
            while True:
                try:
                    kind, body = connection.receive(self._limits.idle_s)
                    if kind is TransferFrameKind.OPEN:
                        parts = self._open(connection, body, pinned)
                    elif kind is TransferFrameKind.GET and pinned:
                        serve_chunks(
                            connection, body, pinned[0], self._pace, self._limits.chunk_bytes
                        )
                    elif kind is TransferFrameKind.GET_PART and pinned and parts is not None:
                        parts.serve(connection, body, self._pace)
                    elif kind is TransferFrameKind.PUSH:
                        self._receive_push(connection, body)
                    elif kind is not TransferFrameKind.WAIT:
                        raise WireError(f"unexpected {kind.name}")
                except TransferRefusedError as exc:
                    self._refuse(connection, exc)
                    if isinstance(exc, StaleEpochError):
                        return
        finally:
            _release_all(pinned)

    def _refuse(self, connection: TransferConnection, error: TransferRefusedError) -> None:
        self._count("refused")
        connection.send(TransferFrameKind.REFUSED, wire.refused_bytes(error.code, str(error)))

    def _open(
        self, connection: TransferConnection, body: bytes, pinned: list[PinnedCopy]
    ) -> PartServer:
        wanted = OpenCopy.from_bytes(body)
        _release_all(pinned)
        self._check_chunks(wanted.chunk_bytes)
        copy = _or_refused(lambda: self._source.open(wanted.state, wanted.shard))
        if copy is None:
            raise TransferRefusedError(
                TransferRefusal.NOT_HERE,
                f"it has no copy of {wanted.shard.file_name} of {wanted.state}",
            )
        pinned.append(copy)
        digest = copy.digest
        if wanted.root not in ("", digest.root):
            _release_all(pinned)
            raise TransferRefusedError(
                TransferRefusal.DIFFERENT,
                f"its copy has the root {digest.root[:16]}…, not {wanted.root[:16]}…",
            )
        connection.send(
            TransferFrameKind.COPY, wire.copy_bytes(digest.nbytes, digest.root), digest.table
        )
        return PartServer(copy, self._limits.chunk_bytes)

    def _receive_push(self, connection: TransferConnection, body: bytes) -> None:
        offer, chunk_bytes = PushOffer.from_bytes(body)
        self._check_chunks(chunk_bytes)
        digest = _receive_digest(connection, offer.nbytes, offer.root, chunk_bytes)
        image = None
        if offer.is_remainder:
            image = _receive_digest(connection, offer.image_nbytes, offer.image_root, chunk_bytes)
        sink = self._sink
        if sink is None:
            raise TransferRefusedError(TransferRefusal.NOT_WANTED, "it stores no replicas")
        inbox = _or_refused(lambda: sink.accept(offer, digest, image))
        if inbox is None:
            connection.send(TransferFrameKind.DONE)
            return
        try:
            request_chunks(connection, inbox.tracker, inbox.is_wanted)
            with closing(inbox.check()) as checked:
                for _chunk in checked:
                    connection.send(TransferFrameKind.FOUND)
            _or_refused(inbox.complete)
        except ChunkDamagedError as exc:
            inbox.tracker.reset_errors()
            raise TransferRefusedError(TransferRefusal.DAMAGED, str(exc)) from exc
        finally:
            inbox.detach()
        connection.send(TransferFrameKind.DONE)

    def _check_chunks(self, chunk_bytes: int) -> None:
        if chunk_bytes != self._limits.chunk_bytes:
            raise TransferRefusedError(
                TransferRefusal.DIFFERENT,
                f"chunks of {chunk_bytes} bytes, not of {self._limits.chunk_bytes}",
            )


def _receive_digest(
    connection: TransferConnection, nbytes: int, root: str, chunk_bytes: int
) -> Digest:
    table = connection.receive_bytes(wire.table_bytes(nbytes, chunk_bytes))
    if digest_root(nbytes, table) != root:
        # The table is not part of a frame: no tag detects that it was corrupted in transit.
        raise WireError("a table with another root")
    return Digest(nbytes, table, root)


def _release_all(pinned: list[PinnedCopy]) -> None:
    while pinned:
        pinned.pop().release()


def _or_refused(call: Callable[[], T]) -> T:
    """Return the result of *call*; a refusal is sent to the other side."""
    try:
        return call()
    except TransferRefusedError:
        raise
    except CheckpointError as exc:
        raise TransferRefusedError(TransferRefusal.FAILED, str(exc)) from exc
