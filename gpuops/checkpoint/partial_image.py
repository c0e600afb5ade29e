"""An image of which only the requested parts are read, each verified before it is used.

A job that goes on with another number of ranks needs small parts of many images. They are read into
sparse memory of the image's size, in whole pieces, from the first holder whose bytes are intact.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError

ByteRange = tuple[int, int]  # from the first byte up to the second
_PIECES_PER_CHUNK = CHUNK_BYTES // PIECE_BYTES


class RangeHolder(Protocol):
    """One copy of an image."""

    def read(self, begin: int, end: int) -> tuple[int, bytes]:
        """Return verified bytes that include *begin* to *end*, and where they begin.

        The range is of whole pieces (but for the end of the image) of one chunk, and so is the
        result.

        Raises:
            CorruptError: This copy is damaged there.
            CheckpointError: It cannot be read.
        """
        ...


class PartialImage:
    """The image of *name* in sparse *memory*, which it owns; thread-safe.

    *holders* are asked in their order.
    """

    def __init__(self, name: str, memory: SharedBuffer, holders: Sequence[RangeHolder]) -> None:
        self.name = name
        self.memory = memory
        self._holders = holders
        self._lock = threading.Lock()
        self._is_present = bytearray(-(-memory.nbytes // PIECE_BYTES))

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def view(self) -> memoryview:
        """All of the memory: zeros but for what `ensure` was called for."""
        return self.memory.view

    @property
    def present_bytes(self) -> int:
        """Return about how many bytes are here."""
        return self._is_present.count(1) * PIECE_BYTES

    def ensure(self, ranges: Iterable[ByteRange]) -> None:
        """Read and verify what is missing of *ranges*.

        Raises:
            CorruptError: A part is damaged, and no holder has an intact copy of it.
            CheckpointError: A part cannot be read from any holder, or a range is not of the image.
        """
        with self._lock:
            for first, end in _runs(self._missing(ranges)):
                if not all(self._is_present[first:end]):
                    self._read(first * PIECE_BYTES, min(end * PIECE_BYTES, self.nbytes))

    def close(self) -> None:
        """Release the memory once nothing refers to `view`."""
        self.memory.close()

    def _missing(self, ranges: Iterable[ByteRange]) -> list[int]:
        wanted: set[int] = set()
        for begin, end in ranges:
            if not 0 <= begin <= end <= self.nbytes:
                raise CorruptError(f"{self.name} has no bytes {begin} to {end}")
            if begin < end:
                wanted.update(range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)))
        return sorted(number for number in wanted if not self._is_present[number])

    def _read(self, begin: int, end: int) -> None:
        errors: list[CheckpointError] = []
        for holder in self._holders:
            try:
                at, data = holder.read(begin, end)
            except CheckpointError as exc:
                errors.append(exc)
                continue
            self.memory.view[at : at + len(data)] = data
            n_pieces = -(-len(data) // PIECE_BYTES)
            first = at // PIECE_BYTES
            self._is_present[first : first + n_pieces] = b"\1" * n_pieces
            return
        is_damaged = any(isinstance(error, CorruptError) for error in errors)
        why = "; ".join(str(error) for error in errors) or "no node has it"
        raise (CorruptError if is_damaged else CheckpointError)(f"{self.name}: {why}")


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
