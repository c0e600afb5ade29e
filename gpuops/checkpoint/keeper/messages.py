"""The messages on a keeper's socket: one JSON object a message, versioned, bounded, checked.

A request is ``{"v": 1, "id": n, "what": word, …}``; its reply has the same id and either ``"ok"``
or ``"error"`` (a sentence) with ``"kind"``; a request with the id 0 has no reply. Only replies
carry descriptors. The other fields of a request are the parameters of the function that handles it
(`gpuops.checkpoint.keeper.requests`), read by their types.
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
VERSION_CHARS_MAX = 64
MESSAGE_BYTES_MAX = 64 * 1024
NO_DIRECTORY = "no directory for checkpoints is set"  # why nothing is persisted
CORRUPT = "corrupt"  # the kind of an error: no copy of these bytes is intact
UNDECIDED = "cannot_tell"  # the kind of an error: it is unknown whether there is a state to load
ID_MAX = 2**53
WHY_MAX = 16
SLOTS_MIN = 2
SLOTS_MAX = 8
FDS_MAX = SLOTS_MAX + 1  # with the stamp of their copies
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
RANGES_MAX = 1500  # of at most 30 characters each: a message has room for them
Ranges = Annotated[tuple[tuple[Count, Count], ...], Limit(RANGES_MAX)]
Peers = tuple[KeeperAddress, ...]
_Rank = Annotated[int, Limit(WORLD_MAX)]
RankRanges = tuple[tuple[_Rank, _Rank], ...]  # the first rank and the one after the last
ADDRESSES_MAX = 1024
Addresses = Annotated[tuple[Annotated[str, Limit(50)], ...], Limit(ADDRESSES_MAX)]
_Numbers = Annotated[tuple[int, ...], Limit(_HOLDERS_PER_SHARD_MAX)]
HolderRows = Annotated[
    tuple[tuple[Shard, Annotated[str, Limit(64)], _Numbers], ...], Limit(_SHARDS_PER_PAGE)
]


class MessageError(CheckpointError):
    """A message that is invalid, or that this version does not know."""


def to_bytes(message: Mapping[str, object]) -> bytes:
    """Encode *message*, which may contain states, shards and other values, for the socket.

    Raises:
        MessageError: It is too long.
    """
    data = json.dumps(plain(message), separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message has {len(data)} bytes, more than {MESSAGE_BYTES_MAX}")
    return data


def from_bytes(data: bytes) -> dict[str, Any]:
    """Decode the message in *data*.

    Raises:
        MessageError: It is not a JSON object, too long, or of another version.
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise MessageError("a message is not JSON") from exc
    if not isinstance(found, dict):
        raise MessageError("a message is not a JSON object")
    if type(found.get("v")) is not int or found["v"] != VERSION:
        version = str(found.get("v"))[:20]
        raise MessageError(
            f"a message is of version {version}, and this gpuops uses {VERSION}: all processes "
            "of a job must run the same release"
        )
    return found


