"""Write the newest committed state to the directory when that is due.

A failure is reported and retried later, with a growing backoff; it never stops the keeper.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpuops.checkpoint.agreement.write_once import WriteOnce
from gpuops.checkpoint.keeper.jobs import EventQueue, JobKind, JobResult, Jobs, run_task
from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.keeper.off_ranks import off_ranks
from gpuops.checkpoint.memory.node_memory import NodeMemory
from gpuops.checkpoint.storage.address import local_directory
from gpuops.checkpoint.storage.persist import StateOrigin
from gpuops.checkpoint.storage.persist_schedule import PersistSchedule
from gpuops.checkpoint.storage.persist_task import (
    CommitTask,
    OpenStore,
    PersistOutcome,
    PersistTask,
    run_commit,
    run_persist,
)
from gpuops.checkpoint.storage.read_back import ReadBack, ReadBackTask
from gpuops.checkpoint.types import KeeperError, StateId

COMMIT_AGAIN_S = 0.5
# All nodes begin to write within seconds where their run ends: they need about as long.
OTHERS_S = 60.0

_PIN = "persist"
_FAILURE_CHARS_MAX = 1000
_WRITTEN_KEPT = 4


@dataclass(slots=True)
class Persister:
    """Persists from *memory*; a failure becomes an event and is tried again later.

    ``is_flushing``: the newest state is to be persisted now. ``failure``: of the last attempt, ""
    after a success, and ``failed_state`` its state. ``origin``: the run that saves these states.
    ``written_states``: states of several nodes of which this node's shards are written, the newest
    first; ``last_complete`` is the newest of them known to be complete, ``commit_failure`` why the
    last attempt to complete one failed. ``n_writes``: the number of writes so far.
    """

    memory: NodeMemory
    jobs: Jobs
    events: EventQueue
    clock_s: Callable[[], float]
    open_store: OpenStore
    is_ending: Callable[[], bool]
    rank_pids: Callable[[], Iterable[int]]
    policy: CheckpointPolicy | None = None
    origin: StateOrigin = field(default_factory=lambda: StateOrigin("", 0))
    schedule: PersistSchedule = field(default_factory=PersistSchedule)
    is_flushing: bool = False
    failure: str = ""
    failed_state: StateId | None = None
    seconds: float = 0.0
    nbytes: int = 0
    written_states: list[StateId] = field(default_factory=list)
    last_complete: StateId | None = None
    n_writes: int = 0
    commit_failure: str = ""
    _resumed: StateId | None = None
    _committing: StateId | None = None
    _commit_again_s: float = 0.0
    _awaiting: tuple[StateId, float] | None = None  # the others' shards of a state, since when
    _is_reported: bool = False
    _unverified: StateId | None = None  # not hashed as it was written
    read_back: ReadBack = field(init=False)

    def __post_init__(self) -> None:
        self.read_back = ReadBack(
            self.jobs,
            self.events,
            self.clock_s,
            self.open_store,
            self.is_ending,
            self.rank_pids,
            self._on_damaged,
        )

    @property
    def last_persisted(self) -> StateId | None:
        """The newest state that is known to be complete in the directory."""
        return (
            self.schedule.last_persisted
            if self.memory.buffer_table.is_single_node
            else self.last_complete
        )

    def is_persistent(self, state: StateId) -> bool:
        """Return whether *state*, or a newer one, is known to be complete in the directory."""
        return self.last_persisted is not None and self.last_persisted >= state

    def stats(self) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "persisted": None if schedule.last_persisted is None else schedule.last_persisted,
            "persisting": None if not schedule.in_progress else schedule.in_progress,
            "persist_failures": schedule.failures,
            "persist_failed": None if self.failed_state is None else self.failed_state,
            "persist_trouble": self.failure,
            "directory": self.policy.directory if self.policy else None,
            "persist_s": self.seconds,
            "persist_bytes": self.nbytes,
            "persist_pieces": self.n_writes,
        }

    def pop_warning(self) -> str | None:
        """Return a warning for the training script: once when it fails, once when it works again.

        A disk may be full for days, and without an agent nothing else reports it.
        """
        if bool(self.failure) == self._is_reported:
            return None
        self._is_reported = bool(self.failure)
        if not self.failure:
            return "states persist again"
        return f"states do not persist, and are tried again later: {self.failure}"

    def set_policy(self, policy: CheckpointPolicy) -> None:
        """Apply *policy*; of another directory no content is known yet."""
        if self.policy is None or self.policy.directory != policy.directory:
            self.schedule.reset()
            self.written_states, self.last_complete = [], None
            self.read_back.verified = None
        self.policy = policy

    def rewind(self, state: StateId | None) -> None:
        """Drop states newer than the one that the job resumes from."""
        self._resumed = state
        self.schedule.rewind(state)
        self.written_states = [
            part for part in self.written_states if state is not None and part <= state
        ]
        if self.last_complete is not None and (state is None or self.last_complete > state):
            self.last_complete = None

    @property
    def is_due(self) -> bool:
        """Return whether the policy requires persisting the newest state."""
        return self.schedule.is_due(
            self.memory.buffer_table.last_committed, self.policy, self.clock_s()
        )

    def tick(self) -> None:
        """Begin what is due: to persist the newest state, or to read one back."""
        self.persist_if_due()
        self.read_back.tick()

    def persist_if_due(self) -> None:
        """Begin to persist the newest state where the policy or a flush requires it."""
        table = self.memory.buffer_table
        if (table.is_single_node and self.is_due) or (
            self.is_flushing and self.schedule.can_persist(table.last_committed, self.policy)
        ):
            assert table.last_committed is not None
            self.persist(table.last_committed)

    def persist(self, state: StateId, once: WriteOnce | None = None) -> None:
        """Begin to persist *state*; *once*: what the nodes hold alike and write once.

        Of a state of an older epoch all is written: who writes what follows from the nodes of the
        generation that saved it.

        Raises:
            KeeperError: Memory does not have it, there is no directory, or another write is in
                progress.
        """
        policy, table = self.policy, self.memory.buffer_table
        if policy is None or policy.directory is None:
            raise KeeperError("no directory for checkpoints is set")
        if self.schedule.in_progress is not None:
            raise KeeperError(f"{self.schedule.in_progress} is being written now")
        if not table.is_single_node and not self.origin.job:
            raise KeeperError("the run has no name, which writing from several nodes needs")
        table.pin(state, _PIN)
        session = None if table.is_single_node else self.origin.job
        shards = self.memory.complete_shards(state)
        once = once if state.epoch == table.epoch else None
        verify = self._must_verify(policy.directory)
        task = PersistTask(state, shards, policy, self.origin, session, once, self._resumed, verify)
        self.schedule.on_start(state, self.clock_s())
        run_task(self._run_persist(task))

    def _must_verify(self, directory: str) -> bool:
        """Return whether to hash what is written, rather than to leave it to reading it back.

        Not on one node whose directory keeps up: the state before was read back by now, and
        retention keeps it until a newer one was.
        """
        return (
            not self.memory.buffer_table.is_single_node
            or local_directory(directory) is None
            or self.is_flushing
            or self.is_ending()
            or not self.written_states
            or self.written_states[0] != self.read_back.verified
        )

    def awaits_read_back(self, state: StateId) -> bool:
        """Return whether *state* was not hashed as it was written, and is still to be read back."""
        return self._unverified == state and self.read_back.is_pending(state)

    async def _run_persist(self, task: PersistTask) -> None:
        work = partial(
            run_persist, task, self.open_store, self._should_stop, self.memory.check_fits
        )
        why = ""
        try:
            outcome = await JobResult(self.jobs, JobKind.PERSIST, off_ranks(self.rank_pids(), work))
        except Exception as exc:  # noqa: BLE001 boundary: any error of a file system
            why = str(exc) or repr(exc)
        self.memory.buffer_table.unpin(_PIN)
        if why:
            self._on_failure(task.state, why)
        else:
            self._on_success(outcome, task.policy)
            written, is_alone = task.shards.keys(), task.session is None
            self._unverified = None if task.verify else task.state
            self.read_back.request(
                ReadBackTask(task.state, written, task.policy, is_alone, task.resumed)
            )
        self.persist_if_due()

    def _on_damaged(self, state: StateId) -> None:
        if self.memory.buffer_table.is_single_node:
            self.schedule.on_damaged(state)

    def _should_stop(self) -> bool:
        """Return whether to stop; called for each piece written, which counts progress."""
        self.n_writes += 1
        return self.is_ending()

    def commit_shards(self, state: StateId, world: int) -> None:
        """Begin to commit *state* in the directory: the shards of all nodes are written.

        The result is an event, and `last_complete`. Repeated calls for one state have no effect.

        Raises:
            KeeperError: There is no directory, the run has no name, or another commit runs.
        """
        policy = self.policy
        if policy is None or policy.directory is None:
            raise KeeperError("no directory for checkpoints is set")
        if not self.origin.job:
            raise KeeperError("the run has no name, which writing from several nodes needs")
        if self._committing is not None and self._committing != state:
            raise KeeperError(f"{self._committing} is being committed now")
        if self._committing == state or (
            self.last_complete is not None and self.last_complete >= state
        ):
            return
        self._committing = state
        task = CommitTask(state, world, policy, self.origin, self._resumed)
        run_task(self._run_commit(task))

    def commit_at_end(self, state: StateId) -> float:
        """As `commit_shards` of what this node has written, where no leader says that all have.

        Each node tries, again and again: one of them finds the shards of all. Returns for how many
        seconds more to wait for them: a node that is gone never writes its shards.
        """
        now_s = self.clock_s()
        if self._awaiting is None or self._awaiting[0] != state:
            self._awaiting = (state, now_s)
        left_s = self._awaiting[1] + OTHERS_S + self.seconds - now_s
        if left_s > 0 and self._committing is None and now_s >= self._commit_again_s:
            self._commit_again_s = now_s + COMMIT_AGAIN_S
            self.commit_shards(state, next(iter(self.memory.complete_shards(state))).world)
        return left_s

    async def _run_commit(self, task: CommitTask) -> None:
        self.commit_failure = ""
        try:
            outcome = await JobResult(
                self.jobs, JobKind.PERSIST, partial(run_commit, task, self.open_store)
            )
        except Exception as exc:  # noqa: BLE001 boundary: any error of a file system
            self.commit_failure = str(exc) or repr(exc)
            if not self.is_flushing:  # else whoever waits for it is told
                self.events.add("persist_failed", state=task.state, why=self.commit_failure)
            return
        finally:
            self._committing = None
        self._on_success(outcome, task.policy)

    def _on_success(self, result: PersistOutcome, policy: CheckpointPolicy) -> None:
        persisted = result.persisted
        if result.has_written_shards:
            self.schedule.in_progress = None
            self.failure, self.failed_state = "", None
            self.seconds, self.nbytes = persisted.seconds, persisted.nbytes
        if self.policy is not None and self.policy.directory == policy.directory:
            if result.has_written_shards:
                self.schedule.on_success(persisted.state)
                self.written_states = sorted({*self.written_states, persisted.state}, reverse=True)[
                    :_WRITTEN_KEPT
                ]
            if result.is_complete:
                self.last_complete = max(self.last_complete or persisted.state, persisted.state)
        newest = self.memory.buffer_table.last_committed
        if newest is None or self.is_persistent(newest):
            self.is_flushing = False
        self.events.add(
            "persisted" if result.is_complete else "persisted_part",
            state=persisted.state,
            seconds=persisted.seconds,
            bytes=persisted.nbytes,
            directory=policy.directory,
            removed=list(result.pruned),
            trouble=result.warning,
        )

    def _on_failure(self, state: StateId, why: str) -> None:
        self.failure, self.failed_state = why[:_FAILURE_CHARS_MAX], state
        # A flush needs the newest state: it continues where an older one failed.
        self.is_flushing = self.is_flushing and self.memory.buffer_table.last_committed not in (
            None,
            state,
        )
        wait_s = self.schedule.on_failure(self.clock_s())
        fields = {"state": state, "why": why, "again_s": wait_s}
        self.events.add("persist_failed", **fields)
