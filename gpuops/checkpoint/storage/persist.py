"""Take a state from the memory of its keepers to where it outlives the nodes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import gpuops
from gpuops.checkpoint.manifest import Manifest, ShardRecord, format_utc
from gpuops.checkpoint.storage.api import (
    CheckpointStore,
    CommitInProgressError,
    ImageSource,
    NoStateError,
    StateWriter,
    Throttle,
    unthrottled,
)
from gpuops.checkpoint.storage.image_file import read_layout_hash
from gpuops.checkpoint.types import CheckpointError, CorruptError, Digest, Shard, StateId
from gpuops.host.clock import Clock, SystemClock

# A shard in memory: its image, and what it was when it was sealed.
ShardInMemory = tuple[ImageSource, Digest]


@dataclass(frozen=True, slots=True)
class PersistResult:
    """What came of persisting a state: ``nbytes`` were written; 0 where it was there already."""

    state: StateId
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateOrigin:
    """Whose states these are: the name of the run, and the start of its workers that saved them."""

    job: str
    generation: int


def persist(
    store: CheckpointStore,
    state: StateId,
    shards: Mapping[Shard, ShardInMemory],
    *,
    origin: StateOrigin,
    throttle: Throttle = unthrottled,
    clock: Clock | None = None,
) -> PersistResult:
    """Write all *shards* of *state* to *store*; it is there, whole and durable, on return.

    Call `CheckpointStore.sweep` before, now and then, to be rid of what died half-way.

    Raises:
        CorruptError: An image is not what was sealed; nothing was kept.
        CheckpointError: The store cannot be written, or another run's state is there.
    """
    clock = clock or SystemClock()
    begin_ns = clock.mono_ns()
    world = _check_world(state, shards)
    records = _build_records(state, shards)
    manifest = _build_manifest(state, world, records, origin, clock)
    if store.contains(manifest):
        return PersistResult(state, _elapsed_s(begin_ns, clock), 0)
    with _abort_at_exit(store.open_writer(state, world)) as writer:
        for record in manifest.shards:
            writer.put_shard(record, shards[record.shard][0], throttle=throttle)
        is_new = writer.commit(manifest)
    return PersistResult(state, _elapsed_s(begin_ns, clock), manifest.nbytes if is_new else 0)


def persist_node_shards(
    store: CheckpointStore,
    state: StateId,
    shards: Mapping[Shard, ShardInMemory],
    *,
    session: str,
    throttle: Throttle = unthrottled,
    clock: Clock | None = None,
) -> PersistResult:
    """Write one node's *shards* of *state*; `commit_parts` of any node makes the state appear.

    All nodes give the same *session*, such as the name of the run.

    Raises:
        CorruptError: An image is not what was sealed; it was not kept.
        CheckpointError: The store cannot be written.
    """
    clock = clock or SystemClock()
    begin_ns = clock.mono_ns()
    records = _build_records(state, shards)
    if _are_committed(store, state, records):
        return PersistResult(state, _elapsed_s(begin_ns, clock), 0)
    with _abort_at_exit(
        store.open_writer(state, records[0].shard.world, session=session)
    ) as writer:
        for record in records:
            writer.put_shard(record, shards[record.shard][0], throttle=throttle)
    nbytes = sum(record.digest.nbytes for record in records)
    return PersistResult(state, _elapsed_s(begin_ns, clock), nbytes)


def commit_node_shards(
    store: CheckpointStore,
    state: StateId,
    world: int,
    *,
    session: str,
    origin: StateOrigin,
    clock: Clock | None = None,
) -> bool:
    """Make *state* appear where all nodes have put their parts; return whether it is there now.

    Each node may call it after `put_part`: one of them finds all parts there and succeeds. One that
    gets False may ask again.

    Raises:
        CheckpointError: The store cannot be written, or another run's state is there.
    """
    stored = _find_manifest(store, state)
    if stored is not None and stored.job == origin.job and stored.world == world:
        return store.contains(stored)
    with _abort_at_exit(store.open_writer(state, world, session=session)) as writer:
        records = writer.records()
        if len(records) < world:
            return False
        shards = tuple(records[shard] for shard in sorted(records))
        try:
            writer.commit(_build_manifest(state, world, shards, origin, clock or SystemClock()))
        except CommitInProgressError:
            return False
    return True


class RateThrottle:
    """Holds a movement of bytes to *bytes_per_s*, and ends it when *stop* says so.

    Raises, when called:
        CheckpointError: *stop* returned true.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        *,
        stop: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._stop = stop
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._free_ns = 0

    def __call__(self, nbytes: int) -> None:
        if self._bytes_per_s:
            now_ns = self._clock.mono_ns()
            if self._free_ns > now_ns:
                self._sleep((self._free_ns - now_ns) / 1e9)
            begin_ns = max(self._free_ns, now_ns)
            self._free_ns = begin_ns + round(nbytes / self._bytes_per_s * 1e9)
        if self._stop():
            raise CheckpointError("persisting was stopped before it was done; nothing was kept")


def _build_records(state: StateId, shards: Mapping[Shard, ShardInMemory]) -> list[ShardRecord]:
    if not shards:
        raise CheckpointError(f"there is no shard of {state} to persist")
    records = []
    for shard, (source, digest) in sorted(shards.items(), key=lambda item: item[0]):
        try:
            records.append(
                ShardRecord(shard, read_layout_hash(source, shard, digest.nbytes), digest)
            )
        except (ValueError, OSError, CorruptError) as exc:
            raise CorruptError(f"{shard.file_name} of {state} was not persisted: {exc}") from exc
    return records


def _check_world(state: StateId, shards: Mapping[Shard, ShardInMemory]) -> int:
    worlds = {shard.world for shard in shards}
    if len(worlds) != 1 or len(shards) != next(iter(worlds)):
        raise CheckpointError(
            f"{state} has shards {sorted(shards)[:4]}: not all of one world; nothing was written"
        )
    return worlds.pop()


def _build_manifest(
    state: StateId, world: int, shards: Sequence[ShardRecord], origin: StateOrigin, clock: Clock
) -> Manifest:
    try:
        return Manifest(
            state=state,
            world=world,
            shards=tuple(shards),
            created=format_utc(clock.now_us()),
            version=gpuops.__version__,
            generation=origin.generation,
            job=origin.job,
        )
    except ValueError as exc:
        raise CheckpointError(f"{state} cannot be recorded: {exc}") from exc


def _are_committed(store: CheckpointStore, state: StateId, records: list[ShardRecord]) -> bool:
    stored = _find_manifest(store, state)
    if stored is None or stored.world != records[0].shard.world:
        return False
    return all(stored.record(record.shard) == record for record in records)


def _find_manifest(store: CheckpointStore, state: StateId) -> Manifest | None:
    try:
        return store.read_manifest(state)
    except (NoStateError, CorruptError):
        return None


@contextmanager
def _abort_at_exit(writer: StateWriter) -> Iterator[StateWriter]:
    try:
        yield writer
    finally:
        writer.abort()  # what was committed stays


def _elapsed_s(begin_ns: int, clock: Clock) -> float:
    return (clock.mono_ns() - begin_ns) / 1e9
