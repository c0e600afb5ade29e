"""Write the image of a shard to a file at the disk's rate, and hash it meanwhile.

The bytes go from the mapping of the image to the disk without an intermediate copy, a chunk at a
time. Each chunk is hashed after it was written, so the hash detects any change meanwhile; the next
one is written at the same time. Where the file is read back and verified soon, nothing is hashed.

Files are written with O_DIRECT where the file system supports it: it takes no CPU time for copies,
and does not evict the training's page cache.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

from gpuops.checkpoint.digest import HASH_BYTES, chunk_hash, digest_root, is_chunk_intact
from gpuops.checkpoint.image import HEADER_BYTES_MAX, read_layout
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.pieces import encode_block
from gpuops.checkpoint.storage.api import ImageSource, Throttle, unthrottled
from gpuops.checkpoint.storage.directory_files import write_all
from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError, Digest, Shard

BLOCK_BYTES = 4096  # a multiple of the logical blocks of disks; open(2), O_DIRECT


class DirectWriter:
    """Writes to the new file *fd* from its beginning, one piece after the other.

    From the first piece that is not a multiple of blocks, or that the file system refuses (not
    aligned in memory, or no O_DIRECT support), everything goes through the page cache.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0
        self.is_direct = _set_direct(fd, is_on=True)

    def write(self, data: memoryview) -> None:
        """Write all of *data*.

        Raises:
            OSError: Not all of it could be written.
        """
        n_written = self._write_direct(data) if self.is_direct else 0
        begin = self._offset + n_written
        self._offset += len(data)
        if n_written < len(data):
            if self.is_direct:
                self.is_direct = False
                _set_direct(self._fd, is_on=False)
            write_all(self._fd, data[n_written:])
            # On a file with dirty pages this starts writeback and does not wait.
            os.posix_fadvise(self._fd, begin, self._offset - begin, os.POSIX_FADV_DONTNEED)

    def _write_direct(self, data: memoryview) -> int:
        """Write whole blocks of *data*; return how many bytes were."""
        aligned_bytes = len(data) - len(data) % BLOCK_BYTES
        done = 0
        while done < aligned_bytes:
            try:
                n_written = os.write(self._fd, data[done:aligned_bytes])
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                break  # also after a write that ended within a block
            if n_written == 0:
                break
            done += n_written
        return done


def _set_direct(fd: int, *, is_on: bool) -> bool:
    """Turn O_DIRECT of *fd* on or off; return whether it is on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_on else flags)
    except OSError:
        return False
    return is_on


def write_image(
    source: ImageSource,
    target_fd: int,
    digest: Digest,
    *,
    throttle: Throttle = unthrottled,
    verify: bool = True,
) -> bytes:
    """Write the image in *source* to *target_fd* and sync it; return the hashes of its pieces.

    Without *verify* nothing is compared with *digest*, and the result is empty.

    Raises:
        CorruptError: The written bytes do not match *digest*.
        OSError: It cannot be written, or *source* not be read.
    """
    target = DirectWriter(target_fd)
    hashing: list[Future[bytes]] = []
    with (
        image_chunks(source, digest.nbytes) as chunks,
        ThreadPoolExecutor(1, thread_name_prefix="gpuops-write-hash") as hasher,
    ):
        for chunk in chunks:
            throttle(len(chunk))
            target.write(chunk)
            if not verify:
                continue
            if hashing:
                hashing[-1].result()  # its memory is used again for the chunk after this one
            hashing.append(hasher.submit(encode_block, chunk[:]))
        os.fsync(target_fd)
        return _join_blocks([task.result() for task in hashing], digest) if verify else b""


def verify_image(source: ImageSource, digest: Digest) -> bytes:
    """Return the hashes of the pieces of the image in *source*, which matches *digest*.

    Raises:
        CorruptError: It does not; with the offsets of the chunks that differ.
        OSError: It cannot be read.
    """
    with image_chunks(source, digest.nbytes) as chunks:
        return _join_blocks([encode_block(chunk) for chunk in chunks], digest)


def read_image(source_fd: int, digest: Digest, into: memoryview) -> None:
    """Fill *into* with the image in the file *source_fd*, verified chunk by chunk.

    Raises:
        CorruptError: With the offset of the first chunk that is not what was saved.
        OSError: It cannot be read.
    """
    size_bytes = os.fstat(source_fd).st_size
    if not size_bytes == digest.nbytes == len(into):
        raise CorruptError(f"it has {size_bytes} bytes, {digest.nbytes} were saved")
    for number, at in enumerate(range(0, len(into), CHUNK_BYTES)):
        with into[at : at + CHUNK_BYTES] as chunk:
            _read_all(source_fd, chunk, at)
            if not is_chunk_intact(chunk, digest, number):
                raise CorruptError(f"the chunk at byte {at} is not what was saved")


def verify_on_disk(
    fd: int, digest: Digest, *, throttle: Throttle = unthrottled, hash_pieces: bool = False
) -> bytes:
    """Read the image in the file *fd* past the page cache, where the file system supports that.

    Return the hashes of its pieces with *hash_pieces*, else nothing: they take as long as the hash.

    Raises:
        CorruptError: With the offset of the first chunk that is not what was saved.
        OSError: It cannot be read.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes != digest.nbytes:
        raise CorruptError(f"it has {size_bytes} bytes, {digest.nbytes} were saved")
    is_direct = _set_direct(fd, is_on=True)
    buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))  # begins at a page, as O_DIRECT needs
    blocks = bytearray()
    for number, at in enumerate(range(0, size_bytes, CHUNK_BYTES)):
        chunk = buffer[: min(CHUNK_BYTES, size_bytes - at)]
        throttle(len(chunk))
        if is_direct and not _read_direct(fd, buffer, len(chunk), at):
            is_direct = _set_direct(fd, is_on=False)
        if not is_direct:
            os.posix_fadvise(fd, at, len(chunk), os.POSIX_FADV_DONTNEED)
            _read_all(fd, chunk, at)
        block = encode_block(chunk) if hash_pieces else chunk_hash(chunk)
        if block[:HASH_BYTES] != digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]:
            raise CorruptError(f"the chunk at byte {at} is not what was saved")
        if hash_pieces:
            blocks += block
    return bytes(blocks)


