"""Write a state from the memory of its keepers to a store, and apply retention.

A state is kept for any one reason: it is among the newest, its step is a multiple of a number, it
is the newest of an hour or a day within a retention bucket, pinned, or the newest verified one.
Ages are relative to the newest state, not to the clock: a job that was stopped for a month, or a
clock that jumped, removes nothing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import gpuops
from gpuops.checkpoint.manifest import Manifest, ShardRecord, format_utc
from gpuops.checkpoint.storage.api import (
    CheckpointStore,
    CommitInProgressError,
    ImageSource,
    NoStateError,
    StateWriter,
    StoredState,
    Throttle,
    unthrottled,
)
from gpuops.checkpoint.storage.image_file import read_layout_hash
from gpuops.checkpoint.storage.written_once import read_source_root
from gpuops.checkpoint.types import CheckpointError, CorruptError, Digest, Shard, StateId
from gpuops.host.clock import Clock, SystemClock

# A shard in memory: its image, and the digest computed when it was complete.
ShardInMemory = tuple[ImageSource, Digest]


@dataclass(frozen=True, slots=True)
class PersistResult:
    """The result of persisting a state: ``nbytes`` were written; 0 where it existed already."""

    state: StateId
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class StateOrigin:
    """Which run saved a state: its name, and the generation of its workers."""

    job: str
    generation: int


def persist(  # noqa: PLR0913 all but three are keywords
    store: CheckpointStore,
    state: StateId,
    shards: Mapping[Shard, ShardInMemory],
    *,
    origin: StateOrigin,
    throttle: Throttle = unthrottled,
    verify: bool = True,
    clock: Clock | None = None,
) -> PersistResult:
    """Write all *shards* of *state* to *store*; it is complete and durable on return.

    *verify*: see `StateWriter.put_shard`.
    Call `CheckpointStore.sweep` now and then to remove what interrupted writers left.

    Raises:
        CorruptError: An image differs from its digest; nothing was written.
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
        _put_shards(writer, manifest.shards, shards, throttle, verify=verify)
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
    """Write one node's *shards* of *state*; `commit_node_shards` on any node completes it.

    All nodes give the same *session*, such as the name of the run.

    Raises:
        CorruptError: An image differs from its digest; it was not written.
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
        _put_shards(writer, records, shards, throttle)
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
    """Commit *state* if all nodes have put their shards; return whether it is there now.

    Each node may call it after `persist_node_shards`: one of them finds all shards there and
    succeeds. One that gets False may call it again.

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


def _put_shards(
    writer: StateWriter,
    records: Sequence[ShardRecord],
    shards: Mapping[Shard, ShardInMemory],
    throttle: Throttle,
    *,
    verify: bool = True,
) -> None:
    """Put the shards of *records*, several at a time; the first error ends all and is raised.

    On Linux, the threads inherit the priority of this one.
    """
    errors: list[BaseException] = []

    def throttle_or_end(nbytes: int) -> None:
        if errors:
            raise CheckpointError("another shard could not be written")
        throttle(nbytes)

    def put(record: ShardRecord) -> None:
        if errors:
            return
        try:
            source = shards[record.shard][0]
            writer.put_shard(record, source, throttle=throttle_or_end, verify=verify)
        except BaseException as exc:  # noqa: BLE001 boundary: raised by the calling thread
            errors.append(exc)

    n_threads = min(writer.shards_at_once, len(records))
    with ThreadPoolExecutor(n_threads, thread_name_prefix="gpuops-write") as pool:
        tasks = [pool.submit(put, record) for record in records]
        try:
            wait(tasks)
        except BaseException as exc:  # boundary: an interrupt ends the threads, too
            errors.append(exc)
            raise
    if errors:
        raise errors.pop(0)


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
    return all(_is_stored(store, stored, record) for record in records)


def _is_stored(store: CheckpointStore, stored: Manifest, record: ShardRecord) -> bool:
    """Return whether the image of *record* is there, maybe without what other nodes wrote."""
    found = stored.record(record.shard)
    return found == record or read_source_root(store, stored.state, found) == record.digest.root


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
        writer.abort()  # committed states stay


def _elapsed_s(begin_ns: int, clock: Clock) -> float:
    return (clock.mono_ns() - begin_ns) / 1e9


HOUR_S = 3_600
DAY_S = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class RetentionBucket:
    """For states up to *age_s* older than the newest, keep the newest of each *every_s* seconds."""

    every_s: int
    age_s: int

    def __post_init__(self) -> None:
        if not 0 < self.every_s <= self.age_s:
            raise ValueError(f"no state of the last {self.age_s} s is kept each {self.every_s} s")


