"""Select the state to resume from: the newest of which every shard has a copy that verifies.

Memory comes first, then the persistent copy of the same state. A state with a shard that has no
usable copy is skipped, and the result says why. Memory is verified by the ranks, as they read it;
here only once a rank has found it damaged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpuops.checkpoint.digest import chunk_count, find_damaged_chunks
from gpuops.checkpoint.image import read_owners
from gpuops.checkpoint.keeper.messages import WHY_MAX
from gpuops.checkpoint.manifest import ShardRecord
from gpuops.checkpoint.memory.node_memory import MemoryShard
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.partial_image import PartialImage
from gpuops.checkpoint.storage.api import CheckpointStore, StoredState, are_all_damaged
from gpuops.checkpoint.storage.stored_ranges import StoredRanges, open_partial, verify_chunks
from gpuops.checkpoint.storage.written_once import read_source_root
from gpuops.checkpoint.types import (
    CheckpointError,
    CorruptError,
    Digest,
    RestoreUndecidedError,
    Shard,
    StateId,
    Tier,
)

if TYPE_CHECKING:  # the worker does not need its imports
    from gpuops.checkpoint.peers.fetch import PeerShards

_WHY_CHARS_MAX = 300

ShardLocation = SharedBuffer | Path | PartialImage
A = TypeVar("A")
T = TypeVar("T")


class MapFunction(Protocol):
    """Calls a function for each item, possibly in parallel."""

    def __call__(self, function: Callable[[A], T], things: Iterable[A], /) -> Iterator[T]: ...


class Closeable(Protocol):
    """A resource that must be closed."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CopyProblem:
    """A copy that is corrupt, or (not ``is_corrupt``) cannot be read."""

    state: StateId
    shard: Shard
    tier: Tier
    why: str
    is_corrupt: bool = True


@dataclass(frozen=True, slots=True)
class SelectedState:
    """A state, and the source of each shard. ``fetched``: memory to release after the load.

    ``digests``: of what is in this node's memory. Unless ``is_verified``, some of it may be
    damaged. ``stored_by``: the run that wrote it to the directory ("": unnamed), None: it is not
    there.
    """

    state: StateId
    world: int
    tier: Tier
    sources: Mapping[Shard, ShardLocation]
    fetched: tuple[Closeable, ...] = ()
    digests: Mapping[Shard, Digest] = field(default_factory=dict)
    is_verified: bool = True
    stored_by: str | None = None


@dataclass(slots=True)
class StateSearchResult:
    """The result of a search. ``selected`` None: there is no state to resume from.

    ``is_damaged``: something in the store is damaged.
    """

    selected: SelectedState | None = None
    why: list[str] = field(default_factory=list)
    problems: list[CopyProblem] = field(default_factory=list)
    epoch_max: int = -1
    is_damaged: bool = False

    def add_reason(self, text: str) -> None:
        """Add a reason; the number and the length of reasons are bounded."""
        if len(self.why) < WHY_MAX:
            self.why.append(text[:_WHY_CHARS_MAX])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSearchCriteria:
    """What to search for.

    ``only``: only this state; ``before``: only older ones than this, which was rejected;
    ``is_none``: no state at all; ``excluded_step``: no state of this step; ``shards`` None: all
    shards of the state's world are needed. ``loading_world``: how many ranks load it: of a state of
    another number of ranks they need parts of many shards, which are read and verified when they
    are opened. ``rejected``: states that are known to be damaged; ``doubted``: those of which a
    rank found something damaged in memory, which is verified.
    """

    is_none: bool = False
    only: StateId | None = None
    before: StateId | None = None
    excluded_step: int | None = None
    shards: frozenset[Shard] | None = None
    loading_world: int | None = None
    rejected: Mapping[StateId, str] = field(default_factory=dict)
    doubted: frozenset[StateId] = frozenset()


