"""The messages between agents about checkpoints, in the control store; pure, and bounded.

A heartbeat carries a `NodeStatus`, a request to join an `Inventory`, a roster a `GenerationPlan`.
The `CommitRecord` is one value for all, changed only by compare-and-swap; it never goes back.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from struct import Struct
from typing import Annotated

from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.agreement.recovery import RestorePlan
from gpuops.checkpoint.agreement.replica_check import (
    ReplicaReport,
    last_equal_from_json,
    last_equal_to_json,
    replica_reports_from_json,
    replica_reports_to_json,
)
from gpuops.checkpoint.agreement.write_once import GroupKeys, WriteOnce
from gpuops.checkpoint.placement.domains import LEVELS_MAX
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    WORLD_MAX,
    Digest,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.control.record import GENERATION_MAX, NAME_CHARS_MAX, PORT_MAX, Roster
from gpuops.control.store import VALUE_BYTES_MAX
from gpuops.wire.messages import LENIENT, Limit, Message, Using

FIELD = "ckpt"
DROPPED_MAX = 16
STORED_MAX = 16
LAYOUT_CHARS = 16
HOLDERS_MAX = 16
NODES_MAX = 8192
WHY_CHARS_MAX = 200
BEHIND_MAX = 4
Generation = Annotated[int, Limit(GENERATION_MAX)]
EpochOrNone = Annotated[int, Limit(EPOCH_MAX, low=-1)]
Name = Annotated[str, Limit(NAME_CHARS_MAX, low=1)]
Port = Annotated[int, Limit(PORT_MAX)]
Why = Annotated[str, Limit(WHY_CHARS_MAX, is_cut=True)]
Packed = Annotated[bytes, Limit(VALUE_BYTES_MAX)]
_SHARD = Struct(">I32s")


@dataclass(frozen=True, slots=True)
class StoredStates(Message):
    """The complete states in the persistent directory, with their world sizes.

    ``epoch_max`` is the greatest epoch of any state in it, -1 where it is empty.
    """

    states: Annotated[
        tuple[tuple[StateId, Annotated[int, Limit(WORLD_MAX, low=1)]], ...],
        Limit(STORED_MAX, is_cut=True),
    ] = ()
    epoch_max: EpochOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStatus(Message):
    """A node's status of the final state of a run. ``is_over``: its ranks have ended.

    ``waits``: for the newest state to persist; ``trouble`` is the error that has prevented it from
    writing its part of ``failed`` since, "" without one. ``pieces`` were written so far.
    """

    is_over: bool = False
    waits: bool = False
    trouble: Why = ""
    failed: StateId | None = None
    pieces: Annotated[int, Limit(2**62)] = 0

    def is_stuck_at(self, persist: StateId) -> bool:
        """Return whether it cannot write *persist*; a failure of an older state does not count."""
        return bool(self.trouble) and (self.failed is None or self.failed >= persist)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(KeeperProgress):
    """The checkpoint status in each heartbeat of a node: the progress of its keeper, and more.

    ``told`` is the newest state that it knows must persist. ``wants``: its ranks wait for the
    decision which state to load, and ``stored`` are the states in its directory.
    """

    generation: Generation
    told: StateId | None = None
    wants: bool = False
    stored: StoredStates | None = None
    last: Annotated[FinalStatus, LENIENT] = field(default_factory=FinalStatus)


@dataclass(frozen=True, slots=True)
class HeldState:
    """The shards of one state in a node's memory, all of one ``layout`` (its first characters).

    ``shards`` has of each its rank (4 bytes) and the root of its digest (32 bytes): of 4,096 nodes
    a leader reads all, and unpacks the states that it may choose.
    """

    state: StateId
    world: Annotated[int, Limit(WORLD_MAX, low=1)]
    layout: Annotated[str, Limit(LAYOUT_CHARS)]
    shards: Packed

    def __post_init__(self) -> None:
        if len(self.shards) % _SHARD.size:
            raise ValueError(f"{len(self.shards)} bytes are not a whole number of shards")
        if any(rank >= self.world for rank, _root in _SHARD.iter_unpack(self.shards)):
            raise ValueError(f"a shard of a rank beyond a world of {self.world}")

    def copies(self, holder: str) -> Iterator[ShardCopy]:
        """Yield the copies; their digests have no more than the root."""
        for rank, root in _SHARD.iter_unpack(self.shards):
            digest = Digest(0, b"", root.hex())
            shard = Shard(rank, self.world)
            yield ShardCopy(self.state, shard, self.layout, digest, Tier.MEMORY, holder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Message):
    """The states that a joining node holds in memory, and the port where peers fetch them.

    Port 0: the node serves none.

    ``domain``: its failure domains, the widest first; () where none is known. ``stored_max`` is
    the greatest epoch in the persistent directory, -1 where there is none or it was not listed in
    time.
    """

    port: Port
    states: tuple[HeldState, ...] = ()
    epoch_max: EpochOrNone = -1
    domain: Annotated[tuple[Name, ...], Limit(LEVELS_MAX)] = ()
    stored_max: EpochOrNone = -1

    def copies(self, state: StateId, holder: str) -> list[ShardCopy]:
        """Return the copies of *state*."""
        return [copy for one in self.states if one.state == state for copy in one.copies(holder)]


def held_states(copies: Iterable[ShardCopy]) -> tuple[HeldState, ...]:
    """Return *copies* for an `Inventory`."""
    found: dict[tuple[StateId, int, str], bytes] = defaultdict(bytes)
    for copy in copies:
        key = (copy.state, copy.shard.world, copy.layout[:LAYOUT_CHARS])
        found[key] += _SHARD.pack(copy.shard.rank, bytes.fromhex(copy.digest.root))
    return tuple(HeldState(*key, shards) for key, shards in sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan(Message):
    """The plan that all members share. ``peers``: the address of each node's keeper.

    ``is_kept`` False: some node has no keeper (``missing``), so that none saves. ``restore`` None:
    it is decided once the ranks have named their directory. ``n_domains``: the number of failure
    domains, None where none is known; ``together`` nodes have all their copies in one domain.
    """

    is_kept: bool = False
    missing: Annotated[tuple[Name, ...], Limit(HOLDERS_MAX, is_cut=True)] = ()
    placement: ReplicaPlacement | None = None
    peers: Annotated[Mapping[Name, tuple[Name, Port]], Limit(NODES_MAX)] = field(
        default_factory=dict
    )
    restore: RestorePlan | None = None
    epoch_max: EpochOrNone = -1  # that any node reported
    n_domains: Annotated[int | None, Limit(NODES_MAX)] = None
    together: Annotated[int, Limit(NODES_MAX)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalCommitRecord(Message):
    """The agreement on the final state. ``missed`` will not be persistent, for ``why``.

    While a node waits, ``pieces`` is the number that all have written and ``behind`` are nodes that
    have not written their part: a node that sees neither change for long enough stops waiting.
    """

    missed: StateId | None = None
    why: Annotated[str, Limit(NAME_CHARS_MAX, is_cut=True)] = ""
    pieces: Annotated[int, Limit(2**62)] = 0
    behind: Annotated[tuple[Name, ...], Limit(BEHIND_MAX)] = ()

    def why_missed(self, state: StateId) -> str:
        """Return why *state* will not be persistent, "" where it still may be."""
        return self.why if self.missed is not None and self.missed >= state else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(Message):
    """The agreement of all nodes. ``committed``: each node of the generation has all its copies.

    ``dropped`` will never be committed, the newest first. All nodes write ``persist`` to the
    directory, and of the groups of ranks with the keys ``once``, which were equal at that state,
    each tensor once; ``sealed`` is complete there except for its manifest, which ``sealer`` writes;
    ``persisted`` has its manifest too. No step before ``aim`` is saved: by then all nodes have the
    decision. ``differ``: ranks of several nodes that differ, or are equal again, the newest last;
    ``alike``: by key the last state in which they were equal, for a few keys. ``last``: the final
    state.
    """

    generation: Generation = 0
    committed: StateId | None = None
    dropped: Annotated[tuple[StateId, ...], Limit(DROPPED_MAX)] = ()
    persist: StateId | None = None
    once: GroupKeys = ()
    sealed: StateId | None = None
    persisted: StateId | None = None
    sealer: Annotated[str, Limit(NAME_CHARS_MAX)] = ""
    aim: StateId | None = None
    differ: Annotated[
        tuple[ReplicaReport, ...], Using(replica_reports_to_json, replica_reports_from_json)
    ] = ()
    alike: Annotated[Mapping[str, StateId], Using(last_equal_to_json, last_equal_from_json)] = (
        field(default_factory=dict)
    )
    last: Annotated[FinalCommitRecord, LENIENT] = field(default_factory=FinalCommitRecord)

    def write_once(self, roster: Roster) -> WriteOnce | None:
        """Return what the nodes of *roster* write once of ``persist``, None for nothing."""
        sizes = tuple(member.n_workers for member in roster.members)
        return WriteOnce(self.once, sizes) if self.once else None
