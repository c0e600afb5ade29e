"""One write of a state, or its commit where several nodes have written it: work for a thread."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from gpuops.checkpoint.agreement.write_once import WriteOnce
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.memory.node_memory import MemoryShard
from gpuops.checkpoint.storage.api import CheckpointStore
from gpuops.checkpoint.storage.persist import (
    PersistResult,
    ShardInMemory,
    StateOrigin,
    commit_node_shards,
    persist,
    persist_node_shards,
)
from gpuops.checkpoint.storage.read_back import prune_old
from gpuops.checkpoint.storage.throttle import until_stopped
from gpuops.checkpoint.storage.written_once import plan_images
from gpuops.checkpoint.types import CheckpointError, Shard, StateId

OpenStore = Callable[[str], CheckpointStore]


@dataclass(frozen=True, slots=True)
class PersistTask:
    """One state to be written; ``session`` is the session where other nodes write shards, too.

    ``once``: what the nodes hold alike and write once, None where each writes all of its own.
    ``resumed``: the state that the job resumed from, if any. ``verify``: hash what is written;
    else that is left to reading it back.
    """

    state: StateId
    shards: Mapping[Shard, MemoryShard]
    policy: CheckpointPolicy
    origin: StateOrigin
    session: str | None = None
    once: WriteOnce | None = None
    resumed: StateId | None = None
    verify: bool = True

    @property
    def sources(self) -> Mapping[Shard, ShardInMemory]:
        """Return the images in memory and their digests."""
        return {shard: (each.memory, each.copy.digest) for shard, each in self.shards.items()}


@dataclass(frozen=True, slots=True)
class CommitTask:
    """A state of which all nodes have written their shards, to be committed in the directory.

    ``resumed``: the state that the job resumed from, if any.
    """

    state: StateId
    world: int
    policy: CheckpointPolicy
    origin: StateOrigin
    resumed: StateId | None = None


@dataclass(frozen=True, slots=True)
class PersistOutcome:
    """The result of a task.

    ``is_complete`` is false where shards of other nodes may be missing; ``has_written_shards`` is
    false where none of this node were written; ``pruned`` were removed; ``warning`` is any further
    problem.
    """

    persisted: PersistResult
    is_complete: bool = True
    has_written_shards: bool = True
    pruned: tuple[StateId, ...] = ()
    warning: str = ""


def run_persist(
    task: PersistTask,
    open_store: OpenStore,
    should_stop: Callable[[], bool],
    check_fits: Callable[[int], None],
) -> PersistOutcome:
    """Write the state, then apply retention.

    *check_fits* is called with the size of an image that is made for writing.

    Raises:
        CheckpointError: It could not be written; nothing was removed.
    """
    assert task.policy.directory is not None
    store = open_store(task.policy.directory)
    throttle = until_stopped(should_stop)
    warning = ""
    try:
        store.sweep()
    except CheckpointError as exc:
        warning = str(exc)
    if task.session is not None:
        write = partial(
            persist_node_shards, store, task.state, session=task.session, throttle=throttle
        )
        written = _persist_part(task, write, check_fits)
        return PersistOutcome(written, is_complete=False, warning=warning)
    persisted = persist(
        store,
        task.state,
        task.sources,
        origin=task.origin,
        throttle=throttle,
        verify=task.verify,
    )
    intact = {task.state} if task.verify else set()
    pruned, why = prune_old(store, task.policy, intact, task.resumed)
    return PersistOutcome(persisted, pruned=pruned, warning=warning or why)


def _persist_part(
    task: PersistTask,
    write: Callable[[Mapping[Shard, ShardInMemory]], PersistResult],
    check_fits: Callable[[int], None],
    clock_s: Callable[[], float] = time.monotonic,
) -> PersistResult:
    """Write the shards of this node, without what other nodes write."""
    began_s, nbytes = clock_s(), 0
    images = plan_images(task.shards, task.once, check_fits)
    if not images:
        return write(task.sources)
    for image in images:
        with image.made() as source:
            nbytes += write({image.shard: source}).nbytes
    return PersistResult(task.state, clock_s() - began_s, nbytes)


def run_commit(
    task: CommitTask, open_store: OpenStore, clock_s: Callable[[], float] = time.monotonic
) -> PersistOutcome:
    """Commit the state in the directory, then apply retention.

    Raises:
        CheckpointError: Shards of it are missing, or it cannot be written; nothing was removed.
    """
    assert task.policy.directory is not None
    began_s = clock_s()
    store = open_store(task.policy.directory)
    is_complete = commit_node_shards(
        store, task.state, task.world, session=task.origin.job, origin=task.origin
    )
    if not is_complete:
        raise CheckpointError(
            f"{task.state} cannot be committed in {store.address}: not all of its {task.world} "
            "shards are there"
        )
    pruned, warning = prune_old(store, task.policy, {task.state}, task.resumed)
    persisted = PersistResult(task.state, clock_s() - began_s, 0)
    return PersistOutcome(persisted, has_written_shards=False, pruned=pruned, warning=warning)
