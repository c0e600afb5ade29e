"""Read verified parts of one stored shard: pieces by their hashes, else whole chunks; or all."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from gpuops.checkpoint.digest import HASH_BYTES, chunk_count, is_chunk_intact
from gpuops.checkpoint.manifest import Manifest, ShardRecord
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import ByteRange, PartialImage, PutBytes
from gpuops.checkpoint.pieces import BLOCK_BYTES, are_expected, parse_block, piece_hashes
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError, Shard, StateId

# Blocks of hashes that are read at once, for 512 MiB of the image: one more request for these.
_BLOCKS_PER_READ = 32


class StoredRanges:
    """The shard of *record* of *state* in *store*; thread-safe."""

    def __init__(self, store: CheckpointStore, state: StateId, record: ShardRecord) -> None:
        self._store, self._state, self._record = store, state, record
        self._blocks: dict[int, bytes] = {}  # by the number of the first chunk
        self._lock = threading.Lock()

    def read(self, ranges: Iterable[ByteRange], put: PutBytes) -> None:
        """Call *put* with verified bytes of all *ranges*; see `RangeHolder`."""
        for begin, end in ranges:
            at, data = self._read_range(begin, end)
            put(at, memoryview(data))

    def _read_range(self, begin: int, end: int) -> tuple[int, bytes]:
        number = begin // CHUNK_BYTES
        hashes = self._piece_hashes(number)
        if hashes is not None:
            data = self._store.read_bytes(self._state, self._record.shard, begin, end)
            if are_expected(piece_hashes(memoryview(data)), hashes, begin % CHUNK_BYTES):
                return begin, data
        return self._read_chunk(number)

    def _read_chunk(self, number: int) -> tuple[int, bytes]:
        """Return a whole chunk: its pieces have no hashes, or are not what these say."""
        digest = self._record.digest
        begin = number * CHUNK_BYTES
        end = min(begin + CHUNK_BYTES, digest.nbytes)
        data = self._store.read_bytes(self._state, self._record.shard, begin, end)
        if not is_chunk_intact(data, digest, number):
            with suppress(CheckpointError):  # it may not be writable here
                self._store.mark_damaged(self._record, self._state)
            raise CorruptError(
                f"{self._store.address}/{self._state.name}/{self._record.shard.file_name} is "
                f"corrupt in piece {number} of {chunk_count(digest.nbytes)}"
            )
        return begin, data

    def _piece_hashes(self, number: int) -> bytes | None:
        """Return the hashes of the pieces of the chunk *number*, None where they are not there."""
        first = number - number % _BLOCKS_PER_READ
        with self._lock:
            if first not in self._blocks:
                begin = first * BLOCK_BYTES
                try:
                    self._blocks[first] = self._store.read_piece_hashes(
                        self._state,
                        self._record.shard,
                        begin,
                        begin + _BLOCKS_PER_READ * BLOCK_BYTES,
                    )
                except CheckpointError:
                    self._blocks[first] = b""
            block = self._blocks[first][(number - first) * BLOCK_BYTES :][:BLOCK_BYTES]
        digest = self._record.digest
        chunk_bytes = min(CHUNK_BYTES, digest.nbytes - number * CHUNK_BYTES)
        hashed = digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]
        try:
            return parse_block(block, hashed, chunk_bytes)
        except CorruptError:
            return None


def open_partial(
    store: CheckpointStore,
    state: StateId,
    record: ShardRecord,
    check_fits: Callable[[int], None] = lambda _nbytes: None,
) -> PartialImage:
    """Return the image of *record* in *store*; nothing of it is read yet.

    Raises:
        CheckpointError: It has another size than was saved, or cannot be looked up.
    """
    name, nbytes = record.shard.file_name, record.digest.nbytes
    memory = SharedBuffer.create("gpuops-parts", nbytes)
    ranges = StoredRanges(store, state, record)
    return PartialImage(f"{name} of {state}", memory, [ranges], check_fits)


def verify_chunks(store: CheckpointStore, manifest: Manifest, shard: Shard) -> None:
    """Read all of a stored shard, and verify it.

    Raises:
        CorruptError: It is not what was saved; the message names the first chunk.
        CheckpointError: It cannot be read.
    """
    digest = manifest.record(shard).digest
    nbytes = number = 0
    for number, chunk in enumerate(store.read_chunks(manifest.state, shard), 1):
        if nbytes >= digest.nbytes or not is_chunk_intact(chunk, digest, number - 1):
            raise CorruptError(
                f"{store.address}/{manifest.state.name}/{shard.file_name} is corrupt in piece "
                f"{number - 1} of {chunk_count(digest.nbytes)}"
            )
        nbytes += len(chunk)
    if nbytes != digest.nbytes:
        raise CorruptError(
            f"{store.address}/{manifest.state.name}/{shard.file_name} has {nbytes} bytes, but "
            f"{digest.nbytes} were saved"
        )
