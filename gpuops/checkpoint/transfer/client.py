"""Fetch a copy from another node's memory, or push a replica there, over several connections.

Bytes are never sent twice: a chunk counts once its hash matches the digest, and only the others are
requested after a broken connection, a restarted peer, or from the next holder.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpuops.checkpoint.digest import check_digest, chunk_count, digest_root
from gpuops.checkpoint.transfer import wire
from gpuops.checkpoint.transfer.chunks import ChunkTracker, PinnedCopy, request_chunks, serve_chunks
from gpuops.checkpoint.transfer.connection import TransferConnection
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.parallel import ParallelConnections, TransferOptions
from gpuops.checkpoint.transfer.wire import (
    JobCredentials,
    OpenCopy,
    PushOffer,
    TransferError,
    TransferFrameKind,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import (
    CorruptError,
    Digest,
    KeeperAddress,
    Shard,
    ShardCopy,
    StateId,
)
from gpuops.host.net.frames import WireError


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a fetch."""

    seconds: float
    received_bytes: int
    found_bytes: int  # left here by an earlier transfer
    n_damaged: int  # chunks that arrived corrupt and were requested again
    served: tuple[tuple[str, int], ...]  # bytes by each peer that was asked, in order
    failed: tuple[str, ...]  # the errors of those that failed


@dataclass(frozen=True, slots=True)
class PushResult:
    """The result of a push, verified by the holder."""

    seconds: float
    sent_bytes: int  # of the image; 0 where the holder already had it


def fetch(
    peers: Sequence[KeeperAddress],
    job: JobCredentials,
    wanted: ShardCopy,
    target: memoryview,
    options: TransferOptions,
    *,
    resume: bool = False,
) -> FetchResult:
    """Fill *target* with the bytes of *wanted*, from the first of *peers* that can serve it.

    Where one fails, the next is asked for the missing chunks; the holder that *wanted* names is
    ignored. With *resume* the content of *target* is verified first. After this returns or raises,
    *target* is no longer written.

    Raises:
        CorruptError: The last corruption found, with the chunk and the holder.
        TransferError: No peer had it, or could be reached, within the limits.
    """
    began_s = time.monotonic()
    digest, chunk_bytes = wanted.digest, options.limits.chunk_bytes
    tracker = ChunkTracker(target, digest, chunk_bytes=chunk_bytes)
    if resume:
        tracker.find_present()

    def work(connection: TransferConnection) -> None:
        open_copy(connection, wanted)
        request_chunks(connection, tracker, lambda: True)

    what = f"{wanted.shard.file_name} of {wanted.state}"
    served: list[tuple[str, int]] = []
    failed: list[tuple[KeeperAddress, Exception]] = []
    for peer in peers:
        if tracker.is_complete:
            break
        before = tracker.received_bytes
        connections = ParallelConnections(peer, job, options, work, lambda: tracker.received_bytes)
        try:
            connections.run(
                min(options.n_connections, tracker.n_missing), began_s + options.deadline_s
            )
        except (TransferError, CorruptError) as exc:
            if isinstance(exc, TransferRefusedError) and exc.code is TransferRefusal.OLD_EPOCH:
                raise TransferRefusedError(exc.code, f"{what} is not served: {exc}") from exc
            failed.append((peer, exc))
            tracker.reset_errors()
        served.append((peer.name, tracker.received_bytes - before))
    if not tracker.is_complete:
        raise no_copy_error(what, failed)
    tracker.check_root()
    return FetchResult(
        seconds=time.monotonic() - began_s,
        received_bytes=tracker.received_bytes,
        found_bytes=tracker.found_bytes,
        n_damaged=tracker.n_damaged,
        served=tuple(served),
        failed=tuple(_describe_failure(peer, error) for peer, error in failed),
    )


def open_copy(connection: TransferConnection, wanted: ShardCopy) -> None:
    """Have the other side serve the copy with the digest of *wanted* over *connection*.

    Raises:
        TransferRefusedError: It has no such copy.
        WireError, OSError: The connection has failed.
    """
    digest, chunk_bytes = wanted.digest, connection.limits.chunk_bytes
    request = OpenCopy(wanted.state, wanted.shard, chunk_bytes, digest.root)
    connection.send(TransferFrameKind.OPEN, request.to_bytes())
    kind, body = connection.receive(connection.limits.stall_s)
    if kind is not TransferFrameKind.COPY or wire.read_copy(body) != (digest.nbytes, digest.root):
        raise WireError("not the requested copy")
    # We already have it: a different one would have another root.
    connection.receive_bytes(len(digest.table))


