"""The messages between agents about checkpoints, in the control store; pure, and bounded.

A heartbeat carries a `NodeStatus`, a request to join an `Inventory`, a roster a `GenerationPlan`.
The `CommitRecord` is one value for all, changed only by compare-and-swap; it never goes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from gpuops.checkpoint.placement.domains import LEVELS_MAX
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement
from gpuops.checkpoint.types import EPOCH_MAX, WORLD_MAX, ShardCopy, StateId
from gpuops.control.record import GENERATION_MAX, NAME_CHARS_MAX, PORT_MAX
from gpuops.wire.messages import LENIENT, Limit, Message, Using

FIELD = "ckpt"
DROPPED_MAX = 16
STORED_MAX = 16
COPIES_MAX = 1024
HOLDERS_MAX = 16
NODES_MAX = 8192
WHY_CHARS_MAX = 200
BEHIND_MAX = 4
Generation = Annotated[int, Limit(GENERATION_MAX)]
EpochOrNone = Annotated[int, Limit(EPOCH_MAX, low=-1)]
Name = Annotated[str, Limit(NAME_CHARS_MAX, low=1)]
Port = Annotated[int, Limit(PORT_MAX)]
Why = Annotated[str, Limit(WHY_CHARS_MAX, is_cut=True)]


@dataclass(frozen=True, slots=True)
class StoredStates(Message):
    """What a node found in the persistent directory: whole states with their worlds.

    ``epoch_max`` is the greatest epoch of anything there, -1 where there is nothing.
    """

    states: Annotated[
        tuple[tuple[StateId, Annotated[int, Limit(WORLD_MAX, low=1)]], ...],
        Limit(STORED_MAX, is_cut=True),
    ] = ()
    epoch_max: EpochOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalStatus(Message):
    """What a node says of the last state of a run. ``is_over``: its ranks have ended.

    ``waits``: for the newest state to persist; ``trouble`` has kept it from writing its part of
    ``failed`` since, "" where nothing has. ``pieces`` were written so far.
    """

    is_over: bool = False
    waits: bool = False
    trouble: Why = ""
    failed: StateId | None = None
    pieces: Annotated[int, Limit(2**62)] = 0

    def is_stuck_at(self, persist: StateId) -> bool:
        """Say whether it cannot write *persist*; that an older one failed does not say that."""
        return bool(self.trouble) and (self.failed is None or self.failed >= persist)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(KeeperProgress):
    """What a node says of its states with each heartbeat: how far its keeper is, and more.

    ``told`` is the newest state that it knows is to persist. ``wants``: its ranks wait to know
    which state to load, and ``stored`` is what its directory has.
    """

    generation: Generation
    told: StateId | None = None
    wants: bool = False
    stored: StoredStates | None = None
    last: Annotated[FinalStatus, LENIENT] = field(default_factory=FinalStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Message):
    """What a node that joins holds in memory, and the port where peers get it.

    Digests are roots only: enough to see what is equal. ``domain``: what fails together with it,
    the widest first; () where it knows of nothing. ``stored_max`` is the greatest epoch in the
    persistent directory, -1 where there is none or it did not tell in time.
    """

    port: Port
    copies: Annotated[tuple[ShardCopy, ...], Limit(COPIES_MAX, is_cut=True)] = ()
    epoch_max: EpochOrNone = -1
    domain: Annotated[tuple[Name, ...], Limit(LEVELS_MAX)] = ()
    stored_max: EpochOrNone = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan(Message):
    """What all members know alike. ``peers``: where the keeper of each node is.

    ``is_kept`` False: some node has no keeper (``missing``), so that none saves. ``restore`` None:
    it is decided once the ranks have named their directory. ``n_domains``: of the nodes, None where
    none is known; of ``together`` nodes all copies lie in one.
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
    """What is agreed on of the last state. ``missed`` will not be persistent, for ``why``.

    While a node waits, ``pieces`` says how much all have written and ``behind`` who has not
    written its part: a node that sees neither change for long enough waits no more.
    """

    missed: StateId | None = None
    why: Annotated[str, Limit(NAME_CHARS_MAX, is_cut=True)] = ""
    pieces: Annotated[int, Limit(2**62)] = 0
    behind: Annotated[tuple[Name, ...], Limit(BEHIND_MAX)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord(Message):
    """What is agreed on. ``committed``: every node of the generation has it, as often as asked.

    ``dropped`` will never be committed, the newest first. ``persist`` is to be written to the
    directory by all, ``sealed`` is there whole but for its manifest, which ``sealer`` writes, and
    ``persisted`` has that, too. Nothing before the step ``aim`` is to be saved: by then all have
    heard that they may. ``differ``: ranks of several nodes that differ, or are equal again, the
    newest last; ``alike``: by key the last state in which they were equal, of a few keys. ``last``:
    what of the last state will not be.
    """

    generation: Generation = 0
    committed: StateId | None = None
    dropped: Annotated[tuple[StateId, ...], Limit(DROPPED_MAX)] = ()
    persist: StateId | None = None
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
