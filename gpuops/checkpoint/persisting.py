"""When the keeper writes a state to its directory, and what came of it.

A failure is told and tried again later, ever more rarely; it never ends anything.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuops.checkpoint.keeper import Policy
from gpuops.checkpoint.node_memory import Held
from gpuops.checkpoint.persist import (
    Origin,
    Persisted,
    RatePace,
    commit_parts,
    persist,
    put_part,
)
from gpuops.checkpoint.retention import Retention, prune
from gpuops.checkpoint.state_store import CheckpointStore
from gpuops.checkpoint.states import CheckpointError, Shard, StateId

BACKOFF_MIN_S = 5.0
BACKOFF_MAX_S = 1800.0

OpenStore = Callable[[str], CheckpointStore]


@dataclass(frozen=True, slots=True)
class Task:
    """One state to be written; ``parts`` is the session where other nodes write shards, too.

    ``is_last``: there may be nobody left to seal it, so whoever comes last does.
    """

    state: StateId
    shards: Mapping[Shard, Held]
    policy: Policy
    origin: Origin
    parts: str | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Seal:
    """A state of which all nodes have written their shards, to appear in the directory."""

    state: StateId
    world: int
    policy: Policy
    origin: Origin


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a task.

    ``is_whole`` is false where shards of other nodes may be missing; ``has_parts`` where none of
    this node were written; ``pruned`` were removed; ``trouble`` is what went wrong beside it.
    """

    persisted: Persisted
    is_whole: bool = True
    has_parts: bool = True
    pruned: tuple[StateId, ...] = ()
    trouble: str = ""


def carry_out(task: Task, open_store: OpenStore, stop: Callable[[], bool]) -> Outcome:
    """Write the state, then remove what is too old.

    Raises:
        CheckpointError: It could not be written; nothing was removed.
    """
    assert task.policy.directory is not None
    store = open_store(task.policy.directory)
    pace = RatePace(None, stop=stop)
    sources = {shard: (held.memory, held.copy.digest) for shard, held in task.shards.items()}
    trouble = ""
    try:
        store.sweep()
    except CheckpointError as exc:
        trouble = str(exc)
    if task.parts is None:
        persisted = persist(store, task.state, sources, origin=task.origin, pace=pace)
    else:
        persisted = put_part(store, task.state, sources, session=task.parts, pace=pace)
        world = next(iter(task.shards)).world
        is_whole = task.is_last and commit_parts(
            store, task.state, world, session=task.parts, origin=task.origin
        )
        if not is_whole:
            return Outcome(persisted, is_whole=False, trouble=trouble)
    pruned, why = _pruned(store, task.policy, task.state)
    return Outcome(persisted, pruned=pruned, trouble=trouble or why)


def carry_out_seal(
    order: Seal, open_store: OpenStore, clock_s: Callable[[], float] = time.monotonic
) -> Outcome:
    """Make the state appear, then remove what is too old.

    Raises:
        CheckpointError: Parts of it are missing, or it cannot be written; nothing was removed.
    """
    assert order.policy.directory is not None
    began_s = clock_s()
    store = open_store(order.policy.directory)
    is_whole = commit_parts(
        store, order.state, order.world, session=order.origin.job, origin=order.origin
    )
    if not is_whole:
        raise CheckpointError(
            f"{order.state} cannot be sealed in {store.address}: not all of its {order.world} "
            "shards are there"
        )
    pruned, trouble = _pruned(store, order.policy, order.state)
    persisted = Persisted(order.state, clock_s() - began_s, 0)
    return Outcome(persisted, has_parts=False, pruned=pruned, trouble=trouble)


def _pruned(
    store: CheckpointStore, policy: Policy, state: StateId
) -> tuple[tuple[StateId, ...], str]:
    """Remove what is too old; return what was, and what went wrong."""
    retention = Retention(keep_last=policy.keep_last, keep_every=policy.keep_every)
    try:
        return tuple(verdict.state for verdict in prune(store, retention, {state})), ""
    except CheckpointError as exc:
        return (), str(exc)


@dataclass(slots=True)
class Schedule:
    """Says whether the newest state is to be persisted now. Seconds are of a monotonic clock."""

    last: StateId | None = None  # the newest that is persisted
    busy_with: StateId | None = None
    failures: int = field(default=0)
    _began_s: float | None = None
    _not_before_s: float = 0.0

    def is_due(self, newest: StateId | None, policy: Policy | None, now_s: float) -> bool:
        """Say whether policy asks for *newest* to be persisted."""
        if policy is None or policy.persist_every_s is None or not self.can(newest, policy):
            return False
        since_s = None if self._began_s is None else now_s - self._began_s
        is_time = since_s is None or since_s >= policy.persist_every_s
        return is_time and now_s >= self._not_before_s

    def can(self, newest: StateId | None, policy: Policy | None) -> bool:
        """Say whether there is something to persist, somewhere to, and nothing in the way."""
        if newest is None or policy is None or policy.directory is None:
            return False
        return self.busy_with is None and not self.has(newest)

    def has(self, state: StateId) -> bool:
        """Say whether *state*, or a newer one, is persisted."""
        return self.last is not None and self.last >= state

    def began(self, state: StateId, now_s: float) -> None:
        """Take note that *state* is being written."""
        self.busy_with = state
        self._began_s = now_s

    def succeeded(self, state: StateId) -> None:
        """Take note that *state* is persisted."""
        self.busy_with = None
        self.failures = 0
        self._not_before_s = 0.0
        self.last = state if self.last is None else max(self.last, state)

    def failed(self, now_s: float) -> float:
        """Take note of a failure; return the seconds until the next try."""
        self.busy_with = None
        self._began_s = None
        self.failures += 1
        wait_s = min(BACKOFF_MIN_S * 2.0 ** min(self.failures - 1, 20), BACKOFF_MAX_S)
        self._not_before_s = now_s + wait_s
        return wait_s

    def went_back(self, state: StateId | None) -> None:
        """Forget what is newer than the state the job goes on from: other steps follow it."""
        if self.last is not None and (state is None or self.last > state):
            self.last = None

    def other_directory(self) -> None:
        """Begin anew: nothing of this job is known to be in the directory."""
        self.last = None
        self.failures = 0
        self._began_s = None
        self._not_before_s = 0.0