def _read_direct(fd: int, buffer: memoryview, nbytes: int, at: int) -> bool:
    """Read whole blocks; return whether *buffer* has all *nbytes* from *at* on."""
    try:
        return os.preadv(fd, [buffer], at) >= nbytes
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return False


def image_fd(source: ImageSource) -> int:
    """Return the descriptor of *source*.

    Raises:
        CheckpointError: It is a slot that is closed.
    """
    return source if isinstance(source, int) else source.fd


def read_layout_hash(source: ImageSource, shard: Shard, nbytes: int) -> str:
    """Return the hash of the layout of the image of *shard* in *source*.

    Raises:
        CorruptError: It is not an image, or of another shard.
        OSError: It cannot be read.
    """
    source_fd = image_fd(source)
    length = os.pread(source_fd, 8, 0)
    n_header = min(8 + int.from_bytes(length, "little"), 8 + HEADER_BYTES_MAX, nbytes)
    header = bytearray(n_header)
    _read_all(source_fd, memoryview(header), 0)
    layout = read_layout(memoryview(header), nbytes=nbytes)
    if layout.shard != shard:
        raise CorruptError(f"the image is {layout.shard.file_name}, not {shard.file_name}")
    return layout.header_hash


@contextlib.contextmanager
def image_chunks(source: ImageSource, nbytes: int) -> Iterator[Iterator[memoryview]]:
    """Yield an iterator over the chunks of the *nbytes* of *source*.

    The memory of a chunk stays what it is until the one after the next.

    Memory that is sealed against shrinking is mapped, if it is not yet. A file could be truncated,
    which would kill the reader of a mapping, so each chunk is read.

    Raises:
        CorruptError: There are more bytes, or fewer; the latter also while iterating.
        OSError: It cannot be read; also while iterating.
    """
    source_fd = image_fd(source)
    size_bytes = os.fstat(source_fd).st_size
    if size_bytes != nbytes:
        raise CorruptError(f"the image has {size_bytes} bytes, {nbytes} were saved")
    if isinstance(source, SharedBuffer):
        yield _mapped_chunks(source.view[:])
    elif _cannot_shrink(source_fd):
        mapping = mmap.mmap(source_fd, nbytes, prot=mmap.PROT_READ)
        try:
            yield _mapped_chunks(memoryview(mapping))
        finally:
            # A view in the traceback of an error keeps the mapping open.
            with contextlib.suppress(BufferError):
                mapping.close()
    else:
        yield _read_chunks(source_fd, nbytes)


def _join_blocks(blocks: Sequence[bytes], digest: Digest) -> bytes:
    """Return all *blocks*, those of the chunks of *digest*.

    Raises:
        CorruptError: They are of other chunks; with the offsets of those that differ.
    """
    table = b"".join(block[:HASH_BYTES] for block in blocks)
    if table == digest.table and digest_root(digest.nbytes, table) == digest.root:
        return b"".join(blocks)
    saved = digest.table
    bad = [
        at // HASH_BYTES * CHUNK_BYTES
        for at in range(0, len(saved), HASH_BYTES)
        if table[at : at + HASH_BYTES] != saved[at : at + HASH_BYTES]
    ]
    raise CorruptError(
        f"{len(bad)} of {len(saved) // HASH_BYTES} chunks are not what was saved, "
        f"at bytes {', '.join(map(str, bad[:8]))}{'…' if len(bad) > 8 else ''}"
    )


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # an ordinary file
        return False


def _mapped_chunks(view: memoryview) -> Iterator[memoryview]:
    with view:
        for at in range(0, len(view), CHUNK_BYTES):
            with view[at : at + CHUNK_BYTES] as chunk:
                yield chunk


def _read_chunks(fd: int, nbytes: int) -> Iterator[memoryview]:
    buffers = [memoryview(bytearray(min(CHUNK_BYTES, nbytes))) for _ in range(2)]
    for at, buffer in zip(range(0, nbytes, CHUNK_BYTES), cycle(buffers), strict=False):
        chunk = buffer[: min(CHUNK_BYTES, nbytes - at)]
        _read_all(fd, chunk, at)
        yield chunk


def _read_all(fd: int, into: memoryview, at: int) -> None:
    n_read = 0
    while n_read < len(into):
        got = os.preadv(fd, [into[n_read:]], at + n_read)
        if got == 0:
            raise CorruptError(f"it ends at byte {at + n_read}")
        n_read += got
