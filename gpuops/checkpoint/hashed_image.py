"""An image in the memory of another process, which is verified where it is read to."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import xxhash

from gpuops.checkpoint.digest import HASH_BYTES, check_digest, chunk_count
from gpuops.checkpoint.memory.raw_memory import copy_bytes
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import ByteRange
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError, Digest

# Still in the cache of the core when it is hashed; smaller ones take more calls.
READ_BYTES = 2**19
TargetPart = tuple[int, memoryview]  # where in the image its bytes begin, and the memory for them


class HashedImage(SharedBuffer):
    """The memory of an image with a known digest; of ``view`` use what `ensure` was called for.

    Reading the file into other memory takes less time than to map its pages here and to copy them,
    unless they are mapped already; see `copy_from`.
    """

    digest: Digest

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        """Map *fd*; see `SharedBuffer`. Use `open`."""
        super().__init__(fd, nbytes, writable=writable)
        self._verified: set[int] = set()
        self._mapped: SharedBuffer | None = None

    @classmethod
    def open(cls, fd: int, digest: Digest) -> Self:
        """Return the image in the memory that another process created and sent as *fd*.

        The result owns *fd*, which is closed when this raises.

        Raises:
            CheckpointError: See `attach`; or the digest is damaged.
        """
        image = cls.attach(fd, nbytes=digest.nbytes, writable=False)
        try:
            check_digest(digest)
        except CorruptError:
            image.close()
            raise
        image.digest = digest
        return image

    def ensure(self, ranges: Iterable[ByteRange]) -> None:
        """Verify the chunks of *ranges* that were not verified before.

        Raises:
            CorruptError: One is damaged.
        """
        numbers = {
            number
            for begin, end in ranges
            if begin < end
            for number in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        }
        for number in sorted(numbers - self._verified):
            self.read_chunk(number)

    def read_chunk(self, number: int, parts: Sequence[TargetPart] = ()) -> None:
        """Verify the chunk *number*; of *parts* what was read into them.

        They are in ascending order, within the chunk, and do not overlap. Other threads run.

        Raises:
            CorruptError: It is damaged; so is what *parts* have now.
        """
        at, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self.nbytes)
        found, view = xxhash.xxh3_64(), (self._mapped or self).view
        for begin, target in (*parts, (end, memoryview(b""))):
            found.update(view[at:begin])
            for done in range(0, len(target), READ_BYTES):
                piece = target[done : done + READ_BYTES]
                self._read(piece, begin + done)
                found.update(piece)
            at = begin + len(target)
        if found.digest() != self.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            total = chunk_count(self.nbytes)
            raise CorruptError(f"memory is corrupt in piece {number} of {total}")
        self._verified.add(number)

    def copy_from(self, mapped: SharedBuffer) -> None:
        """Copy out of *mapped*, this memory with its pages mapped, until both are closed."""
        self._mapped = mapped

    def unmap(self, stop: Callable[[], bool] = lambda: False) -> None:
        super().unmap(stop)
        if self._mapped is not None:
            self._mapped.unmap(stop)

    def close(self) -> None:
        super().close()
        if self._mapped is not None:
            self._mapped.close()

    def _read(self, target: memoryview, at: int) -> None:
        if self._mapped is not None:
            copy_bytes(target, self._mapped.view[at : at + len(target)])
            return
        while target:
            try:
                n_read = os.preadv(self.fd, [target], at)
            except OSError as exc:
                raise CheckpointError(f"cannot read a slot: {exc.strerror}") from exc
            if not n_read:
                raise CheckpointError("cannot read a slot: it is too short")
            target, at = target[n_read:], at + n_read
