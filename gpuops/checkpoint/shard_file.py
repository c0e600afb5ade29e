"""Write the image of a shard to a file: at the disk's rate, and hashed on the way.

The bytes go from the mapping of the image to the disk without a copy in between, a chunk at a time.
Each chunk is hashed after it was written: had anything changed the image meanwhile, the hash would
show it.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.digest import Digester, chunk_is_good
from gpuops.checkpoint.direct_write import DirectWriter
from gpuops.checkpoint.image import HEADER_BYTES_MAX, read_layout
from gpuops.checkpoint.state_store import ImageSource, Pace, unpaced
from gpuops.checkpoint.states import CHUNK_BYTES, CorruptError, Digest, Shard


def write_image(
    source: ImageSource, target_fd: int, digest: Digest, *, pace: Pace = unpaced
) -> None:
    """Write the image in *source* to *target_fd* and sync it.

    Raises:
        CorruptError: What was written is not what *digest* is of.
        OSError: It cannot be written, or *source* not be read.
    """
    hashing = Digester()
    target = DirectWriter(target_fd)
    with image_chunks(source, digest.nbytes) as chunks:
        for _, chunk in chunks:
            pace(len(chunk))
            target.write(chunk)
            hashing.update(chunk)
    require_same(hashing.finish(), digest)
    os.fsync(target_fd)


def hash_image(source: ImageSource, digest: Digest) -> None:
    """Say nothing where the image in *source* is what *digest* is of.

    Raises:
        CorruptError: With the offsets of the chunks that differ.
        OSError: It cannot be read.
    """
    hashing = Digester()
    with image_chunks(source, digest.nbytes) as chunks:
        for _, chunk in chunks:
            hashing.update(chunk)
    require_same(hashing.finish(), digest)


def read_image(source_fd: int, digest: Digest, into: memoryview) -> None:
    """Fill *into* with the image in the file *source_fd*, verified chunk by chunk.

    Raises:
        CorruptError: With the offset of the first chunk that is not what was saved.
        OSError: It cannot be read.
    """
    there = os.fstat(source_fd).st_size
    if not there == digest.nbytes == len(into):
        raise CorruptError(f"it has {there} bytes, {digest.nbytes} were saved")
    for number, at in enumerate(range(0, len(into), CHUNK_BYTES)):
        with into[at : at + CHUNK_BYTES] as chunk:
            _read_all(source_fd, chunk, at)
            if not chunk_is_good(chunk, digest, number):
                raise CorruptError(f"the chunk at byte {at} is not what was saved")


def descriptor_of(source: ImageSource) -> int:
    """Return the descriptor that *source* is, or that its memory has.

    Raises:
        CheckpointError: It is a slot that is closed.
    """
    return source if isinstance(source, int) else source.fd


def layout_of(source: ImageSource, shard: Shard, nbytes: int) -> str:
    """Return the hash of the layout of the image of *shard* in *source*.

    Raises:
        CorruptError: It is no image, or of another shard.
        OSError: It cannot be read.
    """
    source_fd = descriptor_of(source)
    length = os.pread(source_fd, 8, 0)
    n_header = min(8 + int.from_bytes(length, "little"), 8 + HEADER_BYTES_MAX, nbytes)
    header = bytearray(n_header)
    _read_all(source_fd, memoryview(header), 0)
    layout = read_layout(memoryview(header), nbytes=nbytes)
    if layout.shard != shard:
        raise CorruptError(f"the image is {layout.shard.file_name}, not {shard.file_name}")
    return layout.hash


@contextlib.contextmanager
def image_chunks(source: ImageSource, nbytes: int) -> Iterator[Iterator[tuple[int, memoryview]]]:
    """Yield an iterator over (offset, bytes) of the *nbytes* of *source* in chunks.

    Memory that is sealed against shrinking is mapped, if it is not; of a file that could be cut
    short, which would kill the reader of a mapping, each chunk is read.

    Raises:
        CorruptError: There are more bytes, or fewer; the latter also while iterating.
        OSError: It cannot be read; also while iterating.
    """
    source_fd = descriptor_of(source)
    there = os.fstat(source_fd).st_size
    if there != nbytes:
        raise CorruptError(f"the image has {there} bytes, {nbytes} were sealed")
    if isinstance(source, SlotMemory):
        yield _slices(source.view[:])
    elif _cannot_shrink(source_fd):
        mapping = mmap.mmap(source_fd, nbytes, prot=mmap.PROT_READ)
        try:
            yield _slices(memoryview(mapping))
        finally:
            # A view in the traceback of an error keeps it open until that is gone.
            with contextlib.suppress(BufferError):
                mapping.close()
    else:
        yield _pieces(source_fd, nbytes)


def require_same(written: Digest, expected: Digest) -> None:
    """Say nothing where both digests are the same.

    Raises:
        CorruptError: With the offsets of the chunks that differ.
    """
    if written == expected:
        return
    bad = [
        number * CHUNK_BYTES
        for number in range(len(expected.table) // 8)
        if written.table[8 * number : 8 * number + 8] != expected.table[8 * number : 8 * number + 8]
    ]
    raise CorruptError(
        f"{len(bad)} of {len(expected.table) // 8} chunks are not what was sealed, "
        f"at bytes {', '.join(map(str, bad[:8]))}{'…' if len(bad) > 8 else ''}"
    )


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # an ordinary file
        return False


def _slices(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    with view:
        for at in range(0, len(view), CHUNK_BYTES):
            with view[at : at + CHUNK_BYTES] as chunk:
                yield at, chunk


def _pieces(fd: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, nbytes)))
    for at in range(0, nbytes, CHUNK_BYTES):
        piece = buffer[: min(CHUNK_BYTES, nbytes - at)]
        _read_all(fd, piece, at)
        yield at, piece


def _read_all(fd: int, into: memoryview, at: int) -> None:
    n_read = 0
    while n_read < len(into):
        got = os.preadv(fd, [into[n_read:]], at + n_read)
        if got == 0:
            raise CorruptError(f"it ends at byte {at + n_read}")
        n_read += got
