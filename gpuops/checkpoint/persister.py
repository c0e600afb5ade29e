"""Writes the newest committed state to the directory of the policy, when it is time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuops.checkpoint.keeper import Policy
from gpuops.checkpoint.keeper_events import Events
from gpuops.checkpoint.keeper_jobs import Jobs
from gpuops.checkpoint.messages import state_to_json
from gpuops.checkpoint.node_memory import NodeMemory
from gpuops.checkpoint.persist import Origin
from gpuops.checkpoint.persisting import (
    OpenStore,
    Outcome,
    Schedule,
    Seal,
    Task,
    carry_out,
    carry_out_seal,
)
from gpuops.checkpoint.states import KeeperError, StateId

_PIN = "persist"
_FAILURE_CHARS_MAX = 1000
_PARTS_KEPT = 4


@dataclass(slots=True)
class Persister:
    """Persists from *memory*; a failure becomes an event and is tried again later.

    ``is_flushing``: the newest state is wanted now. ``failure``: of the last try, "" where it
    succeeded, and ``failed`` the state it was of. ``origin``: whose states these are. ``parts``:
    states of several nodes of which this node's shards are written, the newest first; ``sealed`` is
    the newest of them known to be whole. ``pieces`` were written so far.
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
    failed: StateId | None = None
    seconds: float = 0.0
    nbytes: int = 0
    parts: list[StateId] = field(default_factory=list)
    sealed: StateId | None = None
    pieces: int = 0
    _sealing: StateId | None = None
    _is_told: bool = False

    @property
    def last(self) -> StateId | None:
        """The newest state that is known to lie in the directory, whole."""
        return self.schedule.last if self.memory.gate.is_alone else self.sealed

    def counts(self) -> dict[str, Any]:
        """Return what there is to know in a glance, by name."""
        schedule = self.schedule
        return {
            "persisted": None if schedule.last is None else state_to_json(schedule.last),
            "persisting": None if not schedule.busy_with else state_to_json(schedule.busy_with),
            "persist_failures": schedule.failures,
            "persist_failed": None if self.failed is None else state_to_json(self.failed),
            "persist_trouble": self.failure,
            "directory": self.policy.directory if self.policy else None,
            "persist_s": self.seconds,
            "persist_bytes": self.nbytes,
            "persist_pieces": self.pieces,
        }

    def take_notice(self) -> str | None:
        """Return what whoever trains is to be told: once that it fails, once that it works again.

        A disk may be full for days, and where no agent is nobody else says so.
        """
        if bool(self.failure) == self._is_told:
            return None
        self._is_told = bool(self.failure)
        if not self.failure:
            return "states persist again"
        return f"states do not persist, and are tried again later: {self.failure}"

    def set_policy(self, policy: Policy) -> None:
        """Take the policy over; another directory is one of which nothing is known yet."""
        if self.policy is None or self.policy.directory != policy.directory:
            self.schedule.other_directory()
            self.parts, self.sealed = [], None
        self.policy = policy

    def went_back(self, state: StateId | None) -> None:
        """Forget what is newer than the state the job goes on from."""
        self.schedule.went_back(state)
        self.parts = [part for part in self.parts if state is not None and part <= state]
        if self.sealed is not None and (state is None or self.sealed > state):
            self.sealed = None

    @property
    def is_due(self) -> bool:
        """Say whether the newest state is to be persisted by the policy."""
        return self.schedule.is_due(self.memory.gate.newest, self.policy, self.clock_s())

    def persist_if_due(self) -> None:
        """Begin to persist the newest state where policy, or a flush, asks for it."""
        gate = self.memory.gate
        if (gate.is_alone and self.is_due) or (
            self.is_flushing and self.schedule.can(gate.newest, self.policy)
        ):
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
        shards = self.memory.held(state)
        task = Task(state, shards, policy, self.origin, parts, is_last=self.is_flushing)
        self.schedule.began(state, self.clock_s())

        def then(outcome: Outcome | None, error: BaseException | None) -> None:
            gate.unpin(_PIN)
            if outcome is None:
                self._failed(state, str(error) or repr(error))
            else:
                self._succeeded(outcome, policy)
            self.persist_if_due()

        self.jobs.persist(lambda: carry_out(task, self.open_store, self._is_to_stop), then)

    def _is_to_stop(self) -> bool:
        """Say whether to end; asked with each piece that is written, by which others see that."""
        self.pieces += 1
        return self.is_ending()

    def seal(self, state: StateId, world: int) -> None:
        """Begin to make *state* appear in the directory: the parts of all nodes are there.

        What comes of it is an event, and `sealed`. To ask again for the same does no harm.

        Raises:
            KeeperError: There is no directory, the run has no name, or another one is sealed now.
        """
        policy = self.policy
        if policy is None or policy.directory is None:
            raise KeeperError("no directory for checkpoints is set")
        if not self.origin.job:
            raise KeeperError("the run has no name, and several nodes are to write one state")
        if self._sealing is not None and self._sealing != state:
            raise KeeperError(f"{self._sealing} is being sealed just now")
        if self._sealing == state or (self.sealed is not None and self.sealed >= state):
            return
        self._sealing = state
        order = Seal(state, world, policy, self.origin)

        def then(outcome: Outcome | None, error: BaseException | None) -> None:
            self._sealing = None
            if outcome is not None:
                self._succeeded(outcome, policy)
                return
            why = str(error) or repr(error)
            self.events.add("persist_failed", state=state_to_json(state), why=why)

        self.jobs.persist(lambda: carry_out_seal(order, self.open_store), then)

    def _succeeded(self, outcome: Outcome, policy: Policy) -> None:
        done = outcome.persisted
        if outcome.has_parts:
            self.schedule.busy_with = None
            self.failure, self.failed = "", None
            self.seconds, self.nbytes = done.seconds, done.nbytes
        if self.policy is not None and self.policy.directory == policy.directory:
            if outcome.has_parts:
                self.schedule.succeeded(done.state)
                self.parts = sorted({*self.parts, done.state}, reverse=True)[:_PARTS_KEPT]
            if outcome.is_whole:
                self.sealed = max(self.sealed or done.state, done.state)
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
        self.failure, self.failed = why[:_FAILURE_CHARS_MAX], state
        # What a flush is for is the newest: that an older one failed is not the answer.
        self.is_flushing = self.is_flushing and self.memory.gate.newest not in (None, state)
        wait_s = self.schedule.failed(self.clock_s())
        fields = {"state": state_to_json(state), "why": why, "again_s": wait_s}
        self.events.add("persist_failed", **fields)