def fetch_digest(
    peer: KeeperAddress,
    job: JobCredentials,
    wanted: tuple[StateId, Shard],
    root: str,
    options: TransferOptions,
) -> Digest:
    """Return the complete digest of the copy with this *root*, where only the root is known.

    With *root* "" that of any copy that *peer* has.

    Raises:
        TransferError: *peer* has no such copy, or cannot be reached, within the limits.
    """
    found: list[Digest] = []
    chunk_bytes = options.limits.chunk_bytes

    def work(connection: TransferConnection) -> None:
        connection.send(TransferFrameKind.OPEN, OpenCopy(*wanted, chunk_bytes, root).to_bytes())
        kind, body = connection.receive(connection.limits.stall_s)
        if kind is not TransferFrameKind.COPY:
            raise WireError("not the requested copy")
        nbytes, received_root = wire.read_copy(body)
        table = connection.receive_bytes(wire.table_bytes(nbytes, chunk_bytes))
        digest = Digest(nbytes, table, received_root)
        if root not in ("", received_root) or digest_root(nbytes, table) != received_root:
            raise WireError("an inconsistent digest")
        found.append(digest)

    try:
        ParallelConnections(peer, job, options, work, lambda: len(found)).run(
            1, time.monotonic() + options.deadline_s
        )
    except (TransferError, CorruptError) as exc:
        raise no_copy_error(
            f"the digest of {wanted[1].file_name} of {wanted[0]}", [(peer, exc)]
        ) from exc
    return found[0]


def push(  # noqa: PLR0913 what, from where to where, and within which limits
    peer: KeeperAddress,
    job: JobCredentials,
    offer: PushOffer,
    copy: PinnedCopy,
    options: TransferOptions,
    pace: SendPace,
    *,
    image: Digest | None = None,
) -> PushResult:
    """Push the replica *offer* to *peer*, from *copy*; return once it has verified all of it.

    *copy* must stay pinned until this returns or raises; it is not released here. *image*: the
    digest of the image, where *offer* is of its remainder.

    Raises:
        TransferRefusedError: The holder refuses it; the code says why.
        CorruptError: It arrives corrupt repeatedly, or *copy* itself is corrupt.
        TransferError: The holder cannot be reached, or not within the limits.
    """
    began_s = time.monotonic()
    digest, chunk_bytes = copy.digest, options.limits.chunk_bytes
    check_digest(digest, chunk_bytes=chunk_bytes)
    request = offer.to_bytes(chunk_bytes)
    tables = digest.table + (image.table if image is not None else b"")
    sent = _SharedSum()

    def work(connection: TransferConnection) -> None:
        connection.send(TransferFrameKind.PUSH, request, tables)
        wait_s = connection.limits.idle_s
        while True:
            kind, body = connection.receive(wait_s)
            wait_s = connection.limits.stall_s
            if kind is TransferFrameKind.DONE:
                return
            if kind is TransferFrameKind.GET:
                sent.add(_serve_and_count(connection, body, copy, pace, chunk_bytes))
            elif kind is TransferFrameKind.FOUND:
                pace.enqueue(0)  # progress, though nothing is sent
            elif kind is not TransferFrameKind.WAIT:
                raise WireError(f"unexpected {kind.name}")

    what = f"the replica of {offer.shard.file_name} of {offer.state}"
    n_chunks = chunk_count(digest.nbytes, chunk_bytes=chunk_bytes)
    connections = ParallelConnections(peer, job, options, work, lambda: sent.total)
    with _explained(what, peer):
        connections.run(min(options.n_connections, n_chunks), began_s + options.deadline_s)
    return PushResult(time.monotonic() - began_s, sent.total)


@contextmanager
def _explained(what: str, peer: KeeperAddress) -> Iterator[None]:
    """Have errors of pushing *what* to *peer* say so."""
    try:
        yield
    except TransferRefusedError as exc:
        if exc.code is TransferRefusal.DAMAGED:
            raise CorruptError(f"{what} arrived corrupt at {peer}: {exc}") from exc
        raise TransferRefusedError(exc.code, f"{peer} refuses {what}: {exc}") from exc
    except CorruptError as exc:
        raise CorruptError(f"{what} cannot be pushed to {peer}: {exc}") from exc
    except TransferError as exc:
        raise TransferError(f"{what} could not be pushed to {peer}: {exc}") from exc


def _serve_and_count(
    connection: TransferConnection, body: bytes, copy: PinnedCopy, pace: SendPace, chunk_bytes: int
) -> int:
    before = connection.sent_bytes
    try:
        serve_chunks(connection, body, copy, pace, chunk_bytes)
    except TransferRefusedError as exc:
        connection.send(TransferFrameKind.REFUSED, wire.refused_bytes(exc.code, str(exc)))
        raise CorruptError(str(exc)) from exc
    return connection.sent_bytes - before


class _SharedSum:
    """A thread-safe sum."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self.total += number


def no_copy_error(
    what: str, failed: Sequence[tuple[KeeperAddress, Exception]]
) -> TransferError | CorruptError:
    """Return the error that *what* could not be fetched from any peer, with the reason of each."""
    reasons = (
        "; ".join(_describe_failure(peer, error) for peer, error in failed) or "no peer has it"
    )
    text = f"{what} could not be fetched: {reasons}"
    is_damaged = any(
        isinstance(error, CorruptError)
        or (isinstance(error, TransferRefusedError) and error.code is TransferRefusal.DAMAGED)
        for _peer, error in failed
    )
    return CorruptError(text) if is_damaged else TransferError(text)


def _describe_failure(peer: KeeperAddress, error: Exception) -> str:
    return f"{peer}: {error}"
