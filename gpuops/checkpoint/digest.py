"""Digests of images: any changed bit is detected, and located to its chunk.

The table has the xxh3-64 of each chunk; the root is the BLAKE3 of the length (8 bytes little
endian) and the table. xxh3 runs at memory speed and releases Python's lock. It detects accidental
corruption; it does not resist deliberate collisions.
"""

from typing import Self

import xxhash
from blake3 import blake3

from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError, Digest

HASH_BYTES = 8


def chunk_count(nbytes: int, *, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the number of chunks in *nbytes*; the last one may be short."""
    return -(-nbytes // chunk_bytes)


def chunk_hash(data: memoryview | bytes | bytearray) -> bytes:
    """Return the 8 bytes of one chunk in the table."""
    return xxhash.xxh3_64_digest(data)


def digest_root(nbytes: int, table: bytes) -> str:
    """Return the root, 64 hexadecimal digits, of *nbytes* bytes with this *table*."""
    return blake3(nbytes.to_bytes(8, "little") + table).hexdigest()


def compute_digest(view: memoryview, *, chunk_bytes: int = CHUNK_BYTES) -> Digest:
    """Return the digest of *view*, any contiguous buffer; nothing is copied."""
    with _flat(view) as flat:
        table = b"".join(
            chunk_hash(flat[begin : begin + chunk_bytes])
            for begin in range(0, len(flat), chunk_bytes)
        )
        return Digest(len(flat), table, digest_root(len(flat), table))


def check_digest(digest: Digest, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Raise unless *digest* is self-consistent.

    Raises:
        CorruptError: The size of its table does not match its length, or its root does not match.
    """
    n_chunks = chunk_count(digest.nbytes, chunk_bytes=chunk_bytes)
    if digest.nbytes < 0 or len(digest.table) != n_chunks * HASH_BYTES:
        raise CorruptError(
            f"the digest of {digest.nbytes} bytes has a table of {len(digest.table)} bytes, "
            f"not {n_chunks * HASH_BYTES}"
        )
    root = digest_root(digest.nbytes, digest.table)
    if root != digest.root:
        raise CorruptError(
            f"the digest's table has the root {root[:16]}…, but {digest.root[:16]}… was recorded"
        )


def is_chunk_intact(
    data: memoryview | bytes | bytearray, digest: Digest, number: int, *, offset: int = 0
) -> bool:
    """Return whether *data* from *offset* on is the chunk *number* (from 0) of *digest*."""
    at = number * HASH_BYTES
    with memoryview(data)[offset:] as chunk:
        return at >= 0 and chunk_hash(chunk) == digest.table[at : at + HASH_BYTES]


def find_damaged_chunks(
    view: memoryview, digest: Digest, *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Return the numbers (from 0) of the corrupt chunks of *view*; none where it is intact.

    Raises:
        CorruptError: *view* has another length than *digest*, or the digest itself is corrupt.
    """
    check_digest(digest, chunk_bytes=chunk_bytes)
    if view.nbytes != digest.nbytes:
        raise CorruptError(f"there are {view.nbytes} bytes, but {digest.nbytes} were saved")
    with _flat(view) as flat:
        return tuple(
            number
            for number in range(chunk_count(digest.nbytes, chunk_bytes=chunk_bytes))
            if not is_chunk_intact(
                flat[number * chunk_bytes : (number + 1) * chunk_bytes], digest, number
            )
        )


class Digester:
    """The digest of a stream, in pieces of any size: equal to `compute_digest` of all of it."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = xxhash.xxh3_64()
        self._chunk_left_bytes = chunk_bytes
        self._nbytes = 0
        self._table = bytearray()

    @property
    def nbytes(self) -> int:
        """How many bytes were added."""
        return self._nbytes

    def update(self, data: memoryview | bytes | bytearray) -> Self:
        """Add the next bytes of the stream; returns itself."""
        with _flat(data) as flat:
            begin = 0
            while begin < len(flat):
                part = flat[begin : begin + self._chunk_left_bytes]
                self._chunk.update(part)
                begin += len(part)
                self._chunk_left_bytes -= len(part)
                if self._chunk_left_bytes == 0:
                    self._finish_chunk()
            self._nbytes += len(flat)
        return self

    def finish(self) -> Digest:
        """Return the digest of the bytes so far; more may follow."""
        table = bytes(self._table)
        if self._chunk_left_bytes < self._chunk_bytes:
            table += self._chunk.digest()
        return Digest(self._nbytes, table, digest_root(self._nbytes, table))

    def _finish_chunk(self) -> None:
        self._table += self._chunk.digest()
        self._chunk.reset()
        self._chunk_left_bytes = self._chunk_bytes


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    flat = memoryview(data)
    return flat.cast("B") if flat.nbytes else memoryview(b"")  # a shape with a zero has no cast
