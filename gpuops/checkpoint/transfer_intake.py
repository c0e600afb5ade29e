"""What of one image has arrived, chunk by chunk, and who is to ask for the rest.

The target's memory itself is what is hashed, after the bytes have come to lie there; a chunk is
written by one connection at a time, and never again once it is whole.
"""

import heapq
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from gpuops.checkpoint.digest import HASH_BYTES, check_digest, chunk_hash, n_chunks_of, root_of
from gpuops.checkpoint.states import CHUNK_BYTES, CorruptError, Digest
from gpuops.checkpoint.transfer_wire import RANGE_BYTES_MAX

TRIES_MAX = 6
_SHARES = 16


class DamagedError(CorruptError):
    """A chunk came damaged again and again, while the other side says that its own is whole."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Chunks that one connection asks for."""

    first: int
    count: int
    is_doubtful: bool


class Intake:
    """The chunks of the image with *digest* that lie in *view*; safe from several threads.

    Raises:
        CorruptError: The digest does not agree with itself.
        ValueError: *view* has another length, or cannot be written.
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
            raise ValueError(f"{digest.nbytes} bytes do not go into a view of {view.nbytes}")
        self.view, self.digest, self.chunk_bytes = view, digest, chunk_bytes
        self.n_chunks = n_chunks_of(digest.nbytes, chunk_bytes=chunk_bytes)
        self._tries_max = tries_max
        self._change = threading.Condition()
        self._open = list(range(self.n_chunks))
        self._claimed: set[int] = set()
        self._bad: dict[int, int] = {}
        self._table = bytearray(len(digest.table))
        self._whole = 0
        self.received_bytes = 0  # over the wire, and whole
        self.found_bytes = 0  # had been there
        self.n_damaged = 0  # chunks that came damaged, counted each time

    @property
    def is_whole(self) -> bool:
        """Return whether every chunk is here and verified."""
        return self._whole == self.n_chunks

    @property
    def n_missing(self) -> int:
        """Return how many chunks are not here yet."""
        return self.n_chunks - self._whole

    def look(self, candidates: Iterable[int] | None = None) -> int:
        """Hash what lies in the view (of *candidates* only, if given); return how much was found.

        For a transfer that was broken off; nothing may be asked for meanwhile.
        """
        found = set()
        for number in range(self.n_chunks) if candidates is None else candidates:
            hashed = chunk_hash(self.chunk(number))
            if hashed == self._expected(number):
                found.add(number)
        with self._change:
            found &= set(self._open)
            self._open = sorted(set(self._open) - found)
            for number in found:
                self._note_whole(number, self._expected(number))
                self.found_bytes += len(self.chunk(number))
        return len(found)

    def chunk(self, number: int) -> memoryview:
        """Return where the chunk *number* belongs."""
        return self.view[number * self.chunk_bytes : (number + 1) * self.chunk_bytes]

    def claim(self) -> Claim | None:
        """Return what to ask for next, None where nothing is left that nobody asks for."""
        with self._change:
            if not self._open:
                return None
            first = heapq.heappop(self._open)
            self._claimed.add(first)
            if first in self._bad:
                return Claim(first, 1, is_doubtful=True)
            # Small chunks go several at a time, but leave work for the other connections.
            most = min(RANGE_BYTES_MAX // self.chunk_bytes, len(self._open) // _SHARES)
            count = 1
            while (
                count < most and self._open[0] == first + count and self._open[0] not in self._bad
            ):
                self._claimed.add(heapq.heappop(self._open))
                count += 1
            return Claim(first, count, is_doubtful=False)

    def settle(self, number: int, hashed: bytes) -> None:
        """Note that a claimed chunk has arrived with this hash.

        Raises:
            DamagedError: It has come damaged too often.
        """
        with self._change:
            self._claimed.remove(number)
            if hashed == self._expected(number):
                self._bad.pop(number, None)
                self.received_bytes += len(self.chunk(number))
                self._note_whole(number, hashed)
                return
            heapq.heappush(self._open, number)
            self.n_damaged += 1
            self._bad[number] = self._bad.get(number, 0) + 1
            self._change.notify()
            if self._bad[number] >= self._tries_max:
                raise DamagedError(
                    f"chunk {number} of {self.n_chunks} came damaged {self._bad[number]} times"
                )

    def give_back(self, claim: Claim) -> None:
        """Leave what of *claim* has not arrived to others: its connection is gone."""
        with self._change:
            left = self._claimed.intersection(range(claim.first, claim.first + claim.count))
            self._claimed -= left
            for number in left:
                heapq.heappush(self._open, number)
            self._change.notify_all()

    def forgive(self) -> None:
        """Forget which chunks came damaged: another holder is asked."""
        with self._change:
            self._bad.clear()

    def wait(self, seconds: float) -> None:
        """Return when there is something to claim, when all is whole, or after *seconds*."""
        with self._change:
            self._change.wait_for(lambda: bool(self._open) or self.is_whole, seconds)

    def check_root(self) -> None:
        """Compare the root of what has arrived; raises `CorruptError`."""
        root = root_of(self.digest.nbytes, bytes(self._table))
        if not self.is_whole or root != self.digest.root:
            raise CorruptError(
                f"what arrived has the root {root[:16]}…, not {self.digest.root[:16]}…"
            )

    def _expected(self, number: int) -> bytes:
        return self.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def _note_whole(self, number: int, hashed: bytes) -> None:
        self._table[number * HASH_BYTES : (number + 1) * HASH_BYTES] = hashed
        self._whole += 1
        if self.is_whole:
            self._change.notify_all()
