"""An image of which only the requested parts are read, each verified before it is used.

A job that goes on with another number of ranks needs small parts of many images. They are read into
sparse memory of the image's size, in whole pieces, from the first holder whose bytes are intact.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError

ByteRange = tuple[int, int]  # from the first byte up to the second
PutBytes = Callable[[int, memoryview], None]  # where they begin, and bytes to copy
_PIECES_PER_CHUNK = CHUNK_BYTES // PIECE_BYTES


class RangeHolder(Protocol):
    """One copy of an image."""

    def read(self, ranges: Iterable[ByteRange], put: PutBytes) -> None:
        """Call *put* with verified bytes of all *ranges*, and where they begin.

        A range is of whole pieces (but for the end of the image) of one chunk, and so is what *put*
        gets; it may be more than the range. *ranges* no longer has what was put before.

        Raises:
            CorruptError: This copy is damaged in a range. Others may have been read.
            CheckpointError: It cannot be read.
        """
        ...


class OpenedImage(Protocol):
    """An image that is being loaded."""

    @property
    def view(self) -> memoryview:
        """Return all of its memory; use only what `ensure` was called for."""
        ...

    def ensure(self, ranges: Iterable[ByteRange]) -> None:
        """Have *ranges* read and verified; raises CheckpointError where they cannot be."""
        ...


class CompleteImage:
    """An image that was read and verified before."""

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def ensure(self, ranges: Iterable[ByteRange]) -> None:
        """Do nothing: all of it is here."""


class PieceMap:
    """Which pieces of an image of *nbytes* are present."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._is_present = bytearray(-(-nbytes // PIECE_BYTES))

    def missing(self, ranges: Iterable[ByteRange]) -> list[ByteRange]:
        """Return what is not present of *ranges*: pieces, in runs within one chunk.

        Raises:
            CorruptError: A range is not of the image.
        """
        wanted: set[int] = set()
        for begin, end in ranges:
            if not 0 <= begin <= end <= self.nbytes:
                raise CorruptError(f"it has no bytes {begin} to {end}")
            if begin < end:
                wanted.update(range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)))
        absent = sorted(number for number in wanted if not self._is_present[number])
        return [
            (first * PIECE_BYTES, min(end * PIECE_BYTES, self.nbytes))
            for first, end in _runs(absent)
        ]

    def mark(self, begin: int, end: int) -> None:
        """Record that the pieces from *begin* to *end* are present."""
        first, count = begin // PIECE_BYTES, -(-(end - begin) // PIECE_BYTES)
        self._is_present[first : first + count] = b"\1" * count


class PartialImage:
    """The image of *name* in sparse *memory*, which it owns; thread-safe.

    *holders* are asked in their order. *check_fits* is called with the number of bytes that are
    about to be read, and raises CheckpointError where they do not fit into memory.
    """

    def __init__(
        self,
        name: str,
        memory: SharedBuffer,
        holders: Sequence[RangeHolder],
        check_fits: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        self.name = name
        self.memory = memory
        self._holders = holders
        self._check_fits = check_fits
        self._lock = threading.Lock()
        self._pieces = PieceMap(memory.nbytes)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def view(self) -> memoryview:
        """All of the memory: zeros but for what `ensure` was called for."""
        return self.memory.view

    def ensure(self, ranges: Iterable[ByteRange]) -> None:
        """Read and verify what is missing of *ranges*.

        Raises:
            CorruptError: A part is damaged, and no holder has an intact copy of it.
            CheckpointError: A part cannot be read from any holder, or a range is not of the image.
        """
        with self._lock:
            missing = self._pieces.missing(ranges)
            self._check_fits(sum(end - begin for begin, end in missing))
            if missing:
                self._read(missing)

    def close(self) -> None:
        """Release the memory once nothing refers to `view`."""
        self.memory.close()

    def _read(self, ranges: Sequence[ByteRange]) -> None:
        errors: list[CheckpointError] = []
        for holder in self._holders:
            try:
                holder.read(self._still_missing(ranges), self._put)
            except CheckpointError as exc:
                errors.append(exc)
            else:
                return
        is_damaged = any(isinstance(error, CorruptError) for error in errors)
        why = "; ".join(str(error) for error in errors) or "no node has it"
        raise (CorruptError if is_damaged else CheckpointError)(f"{self.name}: {why}")

    def _still_missing(self, ranges: Iterable[ByteRange]) -> Iterator[ByteRange]:
        """Yield *ranges* but for those that have come with another one of their chunk."""
        return (each for each in ranges if self._pieces.missing([each]))

    def _put(self, begin: int, data: memoryview) -> None:
        end = begin + len(data)
        self.memory.view[begin:end] = data
        self._pieces.mark(begin, end)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each run of consecutive *numbers* within one chunk."""
    first = end = -1
    for number in numbers:
        if number != end or number % _PIECES_PER_CHUNK == 0:
            if end > first:
                yield first, end
            first = number
        end = number + 1
    if end > first:
        yield first, end
