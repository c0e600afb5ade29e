"""The messages on a keeper's socket: one JSON object a message, versioned, bounded, checked.

A request is ``{"v": 1, "id": n, "what": word, …}``; its reply has the same id and either ``"ok"``
or ``"error"`` (a sentence) with ``"kind"``; a request with the id 0 has no reply. Descriptors go
beside a reply only. The other fields of a request are the parameters of the function that handles
it (`gpuops.checkpoint.keeper.requests`), read by their types.
"""

import json
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    IMAGE_BYTES_MAX,
    STEP_MAX,
    WHY_CHARS_MAX,
    WORLD_MAX,
    CheckpointError,
    KeeperAddress,
    RestorePoint,
    Shard,
    ShardCopy,
    ShardHolders,
    StateId,
)
from gpuops.wire.messages import Limit, Message, plain

VERSION = 1
MESSAGE_BYTES_MAX = 64 * 1024
FDS_MAX = 8
NO_DIRECTORY = "no directory for checkpoints is set"  # why nothing is persisted
UNDECIDED = "cannot_tell"  # the kind of an error: whether there is a state to load
ID_MAX = 2**53
WHY_MAX = 16
SLOTS_MIN = 2
SLOTS_MAX = 8
DIRECTORY_CHARS_MAX = 4096
SECONDS_MAX = 1e9
KEPT_MAX = 1_000_000
_LOCAL_RANKS_MAX = 4096
_COMMAND_CHARS_MAX = 40
_HOLDERS_PER_SHARD_MAX = 8
_SHARDS_PER_PAGE = 100
Step = Annotated[int, Limit(STEP_MAX)]
Epoch = Annotated[int, Limit(EPOCH_MAX)]
World = Annotated[int, Limit(WORLD_MAX, low=1)]
Generation = Annotated[int, Limit(2**31)]
Count = Annotated[int, Limit(ID_MAX)]
Port = Annotated[int, Limit(65_535)]
Name = Annotated[str, Limit(200)]
Why = Annotated[str, Limit(WHY_CHARS_MAX)]
Seconds = Annotated[float, Limit(SECONDS_MAX)]
WaitSeconds = Annotated[float, Limit(86_400.0)]
Hash = Annotated[str, Limit(64, low=64)]
ImageBytes = Annotated[int, Limit(IMAGE_BYTES_MAX, low=1)]
SlotCount = Annotated[int, Limit(SLOTS_MAX, low=1)]
Shards = Annotated[tuple[Shard, ...], Limit(2048)]
Peers = tuple[KeeperAddress, ...]
_Numbers = Annotated[tuple[int, ...], Limit(_HOLDERS_PER_SHARD_MAX)]
HolderRows = Annotated[
    tuple[tuple[Shard, Annotated[str, Limit(64)], _Numbers], ...], Limit(_SHARDS_PER_PAGE)
]


class MessageError(CheckpointError):
    """A message that this version does not know, or that is none."""


def to_bytes(message: Mapping[str, object]) -> bytes:
    """Return *message*, which may hold states, shards and other values, as it goes over the socket.

    Raises:
        MessageError: It is too long.
    """
    data = json.dumps(plain(message), separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message has {len(data)} bytes, more than {MESSAGE_BYTES_MAX}")
    return data


def from_bytes(data: bytes) -> dict[str, Any]:
    """Return the fields of the message in *data*.

    Raises:
        MessageError: It is no JSON object, too long, or of another version.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise MessageError("a message is no JSON") from exc
    if not isinstance(found, dict):
        raise MessageError("a message is no JSON object")
    if type(found.get("v")) is not int or found["v"] != VERSION:
        version = str(found.get("v"))[:20]
        raise MessageError(
            f"a message is of version {version}, and this gpuops speaks {VERSION}: all processes "
            "of a job must run the same release"
        )
    return found


def number_and_command(fields: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of a request and what it asks for; raises MessageError."""
    number, command = fields.get("id"), fields.get("what")
    if type(number) is not int or not isinstance(command, str) or len(command) > _COMMAND_CHARS_MAX:
        raise MessageError("a message has no number, or asks for nothing")
    return number, command


def receive(sock: socket.socket) -> bytes:
    """Return the next message, b"" where the other side is gone.

    Descriptors that come with it are dropped by the kernel. Raises OSError as `recvmsg` does,
    MessageError where the message is longer than any can be.
    """
    data, _, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX)
    if flags & socket.MSG_TRUNC:
        raise MessageError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
    return data


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank stands: its shard, its number on this node, and which start it is of."""

    shard: Shard
    local_rank: int
    n_ranks: Annotated[int, Limit(_LOCAL_RANKS_MAX)]
    generation: Generation

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < self.n_ranks <= self.shard.world:
            raise ValueError(f"no node has a local rank {self.local_rank} of {self.n_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """How often states are kept, where, and how many; the same for all ranks.

    ``every_s``: the first rank that asks for a step less than this after the last grant is told
    that none is due, and so are all others of the node (0: each step that is asked for is due).
    ``directory``: a directory or an fsspec URL, None: nothing is persisted. ``persist_every_s``:
    between the beginnings of two; None: only when it is asked for (a flush). Of what is persisted
    the last ``keep_last`` stay, and every state whose step divides by ``keep_every`` (0: none).
    """

    directory: str | None = None
    persist_every_s: float | None = 600.0
    keep_last: int = 3
    keep_every: int = 0
    slots: int = 2
    every_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise CheckpointError for what cannot be."""
        if self.directory is not None and not (
            0 < len(self.directory) <= DIRECTORY_CHARS_MAX and "\0" not in self.directory
        ):
            raise CheckpointError(f"this is no directory for checkpoints: {self.directory[:80]!r}")
        for name, seconds in (("persist_every", self.persist_every_s), ("every", self.every_s)):
            if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= SECONDS_MAX):
                raise CheckpointError(f"{name} is {seconds!r}: it must be 0 or more seconds")
        for name in ("keep_last", "keep_every", "slots"):
            if type(getattr(self, name)) is not int:
                raise CheckpointError(
                    f"{name} is {getattr(self, name)!r}: a whole number is wanted"
                )
        if not 1 <= self.keep_last <= KEPT_MAX:
            raise CheckpointError(f"keep_last is {self.keep_last}: at least one must be kept")
        if not 0 <= self.keep_every <= KEPT_MAX:
            raise CheckpointError(f"keep_every is {self.keep_every}: it must be 0 or more steps")
        if not SLOTS_MIN <= self.slots <= SLOTS_MAX:
            raise CheckpointError(f"slots is {self.slots}: from {SLOTS_MIN} to {SLOTS_MAX}")