DEFAULT_BUCKETS = (RetentionBucket(HOUR_S, DAY_S), RetentionBucket(DAY_S, 7 * DAY_S))


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Keep the newest *keep_last*, each with a step that *keep_every* divides, and the *buckets*.

    *keep_last* is at least 1; *keep_every* 0 disables that rule.
    """

    keep_last: int = 3
    keep_every: int = 0
    buckets: tuple[RetentionBucket, ...] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ValueError(
                f"keep_last is {self.keep_last} and keep_every {self.keep_every}: "
                "keep_last is at least 1, keep_every at least 0"
            )


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether a state is kept, and why."""

    state: StateId
    is_kept: bool
    why: str


def decide_retention(
    states: Sequence[StoredState],
    retention: RetentionPolicy,
    verified: Collection[StateId] = (),
    resumed: StateId | None = None,
) -> list[RetentionDecision]:
    """Return a decision on each of *states*, newest first.

    *verified*: those whose bytes are known to be good. The newest of them stays; where none is
    known to be good, each of the newest *keep_last* could be bad, and nothing is removed.
    *resumed*, which the job has resumed from, stays.

    Damaged states are none of the *keep_last*. As many of them stay, if they are newer than these:
    the damage may be of one reader only.
    """
    ordered = sorted(states, key=lambda stored: stored.state, reverse=True)
    reasons: dict[StateId, list[str]] = {stored.state: [] for stored in ordered}
    intact = [stored for stored in ordered if not stored.is_damaged]
    for stored in intact[: retention.keep_last]:
        reasons[stored.state].append(f"among the newest {retention.keep_last}")
    for state in _newest_damaged(ordered, retention.keep_last):
        reasons[state].append("damaged, and newer than what is kept instead")
    for stored in ordered:
        if retention.keep_every and stored.state.step % retention.keep_every == 0:
            reasons[stored.state].append(f"each {retention.keep_every} steps")
        if stored.tags:
            reasons[stored.state].append(f"pinned by {', '.join(stored.tags)}")
    for bucket in retention.buckets:
        for state in _newest_in_buckets(intact, bucket):
            reasons[state].append(f"one in {bucket.every_s} s for {bucket.age_s} s")
    known = {stored.state for stored in intact}
    newest_verified = max((state for state in verified if state in known), default=None)
    if newest_verified is not None:
        reasons[newest_verified].append("the newest that was verified")
    if resumed is not None and resumed in reasons:
        reasons[resumed].append("the job resumed from it")
    return [_decision(stored.state, reasons[stored.state], newest_verified) for stored in ordered]


def states_to_delete(
    states: Sequence[StoredState],
    retention: RetentionPolicy,
    verified: Collection[StateId] = (),
    resumed: StateId | None = None,
) -> list[RetentionDecision]:
    """Return the decisions on the states to be removed, oldest first."""
    return [
        decision
        for decision in reversed(decide_retention(states, retention, verified, resumed))
        if not decision.is_kept
    ]


def prune(
    store: CheckpointStore,
    retention: RetentionPolicy,
    verified: Collection[StateId],
    resumed: StateId | None = None,
) -> list[RetentionDecision]:
    """Remove from *store* what `states_to_delete` returns, oldest first; return what was removed.

    States that were read back are verified; *verified* count where there are none. The state that
    the job *resumed* from stays until a newer one was read back.

    Raises:
        CheckpointError: One could not be removed; those before it were.
    """
    removed = []
    states = store.list_states()
    read_back = {stored.state for stored in states if stored.is_verified}
    if resumed is not None and any(state > resumed for state in read_back):
        resumed = None
    for decision in states_to_delete(states, retention, read_back or verified, resumed):
        store.delete(decision.state)
        removed.append(decision)
    return removed


def _decision(
    state: StateId, reasons: list[str], newest_verified: StateId | None
) -> RetentionDecision:
    if reasons:
        return RetentionDecision(state, is_kept=True, why="; ".join(reasons))
    if newest_verified is None:
        return RetentionDecision(state, is_kept=True, why="no state is known to be good")
    return RetentionDecision(state, is_kept=False, why="no rule keeps it")


def _newest_damaged(ordered: Sequence[StoredState], keep_last: int) -> list[StateId]:
    """Return the newest *keep_last* damaged states that are newer than what is kept instead."""
    n_intact, found = 0, []
    for stored in ordered:
        if stored.is_damaged:
            found.append(stored.state)
        else:
            n_intact += 1
        if n_intact == keep_last:
            break
    return found[:keep_last]


def _newest_in_buckets(ordered: Sequence[StoredState], bucket: RetentionBucket) -> list[StateId]:
    """Return the newest state of each span of *bucket*."""
    if not ordered:
        return []
    newest_s = max(stored.manifest.created_s for stored in ordered)
    recent = [stored for stored in ordered if newest_s - stored.manifest.created_s <= bucket.age_s]
    recent.sort(key=lambda stored: (stored.manifest.created_s, stored.state), reverse=True)
    spans = groupby(recent, key=lambda stored: stored.manifest.created_s // bucket.every_s)
    return [next(iter(group)).state for _, group in spans]