def find_restorable(  # noqa: PLR0913 the sources, what to search, and who does the work
    memory: Mapping[StateId, Mapping[Shard, MemoryShard]],
    store: CheckpointStore | None,
    criteria: StateSearchCriteria,
    *,
    map_function: MapFunction = map,
    allocate: Callable[[int], SharedBuffer] = lambda nbytes: SharedBuffer.create(
        "gpuops-fetched", nbytes
    ),
    check_fits: Callable[[int], None] = lambda _nbytes: None,
    peers: "PeerShards | None" = None,
) -> StateSearchResult:
    """Return the newest complete state from *memory* and *store*; what is read is verified.

    *memory* must not change meanwhile. *allocate* is called for a shard that has to be read from
    the store, *check_fits* with the size of a part of one. A shard that is missing or corrupt in
    memory is fetched from *peers* first.

    Raises:
        RestoreUndecidedError: The store cannot be read or has only damaged states, and memory has
            none. Not raised where nodes have agreed on a state.
    """
    result = StateSearchResult()
    stored, store_error = _list_stored(store, result)
    peer_states = () if peers is None else (peers.state,)
    states = sorted({*memory, *stored, *peer_states}, reverse=True)
    result.epoch_max = max((state.epoch for state in states), default=-1)
    if criteria.is_none:
        return result
    for state in _wanted(criteria, states, result):
        if state.step == criteria.excluded_step:
            result.add_reason(f"{state} is excluded: the job failed after loading it")
            continue
        if state in criteria.rejected:
            result.add_reason(f"{state} is skipped: {criteria.rejected[state]}")
            store_error = store_error or f"no copy of {state} is usable"
            continue
        candidate = _Candidate(
            state,
            memory.get(state, {}),
            store,
            stored.get(state),
            result,
            allocate,
            check_fits,
            peers if peers is not None and peers.state == state else None,
            criteria.loading_world,
            is_doubted=state in criteria.doubted,
        )
        result.selected = candidate.select(criteria.shards, map_function)
        if result.selected is not None:
            return result
        if state in stored:
            store_error = store_error or f"no copy of {state} is usable"
    if store_error and criteria.only is None and criteria.before is None:
        raise _undecided(store, "; ".join(dict.fromkeys([store_error, *result.why[:4]])))
    return result


def _wanted(
    criteria: StateSearchCriteria, states: list[StateId], result: StateSearchResult
) -> list[StateId]:
    """Return those of *states* that may be selected, the newest first."""
    only, before = criteria.only, criteria.before
    if before is not None:
        return [before, *(state for state in states if state < before)]
    if only is not None and only not in states:
        result.add_reason(f"{only} was requested and is not here")
    return [state for state in states if only in (None, state)]


def _list_stored(
    store: CheckpointStore | None, result: StateSearchResult
) -> tuple[dict[StateId, StoredState], str]:
    """Return the states that a store lists, and the error if it has one."""
    if store is None:
        return {}, ""
    try:
        survey = store.scan()
    except CheckpointError as exc:
        result.add_reason(str(exc))
        return {}, str(exc)
    for damaged in survey.damaged:
        result.add_reason(f"{damaged.name} in {store.address} {damaged.condition}: {damaged.why}")
    first = survey.damaged[0] if survey.damaged else None
    store_error = f"{first.name} {first.condition}" if first is not None else ""
    return {found.state: found for found in survey.states}, store_error


def _undecided(store: CheckpointStore | None, reasons: str) -> RestoreUndecidedError:
    if store is not None and are_all_damaged(store):
        return RestoreUndecidedError(
            f"all states in {store.address} are damaged: restore one from a copy, or set another "
            "--ckpt-dir to start from scratch (gpuops ckpt verify --all names the files): "
            f"{reasons}"
        )
    return RestoreUndecidedError(
        f"cannot determine the state to resume from: {reasons}. Repair the directory, or set "
        "another one to start from scratch"
    )