@dataclass(frozen=True, slots=True)
class Lease:
    """Copy now: into this one of the slots that `reserve` returned; it becomes *state*.

    ``notice`` is for whoever trains, where no agent is there to tell it.
    """

    slot: int
    state: StateId
    notice: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Do not copy at this step, and do not wait.

    ``is_due`` is false where it was merely too early for a save (`CheckpointPolicy.every_s`):
    nothing was missed then, and nothing is counted.
    """

    why: str
    is_due: bool = True


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The reply where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class HelloReply(Message):
    """The pid of the agent that is connected, if any."""

    agent: int | None = None


@dataclass(frozen=True, slots=True)
class ReservedSlots(Message):
    """The numbers of the slots whose descriptors come beside this."""

    slots: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class SaveDecision(Message):
    """Whether to copy; the ``slot`` of the lease is the number that `ReservedSlots` has."""

    lease: Lease | None = None
    skipped: Skipped | None = None


@dataclass(frozen=True, slots=True)
class Restore(Message):
    """The state to load, None for a fresh start."""

    restore_point: RestorePoint | None = None


@dataclass(frozen=True, slots=True)
class OpenedShard(Message):
    """A file, or the size of the memory whose descriptor comes beside this."""

    path: Annotated[str, Limit(16_384)] = ""
    nbytes: Count = 0


@dataclass(frozen=True, slots=True)
class FlushResult(Message):
    """What came of a flush: *state* is persisted; None where none is, *why* says why.

    ``seconds`` and ``nbytes`` are of the last writing, which may have been earlier. ``directory``
    None: nobody has named one.
    """

    state: StateId | None
    seconds: Seconds = 0.0
    nbytes: Count = 0
    why: Annotated[str, Limit(4000, is_cut=True)] = ""
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class InventoryPage(Message):
    """Copies in memory; of their digests the roots."""

    copies: tuple[ShardCopy, ...] = ()
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class EventsPage(Message):
    """What happened, the oldest first; each has a ``kind``."""

    events: tuple[dict[str, Any], ...] = ()
    is_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperStatus(Message):
    """What an agent asks for once a second.

    ``epoch`` is of the states that are saved now. ``n_persist_failed``: tries in a row, the last of
    which was of ``persist_failed``; ``persist_trouble`` says why. ``persist_pieces`` were written
    so far.
    """

    progress: KeeperProgress
    epoch: Epoch | None = None
    n_ranks: Count = 0
    n_committed: Count = 0
    skipped: Mapping[str, Count] = field(default_factory=dict)
    n_holders: Count = 0
    n_holders_gone: Count = 0
    directory: str | None = None
    n_persist_failed: Count = 0
    persist_failed: StateId | None = None
    persist_trouble: str = ""
    persist_pieces: Count = 0


@dataclass(frozen=True, slots=True)
class HandOver(Message):
    """How many ranks are at work, and whether the keeper ends."""

    ranks: Count = 0
    is_ending: bool = False


def holder_pages(
    sources: Mapping[Shard, Sequence[KeeperAddress]], roots: Mapping[Shard, str]
) -> Iterator[dict[str, Any]]:
    """Yield the fields of the messages that say who holds what, each short enough for one.

    Of many holders of one shard the first are said; ``shards`` name ``peers`` by number.
    """
    shards = sorted(sources)
    for at in range(0, len(shards), _SHARDS_PER_PAGE):
        numbers_by_peer: dict[KeeperAddress, int] = {}
        rows = []
        for shard in shards[at : at + _SHARDS_PER_PAGE]:
            peers = list(sources[shard])[:_HOLDERS_PER_SHARD_MAX]
            numbers = [numbers_by_peer.setdefault(peer, len(numbers_by_peer)) for peer in peers]
            rows.append((shard, roots.get(shard, ""), tuple(numbers)))
        yield {"is_first": at == 0, "peers": list(numbers_by_peer), "shards": rows}


def holders_in(peers: Sequence[KeeperAddress], shards: HolderRows) -> dict[Shard, ShardHolders]:
    """Return the holders by shard; raises MessageError for a number of no peer."""
    if any(not 0 <= n < len(peers) for _, _, numbers in shards for n in numbers):
        raise MessageError(f"a message names peers beyond its {len(peers)}")
    return {
        shard: ShardHolders(tuple(peers[n] for n in numbers), root)
        for shard, root, numbers in shards
    }
