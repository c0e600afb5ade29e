"""Track which chunks of an image have arrived; request the missing ones, and serve them.

The hash is computed over the target memory itself, after the bytes were written to it; a chunk is
written by one connection at a time, and never again once it is verified.
"""

import heapq
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from gpuops.checkpoint.digest import HASH_BYTES, check_digest, chunk_count, chunk_hash, digest_root
from gpuops.checkpoint.transfer import wire
from gpuops.checkpoint.transfer.connection import TransferConnection
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.wire import (
    RANGE_BYTES_MAX,
    GetChunks,
    TransferFrameKind,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError, Digest
from gpuops.host.net.frames import WireError

TRIES_MAX = 6
_SHARES = 16


class ChunkDamagedError(CorruptError):
    """A chunk arrived corrupt repeatedly, while the other side reports its own copy as intact."""


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Chunks that one connection requests."""

    first: int
    count: int
    is_suspect: bool


class ChunkTracker:
    """The chunks of the image with *digest* in the memory *view*; thread-safe.

    Raises:
        CorruptError: The digest is not self-consistent.
        ValueError: *view* has another length, or is read-only.
    """

    def __init__(
        self,
        view: memoryview,
        digest: Digest,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        tries_max: int = TRIES_MAX,
    ) -> None:
        check_digest(digest, chunk_bytes=chunk_bytes)
        if view.nbytes != digest.nbytes or view.readonly:
            raise ValueError(f"{digest.nbytes} bytes do not fit a view of {view.nbytes}")
        self.view, self.digest, self.chunk_bytes = view, digest, chunk_bytes
        self.n_chunks = chunk_count(digest.nbytes, chunk_bytes=chunk_bytes)
        self._tries_max = tries_max
        self._change = threading.Condition()
        self._unclaimed = list(range(self.n_chunks))
        self._claimed: set[int] = set()
        self._n_errors: dict[int, int] = {}
        self._table = bytearray(len(digest.table))
        self._n_complete = 0
        self.received_bytes = 0  # received and verified
        self.found_bytes = 0  # already there
        self.n_damaged = 0  # chunks that arrived corrupt, counted each time

    @property
    def is_complete(self) -> bool:
        """Return whether every chunk is here and verified."""
        return self._n_complete == self.n_chunks

    @property
    def n_missing(self) -> int:
        """Return how many chunks are missing."""
        return self.n_chunks - self._n_complete

    def find_present(self, candidates: Iterable[int] | None = None) -> int:
        """Verify the view (*candidates* only, if given); return how many bytes are intact.

        For a resumed transfer; no requests may be outstanding.
        """
        found = set()
        for number in range(self.n_chunks) if candidates is None else candidates:
            hashed = chunk_hash(self.chunk(number))
            if hashed == self._expected(number):
                found.add(number)
        with self._change:
            found &= set(self._unclaimed)
            self._unclaimed = sorted(set(self._unclaimed) - found)
            for number in found:
                self._mark_complete(number, self._expected(number))
                self.found_bytes += len(self.chunk(number))
        return len(found)

    def chunk(self, number: int) -> memoryview:
        """Return the memory of the chunk *number*."""
        return self.view[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    def claim(self) -> ChunkRange | None:
        """Return what to request next, None where every missing chunk is already requested.

        Raises:
            ChunkDamagedError: It arrived corrupt too often, on any connection.
        """
        with self._change:
            if not self._unclaimed:
                return None
            self._check_tries(self._unclaimed[0])
            first = heapq.heappop(self._unclaimed)
            self._claimed.add(first)
            if first in self._n_errors:
                return ChunkRange(first, 1, is_suspect=True)
            # Request several small chunks at a time, but leave work for the other connections.
            count_max = min(RANGE_BYTES_MAX // self.chunk_bytes, len(self._unclaimed) // _SHARES)
            count = 1
            while (
                count < count_max
                and self._unclaimed[0] == first + count
                and self._unclaimed[0] not in self._n_errors
            ):
                self._claimed.add(heapq.heappop(self._unclaimed))
                count += 1
            return ChunkRange(first, count, is_suspect=False)

    def record(self, number: int, hashed: bytes) -> None:
        """Record that a claimed chunk has arrived with this hash.

        Raises:
            ChunkDamagedError: It arrived corrupt too often.
        """
        with self._change:
            self._claimed.remove(number)
            if hashed == self._expected(number):
                self._n_errors.pop(number, None)
                self.received_bytes += len(self.chunk(number))
                self._mark_complete(number, hashed)
                return
            heapq.heappush(self._unclaimed, number)
            self.n_damaged += 1
            self._n_errors[number] = self._n_errors.get(number, 0) + 1
            self._change.notify()
            self._check_tries(number)

    def _check_tries(self, number: int) -> None:
        n_errors = self._n_errors.get(number, 0)
        if n_errors >= self._tries_max:
            raise ChunkDamagedError(
                f"chunk {number} of {self.n_chunks} arrived corrupt {n_errors} times"
            )

    def release(self, chunk_range: ChunkRange) -> None:
        """Release the missing chunks of *chunk_range* to others: its connection is gone."""
        with self._change:
            unreceived = self._claimed.intersection(
                range(chunk_range.first, chunk_range.first + chunk_range.count)
            )
            self._claimed -= unreceived
            for number in unreceived:
                heapq.heappush(self._unclaimed, number)
            self._change.notify_all()

    def reset_errors(self) -> None:
        """Reset the counts of corrupt chunks: another holder is asked."""
        with self._change:
            self._n_errors.clear()

    def wait(self, seconds: float) -> None:
        """Return when there is something to claim, when all is verified, or after *seconds*."""
        with self._change:
            self._change.wait_for(lambda: bool(self._unclaimed) or self.is_complete, seconds)

    def check_root(self) -> None:
        """Compare the root of the received chunks; raises `CorruptError`."""
        root = digest_root(self.digest.nbytes, bytes(self._table))
        if not self.is_complete or root != self.digest.root:
            raise CorruptError(
                f"the received chunks have the root {root[:16]}…, not {self.digest.root[:16]}…"
            )

    def is_expected(self, number: int, hashed: bytes) -> bool:
        """Return whether the digest has this hash for the chunk *number*."""
        return hashed == self._expected(number)

    def _expected(self, number: int) -> bytes:
        return self.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def _mark_complete(self, number: int, hashed: bytes) -> None:
        self._table[number * HASH_BYTES : (number + 1) * HASH_BYTES] = hashed
        self._n_complete += 1
        if self.is_complete:
            self._change.notify_all()


# Outstanding requests: while one range arrives, the next is already requested.
_REQUESTS_AHEAD = 2
_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PinnedCopy:
    """A complete copy that does not change until *release* is called, once.

    *fd* is a memfd or a file that begins with the image, *view* the same bytes where they are
    already mapped. *read*, where they are in several memories: it returns a copy of so many bytes
    from an offset on. *on_damage* is called with the number of a chunk whose bytes do not match the
    digest.
    """

    fd: int
    digest: Digest
    release: Callable[[], None] = lambda: None
    on_damage: Callable[[int], None] = lambda _number: None
    view: memoryview | None = None
    read: Callable[[int, int], memoryview] | None = None


def once(release: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls *release* the first time that it is called."""
    left = [release]

    def call() -> None:
        if left:
            left.pop()()

    return call


def request_chunks(
    connection: TransferConnection, tracker: ChunkTracker, is_wanted: Callable[[], bool]
) -> None:
    """Request what *tracker* lacks over *connection*; return when it is complete or cancelled.

    Where this raises, its requests are released to other connections.

    Raises:
        ChunkDamagedError: A chunk arrived corrupt too often.
        TransferRefusedError: The other side cannot serve.
        WireError, OSError: The connection has failed.
    """
    pending: deque[ChunkRange] = deque()
    try:
        while is_wanted():
            while len(pending) < _REQUESTS_AHEAD and (chunk_range := tracker.claim()) is not None:
                pending.append(chunk_range)
                get = GetChunks(chunk_range.first, chunk_range.count, chunk_range.is_suspect)
                connection.send(TransferFrameKind.GET, get.to_bytes())
            if pending:
                _receive_range(connection, tracker, pending[0])
                pending.popleft()
            elif tracker.is_complete:
                return
            else:
                tracker.wait(connection.limits.stall_s / 4)
                connection.send(TransferFrameKind.WAIT)
    finally:
        for chunk_range in pending:
            tracker.release(chunk_range)


def _receive_range(
    connection: TransferConnection, tracker: ChunkTracker, chunk_range: ChunkRange
) -> None:
    kind, body = connection.receive(connection.limits.stall_s)
    if kind is not TransferFrameKind.DATA or GetChunks.from_bytes(body) != GetChunks(
        chunk_range.first, chunk_range.count
    ):
        raise WireError("not the requested chunks")
    hasher = xxhash.xxh3_64()
    for number in range(chunk_range.first, chunk_range.first + chunk_range.count):
        hasher.reset()
        with tracker.chunk(number) as view:
            is_authentic = connection.receive_chunk(view, hasher)
        hashed = hasher.digest()
        if not is_authentic and tracker.is_expected(number, hashed):
            raise WireError("a chunk that the other side did not send")
        tracker.record(number, hashed)


def serve_chunks(
    connection: TransferConnection, body: bytes, copy: PinnedCopy, pace: SendPace, chunk_bytes: int
) -> None:
    """Answer one `GET` with chunks of *copy*.

    A chunk that arrived corrupt before is hashed here first, so that both sides learn whether the
    copy or the network is at fault.

    Raises:
        TransferRefusedError: This copy is corrupt. The caller reports it to the other side.
        WireError: A range that the image does not have.
    """
    get = GetChunks.from_bytes(body)
    digest = copy.digest
    n_chunks = chunk_count(digest.nbytes, chunk_bytes=chunk_bytes)
    is_too_large = get.count > 1 and get.count * chunk_bytes > wire.RANGE_BYTES_MAX
    if get.count < 1 or get.first + get.count > n_chunks or is_too_large:
        raise WireError(f"chunks {get.first} to {get.first + get.count - 1} of {n_chunks}")
    if get.is_suspect:
        for number in range(get.first, get.first + get.count):
            _check_chunk(copy, number, chunk_bytes)
    connection.send(TransferFrameKind.DATA, GetChunks(get.first, get.count).to_bytes())
    for number in range(get.first, get.first + get.count):
        at = number * chunk_bytes
        connection.send_chunk(copy, at, min(chunk_bytes, digest.nbytes - at), pace)


def _check_chunk(copy: PinnedCopy, number: int, chunk_bytes: int) -> None:
    at, end = number * chunk_bytes, min((number + 1) * chunk_bytes, copy.digest.nbytes)
    hasher = xxhash.xxh3_64()
    while at < end:
        n_bytes = min(_PIECE_BYTES, end - at)
        piece = copy.read(at, n_bytes) if copy.read else os.pread(copy.fd, n_bytes, at)
        if not piece:
            break
        hasher.update(piece)
        at += len(piece)
    expected = copy.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]
    if hasher.digest() != expected:
        copy.on_damage(number)
        raise TransferRefusedError(
            TransferRefusal.DAMAGED, f"chunk {number} of its copy is damaged"
        )
