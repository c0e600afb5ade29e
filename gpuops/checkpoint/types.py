"""The basic types of a checkpoint: states, shards, digests, copies."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from gpuops.errors import EXIT_USAGE, GpuopsError
from gpuops.wire.messages import Limit

CHUNK_BYTES = 16 * 2**20
STEP_MAX = 10**12 - 1
EPOCH_MAX = 99_999
WORLD_MAX = 100_000
IMAGE_BYTES_MAX = 2**44
WHY_CHARS_MAX = 300


class CheckpointError(GpuopsError):
    """A checkpoint cannot be saved, found, read or written; the message says which and why."""


class BadRequestError(CheckpointError):
    """An invalid request: no such part, place or tag."""

    exit_code = EXIT_USAGE


class ArgumentError(CheckpointError):
    """`Checkpointer` cannot save or use an argument of the script; no attempt of it could."""

    exit_code = EXIT_USAGE


class StructureError(CheckpointError):
    """What the script restores into is not of the structure that was saved; no attempt fits."""

    exit_code = EXIT_USAGE


class CorruptError(CheckpointError):
    """The bytes are not those that were saved."""


class RestoreUndecidedError(CheckpointError):
    """It is unknown whether there is a state to resume from: starting anew could lose it."""


class KeeperError(CheckpointError):
    """The keeper of this node does not answer, or refuses."""


@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """One state of a job; states sort by age.

    ``epoch`` grows by one each time the job's workers are started: steps that are repeated after a
    restart from step 8 are newer than a step 10 that was abandoned. ``step`` is the number of
    optimizer steps completed.
    """

    epoch: int
    step: int

    def __post_init__(self) -> None:
        if not (0 <= self.epoch <= EPOCH_MAX and 0 <= self.step <= STEP_MAX):
            raise ValueError(f"invalid state of epoch {self.epoch} and step {self.step}")

    @property
    def name(self) -> str:
        """Return the name of its directory: ``step-000000001200.e00003``."""
        return f"step-{self.step:012d}.e{self.epoch:05d}"

    def __str__(self) -> str:
        return f"step {self.step} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One rank's part of a state, which a world of *world* ranks saved."""

    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world <= WORLD_MAX:
            raise ValueError(f"no world of {self.world} has a rank {self.rank}")

    @property
    def file_name(self) -> str:
        """Return ``shard-00001-of-00004.safetensors``."""
        return f"shard-{self.rank:05d}-of-{self.world:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of an image's bytes when it was written.

    ``table`` has the xxh3-64 of each `CHUNK_BYTES`, 8 bytes big endian each; ``root`` is the BLAKE3
    of the length (8 bytes little endian) and the table, 64 hexadecimal digits.
    """

    nbytes: Annotated[int, Limit(IMAGE_BYTES_MAX)]
    table: bytes
    root: Annotated[str, Limit(64, low=64)]


class Tier(StrEnum):
    """The kind of place of a copy, the fastest first."""

    MEMORY = "memory"  # of this node
    PEER = "peer"  # another node's memory
    PERSISTENT = "persistent"  # a directory or an object store


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """One verified copy of one shard of one state. ``layout`` names the structure of the image."""

    state: StateId
    shard: Shard
    layout: Annotated[str, Limit(64)]
    digest: Digest
    tier: Tier
    holder: str  # the node, or the directory


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The state that all ranks load. ``why``: why newer ones were skipped.

    Unless ``is_verified``, what memory has is verified by the ranks, as they read it.
    ``stored_by``: the run that wrote it to the directory, None: it is not there.
    """

    state: StateId
    world: Annotated[int, Limit(WORLD_MAX, low=1)]
    tier: Tier
    epoch: Annotated[int, Limit(EPOCH_MAX)]  # of the states that are saved from now on
    why: tuple[Annotated[str, Limit(WHY_CHARS_MAX, is_cut=True)], ...] = ()
    is_verified: bool = True
    stored_by: Annotated[str, Limit(WHY_CHARS_MAX, is_cut=True)] | None = None


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """The address of another node's keeper; *host* is an IP address, not a name."""

    name: str
    host: Annotated[str, Limit(255)]
    port: Annotated[int, Limit(65_535, low=1)]

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name} ({host}:{self.port})"


@dataclass(frozen=True, slots=True)
class ShardHolders:
    """The holders of a shard, in the order in which they are asked.

    ``root`` is that of the digest that the bytes must have, "" where any verified copy of a holder
    will do.
    """

    peers: tuple[KeeperAddress, ...]
    root: str = ""

    def __post_init__(self) -> None:
        if self.root and (len(self.root) != 64 or self.root.strip("0123456789abcdef")):
            raise CheckpointError(f"{self.root!r} is not a digest root")
