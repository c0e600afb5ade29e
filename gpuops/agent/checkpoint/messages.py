"""The messages between agents about checkpoints, in the control store; pure, and bounded.

A heartbeat carries a `NodeStatus`, a request to join an `Inventory`, a roster a `GenerationPlan`.
The `CommitRecord` is one value for all, changed only by compare-and-swap; it never goes back.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gpuops.agent.checkpoint.final_record import (
    FinalCommitRecord,
    FinalStatus,
    last_mark,
    last_word,
)
from gpuops.agent.checkpoint.keeper_events import pair, whole
from gpuops.checkpoint.agreement.replica_check import (
    GroupDigest,
    ReplicaReport,
    group_digests_from_json,
    group_digests_to_json,
    last_equal_from_json,
    last_equal_to_json,
    replica_report_to_json,
    replica_reports_from_json,
)
from gpuops.checkpoint.placement.domains import LEVELS_MAX, DomainPath
from gpuops.checkpoint.placement.replica_placement import ReplicaPlacement
from gpuops.checkpoint.types import (
    EPOCH_MAX,
    IMAGE_BYTES_MAX,
    WORLD_MAX,
    CheckpointError,
    Digest,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.control.record import NAME_CHARS_MAX, PORT_MAX
from gpuops.model import Json

FIELD = "ckpt"
STATES_MAX = 4
REFUSED_MAX = 8
DROPPED_MAX = 16
STORED_MAX = 16
COPIES_MAX = 1024
HOLDERS_MAX = 16
NODES_MAX = 8192
WHY_MAX = 8
WHY_CHARS_MAX = 200
_LAYOUT_CHARS = 16


class MessageFormatError(ValueError):
    """What another agent wrote is none of these words."""


def state_json(state: StateId | None) -> list[int] | None:
    """Return ``[epoch, step]``."""
    return None if state is None else [state.epoch, state.step]


def states_json(states: Iterable[StateId], most: int) -> list[list[int]]:
    """Return the newest *most* of *states*, the newest first."""
    return [[state.epoch, state.step] for state in sorted(set(states), reverse=True)[:most]]


@dataclass(frozen=True, slots=True)
class StoredStates:
    """What a node found in the persistent directory: whole states with their worlds.

    ``epoch_max`` is the greatest epoch of anything there, -1 where there is nothing.
    """

    states: tuple[tuple[StateId, int], ...] = ()
    epoch_max: int = -1

    def to_json(self) -> Json:
        return {
            "states": [[s.epoch, s.step, world] for s, world in self.states[:STORED_MAX]],
            "epoch": self.epoch_max,
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        body = _mapping(data)
        found = []
        for item in _list(body.get("states"), STORED_MAX):
            epoch, step, world = _row(item, 3)
            found.append((_state([epoch, step]), _world(world)))
        epoch_max = body.get("epoch", -1)
        return cls(tuple(found), -1 if epoch_max == -1 else _number(epoch_max, EPOCH_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What a node says of its states, the newest first, with each heartbeat.

    ``whole``: all its ranks have saved and verified them; ``replicated``: its holders have, too;
    ``refused``: it skipped them or gave them up; ``parts``: its shards lie in the directory.
    ``asked`` is the newest step that its ranks asked to save. ``told`` is the newest state that it
    knows is to persist. ``wants``: its ranks wait for word of where to go on from, and ``stored``
    is what its directory has. ``ballots``: what its ranks hold alike with those of other nodes.
    """

    generation: int
    whole: tuple[StateId, ...] = ()
    replicated: tuple[StateId, ...] = ()
    refused: tuple[StateId, ...] = ()
    parts: tuple[StateId, ...] = ()
    newest: StateId | None = None
    persisted: StateId | None = None
    in_flight: StateId | None = None
    told: StateId | None = None
    asked: int | None = None
    is_due: bool = False
    wants: bool = False
    stored: StoredStates | None = None
    ballots: tuple[GroupDigest, ...] = ()
    last: FinalStatus = field(default_factory=FinalStatus)

    def to_json(self) -> Json:
        body: dict[str, Any] = {
            "g": self.generation,
            "whole": states_json(self.whole, STATES_MAX),
            "replicated": states_json(self.replicated, STATES_MAX),
            "refused": states_json(self.refused, REFUSED_MAX),
            "parts": states_json(self.parts, STATES_MAX),
            "newest": state_json(self.newest),
            "persisted": state_json(self.persisted),
            "flight": state_json(self.in_flight),
            "told": state_json(self.told),
            "asked": self.asked,
            "due": self.is_due,
            "wants": self.wants,
            "stored": None if self.stored is None else self.stored.to_json(),
            "votes": group_digests_to_json(self.ballots),
            "last": self.last.to_json() or None,
        }
        return {k: v for k, v in body.items() if v is not None and v is not False and v != []}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return what a node said.

        Raises:
            MessageFormatError: It is none.
        """
        body = _mapping(data)
        stored = body.get("stored")
        return cls(
            generation=_number(body.get("g")),
            whole=_states(body.get("whole"), STATES_MAX),
            replicated=_states(body.get("replicated"), STATES_MAX),
            refused=_states(body.get("refused"), REFUSED_MAX),
            parts=_states(body.get("parts"), STATES_MAX),
            newest=_maybe(body.get("newest")),
            persisted=_maybe(body.get("persisted")),
            in_flight=_maybe(body.get("flight")),
            told=_maybe(body.get("told")),
            asked=whole(body.get("asked")),
            is_due=body.get("due") is True,
            wants=body.get("wants") is True,
            stored=None if stored is None else StoredStates.from_json(stored),
            ballots=group_digests_from_json(body.get("votes")),
            last=last_word(body.get("last")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What a node that would take a seat holds in memory, and the port where peers get it.

    Digests are roots only, and layouts are short: enough to see what is equal. ``domain``: what
    fails together with it, the widest first; () where it knows of nothing. ``stored_max`` is the
    greatest epoch in the persistent directory, -1 where there is none or it did not tell in time.
    """

    port: int
    copies: tuple[ShardCopy, ...] = ()
    epoch_max: int = -1
    domain: DomainPath = ()
    stored_max: int = -1

    def to_json(self) -> Json:
        return {
            "port": self.port,
            "epoch": self.epoch_max,
            "stored": self.stored_max,
            "domain": list(self.domain),
            "copies": [
                [
                    *(copy.state.epoch, copy.state.step, copy.shard.rank, copy.shard.world),
                    *(copy.layout[:_LAYOUT_CHARS], copy.digest.nbytes, copy.digest.root),
                ]
                for copy in self.copies[:COPIES_MAX]
            ],
        }

    @classmethod
    def from_json(cls, data: object, node: str) -> Self:
        """Return what *node* said.

        Raises:
            MessageFormatError: It is none.
        """
        body = _mapping(data)
        copies = tuple(_copy(item, node) for item in _list(body.get("copies"), COPIES_MAX))
        return cls(
            port=_number(body.get("port"), PORT_MAX),
            copies=copies,
            epoch_max=_epoch(body.get("epoch", -1)),
            stored_max=_epoch(body.get("stored", -1)),
            domain=tuple(_name(name) for name in _list(body.get("domain"), LEVELS_MAX)),
        )