@dataclass(slots=True)
class _Candidate:
    state: StateId
    memory: Mapping[Shard, MemoryShard]
    store: CheckpointStore | None
    stored: StoredState | None
    choice: StateSearchResult
    make: Callable[[int], SharedBuffer]
    check_fits: Callable[[int], None]
    peers: "PeerShards | None" = None
    loading_world: int | None = None
    is_doubted: bool = False
    fetched: list[Closeable] = field(default_factory=list)
    from_peers: set[Shard] = field(default_factory=set)
    bad: dict[Shard, str] = field(default_factory=dict)

    def select(
        self, shards: frozenset[Shard] | None, map_function: MapFunction
    ) -> SelectedState | None:
        """Return the state with a source for each of its shards, None where a shard has none."""
        self._drop_other_run()
        world = self._world()
        if world is None:
            return None
        if shards is None or any(shard.world != world for shard in shards):
            shards = frozenset(Shard(rank, world) for rank in range(world))
        sources: dict[Shard, ShardLocation] = {}
        order = sorted(shards)
        while order:
            if not self._find_sources(order, sources, map_function):
                for memory in self.fetched:
                    memory.close()
                return None
            # What ranks of a node share is in the image of one of them.
            new = () if len(sources) == world else order
            owners = {owner for shard in new for owner in _owners(sources[shard])}
            order = sorted({Shard(rank, world) for rank in owners} - sources.keys())
        if self.peers is not None:
            self.fetched.append(self.peers)
        tier, fetched = self._tier(sources), tuple(self.fetched)
        digests = {
            shard: held.copy.digest
            for shard, held in self.memory.items()
            if sources.get(shard) is held.memory
        }
        is_verified = self.is_doubted or not digests
        run = None if self.stored is None else self.stored.manifest.job
        return SelectedState(self.state, world, tier, sources, fetched, digests, is_verified, run)

    def _find_sources(
        self, order: Sequence[Shard], sources: dict[Shard, ShardLocation], map_function: MapFunction
    ) -> bool:
        """Add the source of each shard in *order* to *sources*; return whether all have one."""
        missing = [s for s in order if not self._is_available(s)]
        if missing:
            where = "in this node's memory nor in the directory"
            if self.peers is not None:
                where = "in this node's memory, nor in another's, nor in the directory"
            self.choice.add_reason(
                f"{self.state} is incomplete: of its {len(order)} shards, that of rank "
                f"{missing[0].rank} is neither {where}"
            )
            return False
        if self.is_doubted:
            near = {s: self.memory[s] for s in order if s in self.memory}
            self.bad = _damaged_shards(near, map_function)
        found = dict(zip(order, map_function(self._find_verified, order), strict=True))
        for shard, source in found.items():
            if isinstance(source, str):
                self.choice.add_reason(f"{self.state} is skipped: {source}")
                return False
            sources[shard] = source
        return True

    def _world(self) -> int | None:
        if self.memory:
            return next(iter(self.memory)).world
        if self.peers is not None:
            return self.peers.world
        return None if self.stored is None else self.stored.manifest.world

    def _tier(self, sources: Mapping[Shard, ShardLocation]) -> Tier:
        """Return the slowest tier of *sources*."""
        in_memory = {id(entry.memory) for entry in self.memory.values()}
        far = {shard for shard, source in sources.items() if id(source) not in in_memory}
        if far - self.from_peers:
            return Tier.PERSISTENT
        return Tier.PEER if far else Tier.MEMORY

    def _is_available(self, shard: Shard) -> bool:
        is_near = shard in self.memory or (self.peers is not None and shard in self.peers)
        return is_near or self._record(shard) is not None

    def _drop_other_run(self) -> None:
        """Ignore the directory's copy where it differs from memory: another run wrote it."""
        if self.stored is None or not self.memory:
            return
        if not all(map(self._is_stored, self.memory)):
            self.choice.add_reason(
                f"the directory has a different {self.state}: two runs write there"
            )
            self.stored = None

    def _is_stored(self, shard: Shard) -> bool:
        """Return whether the directory has the image of *shard* that memory has.

        It may be without what other nodes have written.
        """
        assert self.stored is not None
        assert self.store is not None
        if shard.world != self.stored.manifest.world:
            return False
        record, root = self.stored.manifest.record(shard), self.memory[shard].copy.digest.root
        return (
            record.digest.root == root or read_source_root(self.store, self.state, record) == root
        )

    def _find_verified(self, shard: Shard) -> ShardLocation | str:
        """Return a verified copy of *shard*, or the reason why there is none."""
        why = "memory does not have it"
        entry = self.memory.get(shard)
        if entry is not None:
            why = self.bad.get(shard, "")
            if not why:
                return entry.memory
            self._record_problem(shard, Tier.MEMORY, why)
        if self.peers is not None and shard in self.peers:
            try:
                if self.loading_world in (None, shard.world):
                    source: ShardLocation = self.peers.get(shard)
                else:
                    source = self.peers.open_parts(shard, self._stored_ranges, self.check_fits)
                    self.fetched.append(source)
            except CheckpointError as exc:
                why = f"{why}, and {exc}"
                self.choice.add_reason(str(exc))
            else:
                self.from_peers.add(shard)
                return source
        if self._record(shard) is not None:
            try:
                return self._verified_file(shard)
            except CheckpointError as exc:
                is_corrupt = isinstance(exc, CorruptError)
                self.choice.is_damaged |= is_corrupt
                self._record_problem(shard, Tier.PERSISTENT, str(exc), is_corrupt=is_corrupt)
                why = f"{why}, and {exc}"
        return f"the shard of rank {shard.rank}: {why}"

    def _verified_file(self, shard: Shard) -> ShardLocation:
        assert self.store is not None
        assert self.stored is not None
        record = self.stored.manifest.record(shard)
        if self.loading_world not in (None, shard.world):
            return self._partial(record)
        path = self.store.local_shard_path(self.state, shard)
        try:
            if path is None:
                memory = self.make(record.digest.nbytes)
                self.fetched.append(memory)
                self.store.fetch_shard(record, self.state, memory.view)
                return memory
            verify_chunks(self.store, self.stored.manifest, shard)
        except CorruptError:
            with suppress(CheckpointError):  # it may not be writable here
                self.store.mark_damaged(record, self.state)
            raise
        return path

    def _partial(self, record: ShardRecord) -> PartialImage:
        """Return the image of a shard in the store; nothing of it is read yet."""
        assert self.store is not None
        image = open_partial(self.store, self.state, record, self.check_fits)
        self.fetched.append(image)
        return image

    def _stored_ranges(self, digest: Digest) -> list[StoredRanges]:
        """Return the store's copy of the image with *digest*, none where there is none."""
        if self.store is None or self.stored is None:
            return []
        records = [each for each in self.stored.manifest.shards if each.digest.root == digest.root]
        return [StoredRanges(self.store, self.state, record) for record in records[:1]]

    def _record(self, shard: Shard) -> StoredState | None:
        """Return the manifest's record of the stored state where it has *shard*."""
        if self.stored is None or self.store is None:
            return None
        return self.stored if self.stored.manifest.world == shard.world else None

    def _record_problem(
        self, shard: Shard, tier: Tier, why: str, *, is_corrupt: bool = True
    ) -> None:
        self.choice.problems.append(CopyProblem(self.state, shard, tier, why, is_corrupt))
        if tier is Tier.MEMORY:
            self.choice.add_reason(f"{self.state}, rank {shard.rank}, in memory: {why}")


def _owners(source: ShardLocation) -> frozenset[int]:
    """Return the ranks whose images have tensors of the image *source*; none where it is invalid.

    The load reports what is invalid, and finds what is damaged.
    """
    if isinstance(source, PartialImage):
        return frozenset()  # all images are opened
    try:
        if isinstance(source, SharedBuffer):
            return read_owners(source.view)
        with source.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
            return read_owners(mapped)
    except (OSError, ValueError, CorruptError):
        return frozenset()


def _damaged_shards(
    memory: Mapping[Shard, MemoryShard], map_function: MapFunction
) -> dict[Shard, str]:
    """Return what is corrupt in each damaged copy, by shard."""

    def read(shard: Shard) -> str:
        view, digest = memory[shard].memory.view, memory[shard].copy.digest
        try:
            numbers = find_damaged_chunks(view, digest)
        except CorruptError as exc:
            return str(exc)
        total = chunk_count(digest.nbytes)
        where = f"in {len(numbers)} of {total} pieces, the first is piece {min(numbers, default=0)}"
        return f"it is corrupt {where}" if numbers else ""

    whys = map_function(read, memory)
    return {shard: why for shard, why in zip(memory, whys, strict=True) if why}
