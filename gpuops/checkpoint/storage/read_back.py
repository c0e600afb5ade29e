"""Read the newest state in the directory back from the disk, and record which shards are intact.

A state counts as verified once all its shards were read back; each node reads those that it wrote.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.off_ranks import off_ranks
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.persist import RetentionPolicy, prune
from gpuops.checkpoint.storage.throttle import until_stopped
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard, StateId

AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ReadBackTask:
    """A state of which this node wrote *shards*; ``is_alone``: it wrote all of them."""

    state: StateId
    shards: Collection[Shard]
    policy: CheckpointPolicy
    is_alone: bool


def run_read_back(
    task: ReadBackTask,
    open_store: Callable[[str], CheckpointStore],
    should_stop: Callable[[], bool],
) -> tuple[int, tuple[StateId, ...]]:
    """Read the shards of *task* back; return their bytes, and what retention has removed.

    0 bytes: the store does not do that.

    Raises:
        CorruptError: One is not what was saved; if this node wrote all of them, the state was
            removed.
        CheckpointError: The state is not complete yet, cannot be read, or *should_stop* says so.
    """
    assert task.policy.directory is not None
    store = open_store(task.policy.directory)
    manifest = store.read_manifest(task.state)
    throttle = until_stopped(should_stop)
    nbytes = 0
    try:
        for shard in sorted(task.shards):
            record = manifest.record(shard)
            if not store.read_back(record, task.state, throttle=throttle):
                return 0, ()
            nbytes += record.digest.nbytes
    except CorruptError:
        if task.is_alone:
            with suppress(CheckpointError):  # it is pinned
                store.delete(task.state)
        raise
    return nbytes, prune_old(store, task.policy, task.state)[0]


def prune_old(
    store: CheckpointStore, policy: CheckpointPolicy, state: StateId
) -> tuple[tuple[StateId, ...], str]:
    """Apply retention once *state* was written; return what was removed, and the problem if any."""
    retention = RetentionPolicy(keep_last=policy.keep_last, keep_every=policy.keep_every)
    try:
        return tuple(decision.state for decision in prune(store, retention, {state})), ""
    except CheckpointError as exc:
        return (), str(exc)


@dataclass(slots=True)
class ReadBack:
    """Reads one state after the other back: of those that wait, the newest.

    *on_damaged* is called when a shard of this node is not what was saved.
    """

    jobs: Jobs
    events: EventQueue
    clock_s: Callable[[], float]
    open_store: Callable[[str], CheckpointStore]
    is_ending: Callable[[], bool]
    rank_pids: Callable[[], Iterable[int]]
    on_damaged: Callable[[StateId], None]
    _next: ReadBackTask | None = None
    _is_running: bool = False
    _not_before_s: float = 0.0

    def request(self, task: ReadBackTask) -> None:
        """Read the state of *task* back, instead of one that has waited until now."""
        self._next, self._not_before_s = task, 0.0
        self.tick()

    def tick(self) -> None:
        """Begin with the state that waits, if none is being read."""
        task = self._next
        if task is None or self._is_running or self.clock_s() < self._not_before_s:
            return
        self._next, self._is_running = None, True
        run_task(self._run(task))

    async def _run(self, task: ReadBackTask) -> None:
        began_s = self.clock_s()
        work = partial(run_read_back, task, self.open_store, self.is_ending)
        try:
            done = await JobResult(self.jobs, JobKind.READ_BACK, off_ranks(self.rank_pids(), work))
        except CorruptError as exc:
            place = {"tier": "persistent", "directory": task.policy.directory}
            self.events.add("corrupt", state=task.state, why=str(exc), **place)
            self.on_damaged(task.state)
        except Exception:  # noqa: BLE001 boundary: any error of a file system; tried again
            self._not_before_s = self.clock_s() + AGAIN_S
            self._next = self._next or task
        else:
            nbytes, removed = done
            if nbytes:
                self.events.add(
                    "read_back",
                    state=task.state,
                    seconds=self.clock_s() - began_s,
                    bytes=nbytes,
                    directory=task.policy.directory,
                    removed=list(removed),
                )
        finally:
            self._is_running = False
        self.tick()