def _epoch(value: object) -> int:
    return -1 if value == -1 else _number(value, EPOCH_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrder:
    """Where all ranks go on from. ``state`` None: from the start.

    ``sources``: the nodes that have the shard of a rank of ``world`` in memory, all equal;
    ``roots`` are of the digests of these shards.
    """

    state: StateId | None
    epoch: int
    world: int = 0
    tier: Tier = Tier.MEMORY
    why: tuple[str, ...] = ()
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    roots: Mapping[int, str] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {
            "state": state_json(self.state),
            "epoch": self.epoch,
            "world": self.world,
            "tier": self.tier.value,
            "why": [text[:WHY_CHARS_MAX] for text in self.why[:WHY_MAX]],
            "sources": {str(rank): list(nodes) for rank, nodes in self.sources.items()},
            "roots": {str(rank): root for rank, root in self.roots.items()},
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the decision in *data*.

        Raises:
            MessageFormatError: It is none.
        """
        body = _mapping(data)
        sources, roots = _mapping(body.get("sources", {})), _mapping(body.get("roots", {}))
        if max(len(sources), len(roots)) > WORLD_MAX:
            raise MessageFormatError("too many shards")
        try:
            return cls(
                state=_maybe(body.get("state")),
                epoch=_number(body.get("epoch"), EPOCH_MAX),
                world=_number(body.get("world"), WORLD_MAX),
                tier=Tier(str(body.get("tier"))),
                why=tuple(str(text)[:WHY_CHARS_MAX] for text in _list(body.get("why"), WHY_MAX)),
                sources={int(rank): _names(nodes) for rank, nodes in sources.items()},
                roots={int(rank): _root(root) for rank, root in roots.items()},
            )
        except (TypeError, ValueError) as exc:
            raise MessageFormatError(f"not where to go on from: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """What all who are seated know alike. ``peers``: where the keeper of each node is.

    ``is_kept`` False: some node has no keeper (``missing``), so that none saves. ``restore`` None:
    it is decided once the ranks have named their directory. ``n_domains``: of the nodes, None where
    none is known; of ``together`` nodes all copies lie in one.
    """

    is_kept: bool
    missing: tuple[str, ...] = ()
    placement: ReplicaPlacement | None = None
    peers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    restore: RestoreOrder | None = None
    epoch_max: int = -1  # that anybody told of
    n_domains: int | None = None
    together: int = 0

    def to_json(self) -> Json:
        return {
            "kept": self.is_kept,
            "missing": list(self.missing[:HOLDERS_MAX]),
            "placement": self.placement and self.placement.to_json(),
            "peers": {node: [host, port] for node, (host, port) in self.peers.items()},
            "restore": self.restore and self.restore.to_json(),
            "epoch": self.epoch_max,
            "domains": self.n_domains,
            "together": self.together,
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the notes in *data*.

        Raises:
            MessageFormatError: It is none.
        """
        body = _mapping(data)
        placement, restore = body.get("placement"), body.get("restore")
        n_domains = body.get("domains")
        peers = {}
        for node, place in list(_mapping(body.get("peers", {})).items())[:NODES_MAX]:
            host, port = _row(place, 2)
            peers[_name(node)] = (_name(host), _number(port, PORT_MAX))
        epoch = body.get("epoch", -1)
        try:
            return cls(
                is_kept=body.get("kept") is True,
                missing=_names(body.get("missing")),
                placement=None if placement is None else ReplicaPlacement.from_json(placement),
                peers=peers,
                restore=None if restore is None else RestoreOrder.from_json(restore),
                epoch_max=-1 if epoch == -1 else _number(epoch, EPOCH_MAX),
                n_domains=None if n_domains is None else _number(n_domains, NODES_MAX),
                together=_number(body.get("together", 0), NODES_MAX),
            )
        except CheckpointError as exc:
            raise MessageFormatError(str(exc)) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """What is agreed on. ``committed``: every node of the generation has it, as often as asked.

    ``dropped`` will never be committed, the newest first. ``persist`` is to be written to the
    directory by all, ``sealed`` is there whole but for its manifest, which ``sealer`` writes, and
    ``persisted`` has that, too. Nothing before the step ``aim`` is to be saved: by then all have
    heard that they may. ``differ``: ranks of several nodes that differ, or are equal again, the
    newest last; ``alike``: by key the last state in which they were equal, of a few keys. ``last``:
    what of the last state will not be.
    """

    generation: int = 0
    committed: StateId | None = None
    dropped: tuple[StateId, ...] = ()
    persist: StateId | None = None
    sealed: StateId | None = None
    persisted: StateId | None = None
    sealer: str = ""
    aim: StateId | None = None
    differ: tuple[ReplicaReport, ...] = ()
    alike: Mapping[str, StateId] = field(default_factory=dict)
    last: FinalCommitRecord = field(default_factory=FinalCommitRecord)

    def to_json(self) -> Json:
        return {
            "generation": self.generation,
            "committed": state_json(self.committed),
            "dropped": states_json(self.dropped, DROPPED_MAX),
            "persist": state_json(self.persist),
            "sealed": state_json(self.sealed),
            "persisted": state_json(self.persisted),
            "sealer": self.sealer,
            "aim": state_json(self.aim),
            **(
                {"differ": [replica_report_to_json(told) for told in self.differ]}
                if self.differ
                else {}
            ),
            **({"alike": last_equal_to_json(self.alike)} if self.alike else {}),
            **({"last": self.last.to_json()} if self.last != FinalCommitRecord() else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the watermark in *data*.

        Raises:
            MessageFormatError: It is none.
        """
        body = _mapping(data)
        sealer = body.get("sealer", "")
        return cls(
            generation=_number(body.get("generation")),
            committed=_maybe(body.get("committed")),
            dropped=_states(body.get("dropped"), DROPPED_MAX),
            persist=_maybe(body.get("persist")),
            sealed=_maybe(body.get("sealed")),
            persisted=_maybe(body.get("persisted")),
            sealer=sealer[:NAME_CHARS_MAX] if isinstance(sealer, str) else "",
            aim=_maybe(body.get("aim")),
            differ=replica_reports_from_json(body.get("differ")),
            alike=last_equal_from_json(body.get("alike")),
            last=last_mark(body.get("last")),
        )


def _copy(item: object, node: str) -> ShardCopy:
    epoch, step, rank, world, layout, nbytes, root = _row(item, 7)
    if not isinstance(layout, str) or len(layout) > _LAYOUT_CHARS:
        raise MessageFormatError("a layout is no text")
    try:
        shard = Shard(_number(rank, WORLD_MAX), _world(world))
    except ValueError as exc:
        raise MessageFormatError(str(exc)) from exc
    digest = Digest(_number(nbytes, IMAGE_BYTES_MAX), b"", _root(root))
    return ShardCopy(_state([epoch, step]), shard, layout, digest, Tier.MEMORY, node)


def _root(data: object) -> str:
    if not isinstance(data, str) or len(data) != 64:
        raise MessageFormatError("a digest is no text of 64 digits")
    return data


def _mapping(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise MessageFormatError(f"{str(data)[:40]!r} is no mapping")
    return data


def _list(data: object, most: int) -> list[Any]:
    found = [] if data is None else data
    if not isinstance(found, list) or len(found) > most:
        raise MessageFormatError(f"a list of at most {most} is wanted")
    return found


def _row(data: object, length: int) -> list[Any]:
    if not isinstance(data, list) or len(data) != length:
        raise MessageFormatError(f"a list of {length} values is wanted")
    return data


def _state(data: object) -> StateId:
    found = pair(data)
    if found is None:
        raise MessageFormatError(f"{str(data)[:40]!r} is no state")
    return found


def _maybe(data: object) -> StateId | None:
    return None if data is None else _state(data)


def _states(data: object, most: int) -> tuple[StateId, ...]:
    return tuple(sorted({_state(item) for item in _list(data, most)}, reverse=True))


def _number(data: object, most: int = 2**31) -> int:
    found = whole(data)
    if found is None or found > most:
        raise MessageFormatError(f"{str(data)[:40]!r} is no number up to {most}")
    return found


def _world(data: object) -> int:
    found = _number(data, WORLD_MAX)
    if not found:
        raise MessageFormatError("a world of no rank")
    return found


def _name(data: object) -> str:
    if not isinstance(data, str) or not 0 < len(data) <= NAME_CHARS_MAX:
        raise MessageFormatError(f"{str(data)[:40]!r} is no name")
    return data


def _names(data: object) -> tuple[str, ...]:
    return tuple(_name(item) for item in _list(data, HOLDERS_MAX))
