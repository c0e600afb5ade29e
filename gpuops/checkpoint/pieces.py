"""Hashes of the pieces of an image: a part of a chunk is verified without the rest of it.

They stand in a file next to the image, one block for each chunk: the chunk's hash in the manifest,
the xxh3-64 of each of its pieces, and the xxh3-64 of both, which ties the pieces to the chunk. The
file is no part of the state: where it is missing or damaged, whole chunks are read and verified.
"""

import xxhash

from gpuops.checkpoint.digest import HASH_BYTES, chunk_hash
from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError, Shard

# A range of a tensor is rounded to pieces at both ends: of 1 MB, 6 % are read in vain. Half of
# it would cost a tenth of the hashing rate.
PIECE_BYTES = 64 * 2**10
PIECES_SUFFIX = ".pieces"
_CACHED_BYTES = 4 * PIECE_BYTES  # fits into the cache of one core
BLOCK_BYTES = (CHUNK_BYTES // PIECE_BYTES + 2) * HASH_BYTES  # of a whole chunk


def pieces_file_name(shard: Shard) -> str:
    """Return the name of the file with the hashes of the pieces of *shard*."""
    return shard.file_name + PIECES_SUFFIX


def encode_block(chunk: memoryview) -> bytes:
    """Return the block of the *chunk*, which begins with its hash in the digest of its image.

    Memory is read once: what the one hash has read, the other one finds in the cache.
    """
    whole, pieces = xxhash.xxh3_64(), bytearray()
    for begin in range(0, len(chunk), _CACHED_BYTES):
        part = chunk[begin : begin + _CACHED_BYTES]
        whole.update(part)
        pieces += piece_hashes(part)
    body = whole.digest() + pieces
    return body + chunk_hash(body)


def block_bytes(chunk_bytes: int) -> int:
    """Return the size of the block of a chunk of *chunk_bytes*."""
    return HASH_BYTES * (-(-chunk_bytes // PIECE_BYTES) + 2)


def piece_hashes(data: memoryview) -> bytes:
    """Return the hashes of the pieces of *data*, which begins with one."""
    return b"".join(
        chunk_hash(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)
    )


def are_expected(found: bytes, hashes: bytes, offset: int) -> bool:
    """Return whether *found*, the hashes of pieces from *offset* in a chunk on, are in *hashes*."""
    first = offset // PIECE_BYTES * HASH_BYTES
    return hashes[first : first + len(found)] == found


def parse_block(block: bytes, hashed: bytes, chunk_bytes: int) -> bytes:
    """Return the hashes of the pieces of the chunk of *chunk_bytes* with the hash *hashed*.

    Raises:
        CorruptError: *block* is damaged, incomplete, or of another chunk.
    """
    n_pieces = -(-chunk_bytes // PIECE_BYTES)
    end = HASH_BYTES * (1 + n_pieces)
    body = block[:end]
    if body[:HASH_BYTES] != hashed or block[end : end + HASH_BYTES] != chunk_hash(body):
        raise CorruptError("the hashes of its pieces are damaged")
    return body[HASH_BYTES:]
