"""The wire format between two keepers that transfer an image.

Short frames of fixed layout open a connection (`Hello`, `Challenge`, proofs: see
`gpuops.host.net.job_proof`). After them a frame is a tag, the job, the epoch, a kind and the fields
of that kind. Three kinds are followed by bytes outside of frames: `COPY` and `PUSH` by tables of
chunk hashes, which their roots verify, `DATA` by chunks, or by the block of a chunk and a part of
it, each with a tag where they cross a network. Their number follows from earlier frames, and they
are checked by digest.

One side *requests* chunks and the other *serves* them: a fetching client requests, a pushing client
serves. So the side that has the memory decides which chunks are missing after a broken connection.
"""

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self, TypeVar

from gpuops.checkpoint.digest import HASH_BYTES, chunk_count
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError, Shard, StateId
from gpuops.host.net.frames import FrameGreeting, WireError
from gpuops.host.net.job_proof import NONCE_BYTES, derived

T = TypeVar("T")
JOB_BYTES = 16


class JobCredentials:
    """A keeper's job, its token, and the newest epoch that it knows of.

    One object for the server and every client of a keeper: `advance` fences all of them at once.
    """

    def __init__(self, job: str, token: str, *, epoch: int = 0) -> None:
        self.job = derived("gpuops transfer job", job)[:JOB_BYTES]
        self.key = derived("gpuops transfer token", token)
        self._epoch = epoch
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """Return the newest epoch that this keeper knows of."""
        return self._epoch

    def advance(self, epoch: int) -> None:
        """Refuse frames of epochs older than *epoch* from now on; never goes back."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)


MAGIC = b"gpuopst3"
HEAD = struct.Struct(f">{JOB_BYTES}sIB")  # job, epoch, kind
FRAME_BYTES_MAX = 1024
# Before authentication frames are at most this long.
OPENING_BYTES_MAX = 128
# For several small chunks in one request; a single larger chunk is a range of its own.
RANGE_BYTES_MAX = 16 * 2**20
TABLE_BYTES_MAX = 2**23  # of `IMAGE_BYTES_MAX` in chunks of 16 MiB
WHY_BYTES_MAX = 600

_HELLO = FrameGreeting("hello", MAGIC, f"{JOB_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = FrameGreeting("challenge", MAGIC, f"{NONCE_BYTES}s")
_OPEN = struct.Struct(">IQIII32s")  # epoch, step, rank, world, chunk size, root
_COPY = struct.Struct(">Q32s")
_RANGE = struct.Struct(">II?")
_PART = struct.Struct(">QQ")
_PUSH = struct.Struct(">IQIII32sQ32s?IQQ32s")


class TransferError(CheckpointError):
    """A transfer failed; the message says of what, between which nodes and why."""


class TransferRefusal(IntEnum):
    """Why the other side refuses."""

    NOT_HERE = 1  # no complete copy of that shard of that state
    DIFFERENT = 2  # a copy with another content, or with another chunk size
    OLD_EPOCH = 3  # a newer epoch of the job has begun
    BUSY = 4  # for now; retry later
    NOT_WANTED = 5  # a shard that is not stored here, or a state that is superseded
    NO_ROOM = 6
    DAMAGED = 7  # the copy is corrupt
    FAILED = 8
    NOT_SAVED = 9  # its own ranks have not saved that state yet, of which it should have a part
    NOT_ALIKE = 10  # what its own ranks have saved is something else


class TransferRefusedError(TransferError):
    """The other side refuses; *code* is the reason."""

    def __init__(self, code: TransferRefusal, why: str) -> None:
        super().__init__(why)
        self.code = code


class TransferFrameKind(IntEnum):
    """The kind of a frame."""

    OPEN = 1  # by the client: I will request chunks of this copy
    COPY = 2  # by the server: this is its digest
    PUSH = 3  # by the client: request the chunks of this copy
    GET = 4  # by the requesting side
    DATA = 5  # by the serving side
    WAIT = 6  # by the requesting side: nothing to request for now, but I am alive
    DONE = 7  # by the holder: all chunks are verified
    REFUSED = 8
    FOUND = 9  # by the holder: it has verified more of what it has itself
    GET_PART = 10  # by a client that fetches: pieces of one chunk


@dataclass(frozen=True, slots=True)
class TransferHello:
    """The client's first frame: the digest of its job, and its nonce."""

    job: bytes
    nonce: bytes

    def to_bytes(self) -> bytes:
        return _HELLO.pack(self.job, self.nonce)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the hello in *data*; raises `WireError` where it is invalid."""
        return cls(*_HELLO.unpack(data))


@dataclass(frozen=True, slots=True)
class TransferChallenge:
    """The server's nonce."""

    nonce: bytes

    def to_bytes(self) -> bytes:
        return _CHALLENGE.pack(self.nonce)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the challenge in *data*; raises `WireError` where it is invalid."""
        return cls(*_CHALLENGE.unpack(data))


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """The requested copy; *root* is "" where any content will do."""

    state: StateId
    shard: Shard
    chunk_bytes: int
    root: str = ""

    def to_bytes(self) -> bytes:
        root = bytes.fromhex(self.root) if self.root else bytes(32)
        state, shard = self.state, self.shard
        return _OPEN.pack(state.epoch, state.step, shard.rank, shard.world, self.chunk_bytes, root)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the request in *data*; raises `WireError` where it is invalid."""
        epoch, step, rank, world, chunk_bytes, root = _unpack(_OPEN, data)
        state, shard = _checked(StateId, epoch, step), _checked(Shard, rank, world)
        return cls(state, shard, chunk_bytes, root.hex() if any(root) else "")


