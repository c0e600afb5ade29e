"""Read the newest persistent state back from the store, and record which shards are intact.

A state counts as verified once all its shards were read back; each node reads those that it wrote.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.off_ranks import off_ranks
from gpuops.checkpoint.manifest import ShardRecord
from gpuops.checkpoint.storage.api import CheckpointStore, NoStateError
from gpuops.checkpoint.storage.persist import RetentionPolicy, prune
from gpuops.checkpoint.storage.throttle import until_stopped
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard, StateId

AGAIN_S = 5.0
WAIT_S = 600.0  # other nodes have written their shards by then, or will not
_WAITING_MAX = 4


@dataclass(frozen=True, slots=True)
class ReadBackTask:
    """A state of which this node wrote *shards*; ``is_alone``: it wrote all of them.

    ``resumed``: the state that the job resumed from, if any.
    """

    state: StateId
    shards: Collection[Shard]
    policy: CheckpointPolicy
    is_alone: bool
    resumed: StateId | None = None


@dataclass(frozen=True, slots=True)
class ReadBackResult:
    """The state of ``task`` was read: ``nbytes``, and what retention has ``removed`` then.

    ``damage``: why a shard is not what was saved, "" where all are. ``verified``: the newest state
    of which all nodes have read their shards.
    """

    task: ReadBackTask
    nbytes: int = 0
    removed: tuple[StateId, ...] = ()
    damage: str = ""
    verified: StateId | None = None


def run_read_back(
    tasks: Sequence[ReadBackTask],
    open_store: Callable[[str], CheckpointStore],
    should_stop: Callable[[], bool],
) -> ReadBackResult | None:
    """Read the shards of the first of *tasks* whose state is complete; None: none of them is.

    A damaged state is removed if this node wrote all of its shards.

    Raises:
        CheckpointError: The state cannot be read, or *should_stop* says so.
    """
    for task in tasks:
        assert task.policy.directory is not None
        store = open_store(task.policy.directory)
        try:
            manifest = store.read_manifest(task.state)
        except NoStateError:  # removed, or another node still writes
            continue
        records = [manifest.record(shard) for shard in sorted(task.shards)]
        for record in records:
            try:
                store.read_back(record, task.state, throttle=until_stopped(should_stop))
            except CorruptError as exc:
                _remove_or_mark(store, task, record)
                return ReadBackResult(task, damage=str(exc))
        nbytes = sum(record.digest.nbytes for record in records)
        removed, _ = prune_old(store, task.policy, {task.state}, task.resumed)
        verified = [stored.state for stored in store.list_states() if stored.is_verified]
        return ReadBackResult(task, nbytes, removed, verified=max(verified, default=None))
    return None


def _remove_or_mark(store: CheckpointStore, task: ReadBackTask, damaged: ShardRecord) -> None:
    with suppress(CheckpointError):
        store.mark_damaged(damaged, task.state)
    if task.is_alone:
        with suppress(CheckpointError):  # it is pinned
            store.delete(task.state)


def prune_old(
    store: CheckpointStore,
    policy: CheckpointPolicy,
    intact: Collection[StateId],
    resumed: StateId | None,
) -> tuple[tuple[StateId, ...], str]:
    """Apply retention once a job that *resumed* from a state has written another one.

    *intact*: which states were hashed as they were written, or read back. Return what was removed,
    and the problem if any.
    """
    retention = RetentionPolicy(keep_last=policy.keep_last, keep_every=policy.keep_every)
    try:
        removed = prune(store, retention, intact, resumed)
    except CheckpointError as exc:
        return (), str(exc)
    return tuple(decision.state for decision in removed), ""


@dataclass(slots=True)
class ReadBack:
    """Reads one state after the other back: of those that wait, the newest that is complete.

    *on_damaged* is called when a shard of this node is not what was saved. ``verified``: the newest
    state that was so on all nodes when the last one was read.
    """

    jobs: Jobs
    events: EventQueue
    clock_s: Callable[[], float]
    open_store: Callable[[str], CheckpointStore]
    is_ending: Callable[[], bool]
    rank_pids: Callable[[], Iterable[int]]
    on_damaged: Callable[[StateId], None]
    verified: StateId | None = None
    _waiting: list[ReadBackTask] = field(default_factory=list)  # the newest first
    _is_running: bool = False
    _not_before_s: float = 0.0
    _requested_s: float = 0.0

    def request(self, task: ReadBackTask) -> None:
        """Read the state of *task* back, or an older one that waits if it is not complete yet."""
        self._waiting, self._not_before_s = [task, *self._waiting][:_WAITING_MAX], 0.0
        self._requested_s = self.clock_s()
        self.tick()

    def is_pending(self, state: StateId) -> bool:
        """Return whether *state* is still to be read back."""
        return any(task.state == state for task in self._waiting)

    def tick(self) -> None:
        """Begin with a state that waits, if none is being read."""
        if self._waiting and not self._is_running and self.clock_s() >= self._not_before_s:
            self._is_running = True
            run_task(self._run(tuple(self._waiting)))

    async def _run(self, tasks: Sequence[ReadBackTask]) -> None:
        began_s = self.clock_s()
        work = partial(run_read_back, tasks, self.open_store, self.is_ending)
        try:
            done = await JobResult(self.jobs, JobKind.READ_BACK, off_ranks(self.rank_pids(), work))
        except Exception:  # noqa: BLE001 boundary: any error of a file system; tried again
            self._not_before_s = self.clock_s() + AGAIN_S
        else:
            self._on_done(tasks, done, self.clock_s() - began_s)
        finally:
            self._is_running = False
        self.tick()

    def _on_done(
        self, tasks: Sequence[ReadBackTask], done: ReadBackResult | None, seconds: float
    ) -> None:
        """Report what was read; what is older does not matter any more."""
        newer = tasks if done is None else tasks[: tasks.index(done.task)]
        kept = [task for task in newer if not task.is_alone]  # its own state was removed
        self._waiting = [task for task in self._waiting if task in kept or task not in tasks]
        if done is None:
            self._not_before_s = self.clock_s() + AGAIN_S
            if self.clock_s() - self._requested_s > WAIT_S:
                self._waiting = []
            return
        state, directory = done.task.state, done.task.policy.directory
        if done.damage:
            place = {"tier": "persistent", "directory": directory}
            self.events.add("corrupt", state=state, why=done.damage, **place)
            self.on_damaged(state)
            return
        self.verified = done.verified
        self.events.add(
            "read_back",
            state=state,
            seconds=seconds,
            bytes=done.nbytes,
            directory=directory,
            removed=list(done.removed),
        )
