"""The bytes between two keepers that hand an image over.

Short frames of fixed layout open a connection (`Hello`, `Challenge`, proofs: see `host.job_proof`).
After them a frame is a tag, the job, the epoch, a kind and what belongs to that kind. Three kinds
are followed by bytes that stand in no frame: `COPY` and `PUSH` by a table of chunk hashes, `DATA`
by chunks. How many those are follows from what was agreed before, and they are checked by digest.

One side *asks* for chunks and the other *serves* them. Who fetches asks; who pushes serves. So what
is missing after a broken connection is always decided by the side that has the memory.
"""

import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from gpuops.checkpoint.digest import HASH_BYTES, chunk_count
from gpuops.checkpoint.types import IMAGE_BYTES_MAX, CheckpointError, Shard, StateId
from gpuops.host.net.frames import FrameGreeting, WireError
from gpuops.host.net.job_proof import NONCE_BYTES, derived

JOB_BYTES = 16


class JobCredentials:
    """What a keeper shows and asks for: of which job it is, and which epoch it has reached.

    One object for the server and every client of a keeper: `advance` fences them all at once.
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
        """Refuse, from now on, whatever is of an epoch older than *epoch*; never goes back."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)


MAGIC = b"gpuopst1"
HEAD = struct.Struct(f">{JOB_BYTES}sIB")  # job, epoch, kind
FRAME_BYTES_MAX = 1024
# Before the token is proved there is nothing longer to say.
OPENING_BYTES_MAX = 128
# Of several small chunks asked for at once; a single larger chunk is a range of its own.
RANGE_BYTES_MAX = 16 * 2**20
TABLE_BYTES_MAX = 2**23  # of `IMAGE_BYTES_MAX` in chunks of 16 MiB
WHY_BYTES_MAX = 600

_HELLO = FrameGreeting("hello", MAGIC, f"{JOB_BYTES}s{NONCE_BYTES}s")
_CHALLENGE = FrameGreeting("challenge", MAGIC, f"{NONCE_BYTES}s")
_OPEN = struct.Struct(">IQIII32s")  # epoch, step, rank, world, chunk size, root
_COPY = struct.Struct(">Q32s")
_RANGE = struct.Struct(">II?")
_PUSH = struct.Struct(">IQIII32sQ32s?IQ")


class TransferError(CheckpointError):
    """A copy could not be handed over; the message says of what, between whom and why."""


class TransferRefusal(IntEnum):
    """Why the other side does not do what was asked."""

    NOT_HERE = 1  # no whole copy of that shard of that state
    DIFFERENT = 2  # a copy with another content, or cut into other chunks
    OLD_EPOCH = 3  # a newer epoch of the job has begun
    BUSY = 4  # now; later perhaps
    NOT_WANTED = 5  # a shard that is not kept here, or a state that was overtaken
    NO_ROOM = 6
    DAMAGED = 7  # the bytes there are not those that were saved
    FAILED = 8


class TransferRefusedError(TransferError):
    """The other side refuses; *code* says why to a program."""

    def __init__(self, code: TransferRefusal, why: str) -> None:
        super().__init__(why)
        self.code = code


class TransferFrameKind(IntEnum):
    """What a frame is."""

    OPEN = 1  # by the client: of this copy I will ask for chunks
    COPY = 2  # by the server: this is its digest
    PUSH = 3  # by the client: ask me for the chunks of this copy
    GET = 4  # by who asks
    DATA = 5  # by who serves
    WAIT = 6  # by who asks: nothing to ask for now, but I am here
    DONE = 7  # by who was pushed to: all is here and verified
    REFUSED = 8


