"""Writes the newest committed state to the directory of the policy, when it is time."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.checkpoint.keeper import Policy
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.messages import state_to_json
from gpuops.checkpoint.node_memory import NodeMemory
from gpuops.checkpoint.persist import Origin
from gpuops.checkpoint.persisting import OpenStore, Outcome, Schedule, Task, carry_out
from gpuops.checkpoint.states import KeeperError, StateId

_PIN = "persist"
_FAILURE_CHARS_MAX = 1000


@dataclass(slots=True)
class Persister:
    """Persists from *memory*; a failure becomes an event and is tried again later.

    ``is_flushing``: the newest state is wanted now. ``failure``: of the last try, "" where it
    succeeded. ``origin``: whose states these are.
    """

    memory: NodeMemory
    jobs: Jobs
    events: Events
    clock_s: Callable[[], float]
    open_store: OpenStore
    is_ending: Callable[[], bool]
    policy: Policy | None = None
    origin: Origin = field(default_factory=lambda: Origin("", 0))
    schedule: Schedule = field(default_factory=Schedule)
    is_flushing: bool = False
    failure: str = ""
    seconds: float = 0.0
    nbytes: int = 0

    def set_policy(self, policy: Policy) -> None:
        """Take the policy over; another directory is one of which nothing is known yet."""
        if self.policy is None or self.policy.directory != policy.directory:
            self.schedule.other_directory()
        self.policy = policy

    def persist_if_due(self) -> None:
        """Begin to persist the newest state where policy, or a flush, asks for it."""
        gate = self.memory.gate
        is_due = gate.is_alone and self.schedule.is_due(gate.newest, self.policy, self.clock_s())
        if is_due or (self.is_flushing and self.schedule.can(gate.newest, self.policy)):
            assert gate.newest is not None
            self.persist(gate.newest)

    def persist(self, state: StateId) -> None:
        """Begin to persist *state*.

        Raises:
            KeeperError: Memory does not hold it, there is no directory, or one is written now.
        """
        policy, gate = self.policy, self.memory.gate
        if policy is None or policy.directory is None:
            raise KeeperError("no directory for checkpoints is set")
        if self.schedule.busy_with is not None:
            raise KeeperError(f"{self.schedule.busy_with} is being written just now")
        if not gate.is_alone and not self.origin.job:
            raise KeeperError("the run has no name, and several nodes are to write one state")
        gate.pin(state, _PIN)
        parts = None if gate.is_alone else self.origin.job
        task = Task(state, self.memory.held(state), policy, self.origin, parts)
        self.schedule.began(state, self.clock_s())

        def then(outcome: Outcome | None, error: BaseException | None) -> None:
            gate.unpin(_PIN)
            if outcome is None:
                self._failed(state, str(error) or repr(error))
            else:
                self._succeeded(outcome, policy)
            self.persist_if_due()

        self.jobs.persist(lambda: carry_out(task, self.open_store, self.is_ending), then)

    def _succeeded(self, outcome: Outcome, policy: Policy) -> None:
        done = outcome.persisted
        self.schedule.busy_with = None
        self.failure, self.seconds, self.nbytes = "", done.seconds, done.nbytes
        if self.policy is not None and self.policy.directory == policy.directory:
            self.schedule.succeeded(done.state)
        newest = self.memory.gate.newest
        if newest is None or self.schedule.has(newest):
            self.is_flushing = False
        self.events.add(
            "persisted" if outcome.is_whole else "persisted_part",
            state=state_to_json(done.state),
            seconds=done.seconds,
            bytes=done.nbytes,
            directory=policy.directory,
            removed=[state_to_json(state) for state in outcome.pruned],
            trouble=outcome.trouble,
        )

    def _failed(self, state: StateId, why: str) -> None:
        self.failure = why[:_FAILURE_CHARS_MAX]
        self.is_flushing = False
        wait_s = self.schedule.failed(self.clock_s())
        fields = {"state": state_to_json(state), "why": why, "again_s": wait_s}
        self.events.add("persist_failed", **fields)
