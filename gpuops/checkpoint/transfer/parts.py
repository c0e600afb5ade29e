"""Fetch parts of a copy from another node's memory, in pieces that are verified one by one.

The digest of a copy has hashes of chunks. With a part comes the block of its chunk
(`gpuops.checkpoint.pieces`), which the holder makes when it is asked: it hashes the chunk, so it
notices a damaged one before it sends any of it.
"""

import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from gpuops.checkpoint.digest import HASH_BYTES
from gpuops.checkpoint.partial_image import ByteRange, PutBytes
from gpuops.checkpoint.pieces import (
    PIECE_BYTES,
    are_expected,
    block_bytes,
    encode_block,
    parse_block,
    piece_hashes,
)
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import no_copy_error, open_copy
from gpuops.checkpoint.transfer.connection import TransferConnection, slice_of
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.parallel import ParallelConnections, TransferOptions
from gpuops.checkpoint.transfer.wire import (
    GetPart,
    JobCredentials,
    TransferError,
    TransferFrameKind,
    TransferRefusal,
    TransferRefusedError,
)
from gpuops.checkpoint.types import CorruptError, Digest, KeeperAddress, ShardCopy
from gpuops.host.net.frames import WireError

# While one part arrives, the holder hashes the chunk of the next.
_REQUESTS_AHEAD = 2


def fetch_parts(
    peer: KeeperAddress,
    job: JobCredentials,
    wanted: ShardCopy,
    ranges: Iterable[ByteRange],
    put: PutBytes,
    options: TransferOptions,
) -> None:
    """Call *put* with the verified bytes of each of *ranges* of *wanted*, from *peer*.

    A range is of whole pieces of one chunk. The holder that *wanted* names is ignored.

    Raises:
        CorruptError: The copy is damaged in some of them. The others were fetched.
        TransferError: *peer* does not have it, or cannot be reached, within the limits.
    """
    waiting, n_fetched = deque(ranges), 0
    damaged: list[TransferRefusedError] = []

    def work(connection: TransferConnection) -> None:
        nonlocal n_fetched
        open_copy(connection, wanted)
        buffer = memoryview(bytearray(options.limits.chunk_bytes))
        n_requested = 0
        while waiting:
            for part in islice(waiting, n_requested, _REQUESTS_AHEAD):
                connection.send(TransferFrameKind.GET_PART, GetPart(*part).to_bytes())
                n_requested += 1
            try:
                data = _receive_part(connection, wanted.digest, GetPart(*waiting[0]), buffer)
            except TransferRefusedError as exc:
                if exc.code is not TransferRefusal.DAMAGED:
                    raise
                damaged.append(exc)
            else:
                put(waiting[0][0], data)
            waiting.popleft()
            n_requested, n_fetched = n_requested - 1, n_fetched + 1

    what = f"a part of {wanted.shard.file_name} of {wanted.state}"
    try:
        # One connection: several ranks and images are read at once.
        ParallelConnections(peer, job, options, work, lambda: n_fetched).run(
            1, time.monotonic() + options.deadline_s
        )
    except (TransferError, CorruptError) as exc:
        raise no_copy_error(what, [(peer, exc)]) from exc
    if damaged:
        raise no_copy_error(what, [(peer, damaged[0])])


class PartServer:
    """Serves parts of *copy* over one connection; the block of the last chunk is kept."""

    def __init__(self, copy: PinnedCopy, chunk_bytes: int) -> None:
        self._copy, self._chunk_bytes = copy, chunk_bytes
        self._block: tuple[int, bytes] = (-1, b"")

    def serve(self, connection: TransferConnection, body: bytes, pace: SendPace) -> None:
        """Answer one `GET_PART`.

        Raises:
            TransferRefusedError: The chunk is corrupt. The caller reports it to the other side.
            WireError: It is not a range of pieces of one chunk of the image.
        """
        part, nbytes = GetPart.from_bytes(body), self._copy.digest.nbytes
        number = part.begin // self._chunk_bytes
        chunk_end = min((number + 1) * self._chunk_bytes, nbytes)
        is_whole = part.end == chunk_end or part.end % PIECE_BYTES == 0
        if part.begin % PIECE_BYTES or not is_whole or not part.begin < part.end <= chunk_end:
            raise WireError(f"bytes {part.begin} to {part.end} of {nbytes}")
        if self._block[0] != number:
            self._block = (number, self._encode_block(number, chunk_end))
        connection.send(TransferFrameKind.DATA, body, self._block[1])
        connection.send_chunk(self._copy, part.begin, part.end - part.begin, pace)

    def _encode_block(self, number: int, chunk_end: int) -> bytes:
        begin = number * self._chunk_bytes
        with slice_of(self._copy, begin, chunk_end - begin) as chunk:
            block = encode_block(chunk)
        hashed = self._copy.digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]
        if block[:HASH_BYTES] != hashed:
            self._copy.on_damage(number)
            raise TransferRefusedError(
                TransferRefusal.DAMAGED, f"chunk {number} of its copy is damaged"
            )
        return block


class _PieceHasher:
    """Hashes pieces as they arrive: `receive_chunk` updates it with whole ones."""

    def __init__(self) -> None:
        self.hashes = b""

    def update(self, data: memoryview) -> None:
        self.hashes += piece_hashes(data)


def _receive_part(
    connection: TransferConnection, digest: Digest, wanted: GetPart, buffer: memoryview
) -> memoryview:
    """Return the verified bytes of *wanted*, which was requested; they are in *buffer*.

    Raises:
        TransferRefusedError: The other side cannot serve them.
        WireError, OSError: The connection has failed, or the bytes arrived corrupt.
    """
    chunk_bytes = connection.limits.chunk_bytes
    kind, body = connection.receive(connection.limits.stall_s)
    if kind is not TransferFrameKind.DATA or GetPart.from_bytes(body) != wanted:
        raise WireError("not the requested part")
    number = wanted.begin // chunk_bytes
    n_here = min(chunk_bytes, digest.nbytes - number * chunk_bytes)
    block = connection.receive_bytes(block_bytes(n_here))
    data, hasher = buffer[: wanted.end - wanted.begin], _PieceHasher()
    is_authentic = connection.receive_chunk(data, hasher)
    expected = digest.table[number * HASH_BYTES : (number + 1) * HASH_BYTES]
    try:
        hashes = parse_block(block, expected, n_here)
    except CorruptError as exc:
        raise WireError(str(exc)) from exc
    if not is_authentic or not are_expected(hasher.hashes, hashes, wanted.begin % chunk_bytes):
        raise WireError("a part arrived corrupt")
    return data