@dataclass(frozen=True, slots=True)
class TransferHello:
    """Who calls: the digest of its job, and its nonce."""

    job: bytes
    nonce: bytes

    def to_bytes(self) -> bytes:
        return _HELLO.pack(self.job, self.nonce)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the hello in *data*; raises `WireError` where there is none."""
        return cls(*_HELLO.unpack(data))


@dataclass(frozen=True, slots=True)
class TransferChallenge:
    """The server's nonce."""

    nonce: bytes

    def to_bytes(self) -> bytes:
        return _CHALLENGE.pack(self.nonce)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the challenge in *data*; raises `WireError` where there is none."""
        return cls(*_CHALLENGE.unpack(data))


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """Which copy is meant; *root* is "" where any content will do."""

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
        """Return what *data* asks for; raises `WireError` where it cannot be."""
        epoch, step, rank, world, chunk_bytes, root = _unpack(_OPEN, data)
        state, shard = _state_and_shard(epoch, step, rank, world)
        return cls(state, shard, chunk_bytes, root.hex() if any(root) else "")


@dataclass(frozen=True, slots=True)
class PushOffer:
    """What is offered to a holder. *committed* is the newest state its owner knows committed."""

    state: StateId
    shard: Shard
    layout: str
    nbytes: int
    root: str
    committed: StateId | None = None

    def to_bytes(self, chunk_bytes: int) -> bytes:
        """Return it for the wire, and in chunks of which size it will be served."""
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
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Self, int]:
        """Return what is offered and the size of its chunks; raises `WireError`."""
        fields = _unpack(_PUSH, data)
        epoch, step, rank, world, chunk_bytes, layout, nbytes, root = fields[:8]
        state, shard = _state_and_shard(epoch, step, rank, world)
        if not 0 < nbytes <= IMAGE_BYTES_MAX:
            raise WireError(f"an image of {nbytes} bytes")
        is_known, committed_epoch, committed_step = fields[8:]
        committed = _state(committed_epoch, committed_step) if is_known else None
        return cls(state, shard, layout.hex(), nbytes, root.hex(), committed), chunk_bytes


@dataclass(frozen=True, slots=True)
class GetChunks:
    """Chunks *first* and the *count* - 1 after it; *is_suspect*: they came damaged before."""

    first: int
    count: int
    is_suspect: bool = False

    def to_bytes(self) -> bytes:
        return _RANGE.pack(self.first, self.count, self.is_suspect)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the range in *data*; raises `WireError`."""
        return cls(*_unpack(_RANGE, data))


def copy_bytes(nbytes: int, root: str) -> bytes:
    """Return what stands in a `COPY` frame."""
    return _COPY.pack(nbytes, bytes.fromhex(root))


def read_copy(data: bytes) -> tuple[int, str]:
    """Return the size and the root of a copy; raises `WireError`."""
    nbytes, root = _unpack(_COPY, data)
    if not 0 < nbytes <= IMAGE_BYTES_MAX:
        raise WireError(f"an image of {nbytes} bytes")
    return nbytes, root.hex()


def table_bytes(nbytes: int, chunk_bytes: int) -> int:
    """Return the size of the table of so large an image; raises `WireError` where it is absurd."""
    size = chunk_count(nbytes, chunk_bytes=chunk_bytes) * HASH_BYTES
    if size > TABLE_BYTES_MAX:
        raise WireError(f"a table of {size} bytes")
    return size


def refused_bytes(code: TransferRefusal, why: str) -> bytes:
    """Return what stands in a `REFUSED` frame; *why* is cut where it is long."""
    return bytes([code]) + why.encode("utf-8", "replace")[:WHY_BYTES_MAX]


def read_refused(data: bytes) -> TransferRefusedError:
    """Return the refusal in *data*, its text fit to be printed; raises `WireError`."""
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


def _state(epoch: int, step: int) -> StateId:
    try:
        return StateId(epoch, step)
    except ValueError as exc:
        raise WireError(str(exc)) from exc


def _state_and_shard(epoch: int, step: int, rank: int, world: int) -> tuple[StateId, Shard]:
    try:
        return _state(epoch, step), Shard(rank, world)
    except ValueError as exc:
        raise WireError(str(exc)) from exc