@dataclass(frozen=True, slots=True)
class PushOffer:
    """A replica for a holder. *committed* is the newest state its owner knows to be committed.

    *nbytes* and *root* are of the bytes to request: the image, or the remainder of the image of
    *image_nbytes* with *image_root* (`gpuops.checkpoint.peers.alike`).
    """

    state: StateId
    shard: Shard
    layout: str
    nbytes: int
    root: str
    committed: StateId | None = None
    image_nbytes: int = 0
    image_root: str = ""

    @property
    def is_remainder(self) -> bool:
        return self.image_nbytes > 0

    def to_bytes(self, chunk_bytes: int) -> bytes:
        """Encode it, with the size of the chunks in which it will be served."""
        state, shard, committed = self.state, self.shard, self.committed
        return _PUSH.pack(
            state.epoch,
            state.step,
            shard.rank,
            shard.world,
            chunk_bytes,
            bytes.fromhex(self.layout),
            self.nbytes,
            bytes.fromhex(self.root),
            committed is not None,
            committed.epoch if committed else 0,
            committed.step if committed else 0,
            self.image_nbytes,
            bytes.fromhex(self.image_root) if self.image_root else bytes(32),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Self, int]:
        """Return the offer and the size of its chunks; raises `WireError`."""
        fields = _unpack(_PUSH, data)
        epoch, step, rank, world, chunk_bytes, layout, nbytes, root = fields[:8]
        state, shard = _checked(StateId, epoch, step), _checked(Shard, rank, world)
        is_known, committed_epoch, committed_step, image_nbytes, image_root = fields[8:]
        if not 0 < nbytes <= IMAGE_BYTES_MAX or image_nbytes > IMAGE_BYTES_MAX:
            raise WireError(f"an image of {max(nbytes, image_nbytes)} bytes")
        committed = _checked(StateId, committed_epoch, committed_step) if is_known else None
        whole = (image_nbytes, image_root.hex()) if image_nbytes else (0, "")
        found = cls(state, shard, layout.hex(), nbytes, root.hex(), committed, *whole)
        return found, chunk_bytes


@dataclass(frozen=True, slots=True)
class GetChunks:
    """Chunks *first* and the *count* - 1 after it; *is_suspect*: they arrived corrupt before."""

    first: int
    count: int
    is_suspect: bool = False

    def to_bytes(self) -> bytes:
        return _RANGE.pack(self.first, self.count, self.is_suspect)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the range in *data*; raises `WireError`."""
        return cls(*_unpack(_RANGE, data))


@dataclass(frozen=True, slots=True)
class GetPart:
    """The bytes from *begin* up to *end*: whole pieces of one chunk."""

    begin: int
    end: int

    def to_bytes(self) -> bytes:
        return _PART.pack(self.begin, self.end)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the part in *data*; raises `WireError`."""
        return cls(*_unpack(_PART, data))


def copy_bytes(nbytes: int, root: str) -> bytes:
    """Encode the fields of a `COPY` frame."""
    return _COPY.pack(nbytes, bytes.fromhex(root))


def read_copy(data: bytes) -> tuple[int, str]:
    """Return the size and the root of a copy; raises `WireError`."""
    nbytes, root = _unpack(_COPY, data)
    if not 0 < nbytes <= IMAGE_BYTES_MAX:
        raise WireError(f"an image of {nbytes} bytes")
    return nbytes, root.hex()


def table_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Return the size of the table of an image of *nbytes*; raises `WireError` for a bad size."""
    size = chunk_count(nbytes, chunk_bytes=chunk_bytes) * HASH_BYTES
    if size > TABLE_BYTES_MAX:
        raise WireError(f"a table of {size} bytes")
    return size


def refused_bytes(code: TransferRefusal, why: str) -> bytes:
    """Encode the fields of a `REFUSED` frame; *why* is truncated where it is long."""
    return bytes([code]) + why.encode("utf-8", "replace")[:WHY_BYTES_MAX]


def read_refused(data: bytes) -> TransferRefusedError:
    """Return the refusal in *data*, its text safe to print; raises `WireError`."""
    try:
        code = TransferRefusal(data[0])
    except (ValueError, IndexError) as exc:
        raise WireError("not a refusal") from exc
    text = data[1:].decode("utf-8", "replace")
    return TransferRefusedError(code, "".join(char if char.isprintable() else "?" for char in text))


def _unpack(layout: struct.Struct, data: bytes) -> tuple[Any, ...]:
    try:
        return layout.unpack(data)
    except struct.error as exc:
        raise WireError(f"a message of {len(data)} bytes, not of {layout.size}") from exc


def _checked(kind: Callable[[int, int], T], first: int, second: int) -> T:
    try:
        return kind(first, second)
    except ValueError as exc:
        raise WireError(str(exc)) from exc