def number_and_command(fields: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number and the command of a request; raises MessageError."""
    number, command = fields.get("id"), fields.get("what")
    if type(number) is not int or not isinstance(command, str) or len(command) > _COMMAND_CHARS_MAX:
        raise MessageError("a message has no number or no command")
    return number, command


def receive(sock: socket.socket) -> bytes:
    """Return the next message, b"" where the other side is gone.

    The kernel closes descriptors that come with it. Raises OSError as `recvmsg` does, MessageError
    where the message is too long.
    """
    data, _, flags, _ = sock.recvmsg(MESSAGE_BYTES_MAX)
    if flags & socket.MSG_TRUNC:
        raise MessageError(f"a message has more than {MESSAGE_BYTES_MAX} bytes")
    return data


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The identity of a rank: its shard, its local rank, and its generation."""

    shard: Shard
    local_rank: int
    n_ranks: Annotated[int, Limit(_LOCAL_RANKS_MAX)]
    generation: Generation

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < self.n_ranks <= self.shard.world:
            raise ValueError(f"no node has a local rank {self.local_rank} of {self.n_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """How often states are saved and persisted, where, and how many; the same for all ranks.

    ``every_s``: the least time between two saves: steps requested earlier are not due, for all
    ranks of the node (0: each requested step is due). ``directory``: a directory or an fsspec URL;
    None: nothing is persisted. ``persist_every_s``: between the starts of two; None: only on
    request (a flush). Of the persisted states the last ``keep_last`` stay, and every state whose
    step is a multiple of ``keep_every`` (0: none).
    """

    directory: str | None = None
    persist_every_s: float | None = 600.0
    keep_last: int = 3
    keep_every: int = 0
    slots: int = 2
    every_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise CheckpointError for invalid values."""
        if self.directory is not None and not (
            0 < len(self.directory) <= DIRECTORY_CHARS_MAX and "\0" not in self.directory
        ):
            raise CheckpointError(f"invalid directory for checkpoints: {self.directory[:80]!r}")
        for name, seconds in (("persist_every", self.persist_every_s), ("every", self.every_s)):
            if seconds is not None and not (math.isfinite(seconds) and 0 <= seconds <= SECONDS_MAX):
                raise CheckpointError(f"{name} is {seconds!r}: it must be 0 or more seconds")
        for name in ("keep_last", "keep_every", "slots"):
            if type(getattr(self, name)) is not int:
                raise CheckpointError(
                    f"{name} is {getattr(self, name)!r}: it must be a whole number"
                )
        if not 1 <= self.keep_last <= KEPT_MAX:
            raise CheckpointError(f"keep_last is {self.keep_last}: at least one must be kept")
        if not 0 <= self.keep_every <= KEPT_MAX:
            raise CheckpointError(f"keep_every is {self.keep_every}: it must be 0 or more steps")
        if not SLOTS_MIN <= self.slots <= SLOTS_MAX:
            raise CheckpointError(f"slots is {self.slots}: from {SLOTS_MIN} to {SLOTS_MAX}")


@dataclass(frozen=True, slots=True)
class Lease:
    """Copy now into this slot, one of those from `reserve`; its content becomes *state*.

    ``number`` is what the stamp of the copy has once it is complete
    (`gpuops.checkpoint.memory.copy_stamp`). ``notice`` is for the training's log, where there is no
    agent to log it.
    """

    slot: int
    state: StateId
    number: Count
    notice: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Do not copy at this step, and do not wait.

    ``is_due`` is false where it was only too early for a save (`CheckpointPolicy.every_s`): this is
    not counted as a skipped save. ``awaits_nodes``: the state before is not committed by all nodes
    yet. ``copies_all``: reserve memory for all tensors, and copy also
    those that another rank of the node owned until now. ``is_over``: the last step of this rank can
    no longer be saved.
    """

    why: str
    is_due: bool = True
    awaits_nodes: bool = False
    copies_all: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The reply without content."""


@dataclass(frozen=True, slots=True)
class HelloReply(Message):
    """The pid of the connected agent, if any, and the keeper's version of gpuops."""

    agent: int | None = None
    version: Annotated[str, Limit(VERSION_CHARS_MAX)] = ""


@dataclass(frozen=True, slots=True)
class ReservedSlots(Message):
    """The numbers of the slots whose descriptors come with this reply, and that of the stamp."""

    slots: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class SaveDecision(Message):
    """Whether to copy; the ``slot`` of the lease is one of the numbers in `ReservedSlots`."""

    lease: Lease | None = None
    skipped: Skipped | None = None


@dataclass(frozen=True, slots=True)
class Restore(Message):
    """The state to load, None for a fresh start."""

    restore_point: RestorePoint | None = None


@dataclass(frozen=True, slots=True)
class OpenedShard(Message):
    """A file, or the size of the memory whose descriptor comes with this reply.

    ``is_partial``: only what is requested with ``read_parts`` is in the memory. ``root``: of the
    digest that it has to be verified with, whose table comes with a second descriptor; "": it was.
    """

    path: Annotated[str, Limit(16_384)] = ""
    nbytes: Count = 0
    is_partial: bool = False
    root: Annotated[str, Limit(64)] = ""


@dataclass(frozen=True, slots=True)
class FlushResult(Message):
    """The result of a flush: *state* is persisted; None where none is, *why* gives the reason.

    ``seconds`` and ``nbytes`` are of the last write, which may have been earlier. ``directory``
    None: none is set. ``others_s``: this is no result yet; the shards of other nodes are missing,
    and another flush waits for them at most that long.
    """

    state: StateId | None
    seconds: Seconds = 0.0
    nbytes: Count = 0
    why: Annotated[str, Limit(4000, is_cut=True)] = ""
    directory: str | None = None
    others_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class InventoryPage(Message):
    """Copies in memory, with the roots of their digests."""

    copies: tuple[ShardCopy, ...] = ()
    is_all: bool = False


@dataclass(frozen=True, slots=True)
class EventsPage(Message):
    """Events, the oldest first; each has a ``kind``."""

    events: tuple[dict[str, Any], ...] = ()
    is_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperStatus(Message):
    """The status that an agent polls.

    ``epoch``: of the states that are saved now. ``n_persist_failed``: consecutive failed attempts,
    the last of them for ``persist_failed``; ``persist_trouble`` is the reason. ``persist_pieces``:
    chunks written so far. ``verified``: the newest state that was read back from the directory.
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
    verified: StateId | None = None


@dataclass(frozen=True, slots=True)
class HandOver(Message):
    """How many ranks are connected, and whether the keeper ends."""

    ranks: Count = 0
    is_ending: bool = False


def holder_pages(
    sources: Mapping[Shard, Sequence[KeeperAddress]], roots: Mapping[Shard, str]
) -> Iterator[dict[str, Any]]:
    """Yield the fields of the messages that list the holders, each short enough for one message.

    Of many holders of one shard only the first are listed; ``shards`` refer to ``peers`` by number.
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
    """Return the holders by shard; raises MessageError for an unknown peer number."""
    if any(not 0 <= n < len(peers) for _, _, numbers in shards for n in numbers):
        raise MessageError(f"a message refers to peers beyond its {len(peers)}")
    return {
        shard: ShardHolders(tuple(peers[n] for n in numbers), root)
        for shard, root, numbers in shards
    }
