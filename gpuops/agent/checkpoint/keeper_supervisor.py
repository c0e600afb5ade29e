"""The supervision of this node's keeper by its agent: started or adopted, polled, ended.

The keeper is started with the agent, in parallel with the health check: a start on demand could
fail in the middle of a training, and costs as much, some 15 MB and 0.1 s of one core.

Nothing here stops a job: failures are recorded. A keeper that dies while workers run is replaced.
Calls are bounded in time. The agent's main and control threads call in.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from gpuops.agent.checkpoint.api import (
    HAS_STATE,
    KEEPER,
    OFF,
    CheckpointService,
    FinalFlush,
    Refusal,
    StartedKeeper,
    directory_env,
)
from gpuops.agent.checkpoint.final_commit import FinalCommit
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.keeper_events import (
    KeeperEvent,
    checkpoint_state,
    read_events,
    without_keeper,
)
from gpuops.agent.checkpoint.keeper_restarts import KeeperGeneration, KeeperRestarts, PollRequest
from gpuops.agent.checkpoint.record import CheckpointRecord
from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.keeper.messages import NO_DIRECTORY, KeeperStatus
from gpuops.checkpoint.types import KeeperError, StateId
from gpuops.control.record import Roster
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

POLL_WAIT_S = 0.8
END_S = 5.0


@dataclass(frozen=True, slots=True)
class KeeperTimeouts:
    """How often the keeper is polled, and how long workers wait for its start."""

    every_s: float = 1.0
    ready_s: float = 30.0  # longer than ending a keeper that hangs and starting another
    hurried_s: float = 0.2  # while a rank waits for an agreement of all nodes


TIMES = KeeperTimeouts()


class KeeperSupervisor(CheckpointService):
    """The keeper of this node and job.

    *start* starts or adopts it; it raises KeeperError within its own deadline. *release* is called
    once the keeper was ended (True) or released (False). *refusal*: see `CheckpointService`; it
    gets the keeper's pid. *follower*: for the agreement with other nodes, None where there are
    none. *pause* sleeps.
    """

    def __init__(  # noqa: PLR0913 its collaborators and its timeouts
        self,
        start: Callable[[], StartedKeeper],
        record: CheckpointRecord,
        clock: Clock,
        *,
        directory: str | None = None,
        release: Callable[[bool], None] = lambda _end_keeper: None,
        refusal: Refusal = lambda _keeper_pid, _pause: None,
        times: KeeperTimeouts = TIMES,
        follower: CommitFollower | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(directory)
        self._start = start
        self._record = record
        self._clock = clock
        self._release = release
        self._refusal = refusal
        self._times = times
        self._follower = follower
        self._final_commit = None
        if follower is not None:
            wait = pause or threading.Event().wait
            self._final_commit = FinalCommit(
                follower, self._poll_alive, lambda: self._newest, wait, clock
            )
        self._lock = threading.Lock()  # one call to the keeper at a time, and its events in order
        self._keeper: StartedKeeper | None = None
        self._newest: StateId | None = None
        self._lost: StateId | None = None  # with a keeper, and not persistent
        self._persisted: StateId | None = None
        self._at_begin: StateId | None = None
        self._generation: KeeperGeneration | None = None
        self._restarts = KeeperRestarts()
        self._state: CheckpointState | None = CheckpointState(is_alive=False)
        self._stopping = threading.Event()
        self._is_over = False
        self._is_used = True  # False: some other node has no keeper, so that nothing is saved
        self._poll_request = PollRequest()
        self._thread = threading.Thread(target=self._run, name="gpuops-keeper", daemon=True)

    def open(self) -> "KeeperSupervisor":
        """Begin to start and to poll the keeper, without waiting; return this object."""
        self._thread.start()
        return self

    def env(self) -> Mapping[str, str]:
        """Return the keeper's socket for the workers; `OFF` where there is no keeper."""
        keeper = self._keeper
        socket = OFF if keeper is None or not self._is_used else keeper.socket
        has_state = {HAS_STATE: "1"} if socket and self._newest is not None else {}
        return {KEEPER: socket, **has_state, **directory_env(self._directory)}

    def node_status(self) -> Json | None:
        return None if self._follower is None else self._follower.node_status()

    def exchange_s(self) -> float:
        return super().exchange_s() if self._follower is None else self._follower.exchange_s

    def inventory(self) -> Json | None:
        follower, found, what = self._follower, None, "listing the checkpoints in memory"
        if follower is None:
            return None
        with self._locked(what, self._times.ready_s) as is_locked:
            if not is_locked or self._is_over:
                return None
            keeper = self._keeper or self._open_keeper()
            try:
                found = None if keeper is None else follower.inventory(keeper.client)
            except KeeperError as exc:
                self._lose_keeper(what, exc)
        return found

    def begin(
        self, generation: int, n_nodes: int, excluded_step: int | None, roster: Roster | None = None
    ) -> None:
        """Prepare for the workers of a generation; a keeper that died is replaced first."""
        with self._locked("preparing the checkpoints", self._times.ready_s) as is_locked:
            if not is_locked or self._is_over:
                return
            lost = self._end_generation()
            # On several nodes all have to agree on which states are complete.
            self._is_used = n_nodes == 1
            current = KeeperGeneration(generation, n_nodes, excluded_step, roster, newest=lost)
            if not self._begin_keeper(current):
                self._begin_keeper(current)
            self._poll()
            self._at_begin = self._newest

    def _end_generation(self) -> StateId | None:
        """End the previous generation; return the newest state of a keeper that is gone."""
        before, newest = self._generation, self._newest
        self._generation = None
        self._poll()
        self._lost = None
        self._record.end_generation()
        if self._keeper is not None:
            return None
        return newest if before is None else before.newest or newest

    def _begin_keeper(self, current: KeeperGeneration, *, is_replaced: bool = False) -> bool:
        """Prepare a keeper for this generation; return whether there is one.

        *is_replaced*: the workers run, and the previous keeper has died with its states.
        """
        keeper = self._keeper or self._open_keeper(lost=current.newest)
        if keeper is None:
            return False
        client, follower, roster = keeper.client, self._follower, current.roster
        try:
            if is_replaced and keeper.adopted and keeper.pid == current.pid:
                # It was only slow, and still has its state.
                if follower is not None:
                    follower.reattach()
            else:
                client.begin_generation(current.number, current.n_nodes, current.excluded_step)
                if follower is not None and roster is not None and is_replaced:
                    self._is_used = follower.begin_replaced(client, roster, current.epoch)
                elif follower is not None and roster is not None:
                    self._is_used = follower.begin(client, roster)
                elif current.epoch is not None:
                    client.take_over(current.epoch)
        except KeeperError as exc:
            what = "letting another keeper take over" if is_replaced else "beginning a generation"
            self._lose_keeper(what, exc)
            return False
        self._generation = replace(current, pid=keeper.pid, newest=None, lost_s=None)
        return True

    def refusal(self, pause: Callable[[float], object]) -> str | None:
        return self._refusal(self._keeper.pid if self._keeper else None, pause)

    def poll(self) -> None:
        """Poll the keeper; one that does not answer is not waited for."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            self._poll_locked()
        else:
            self._poll_request.ask(POLL_WAIT_S)

    def _poll_locked(self) -> None:
        with self._locked("polling the keeper", POLL_WAIT_S) as is_locked:
            if is_locked:
                self._poll()

    def run_once(self) -> None:
        """Poll the keeper; replace one that has died while workers run."""
        number = self._poll_request.begin()
        if self._follower is not None:
            self._follower.fetch()
        self._poll_locked()
        self._poll_request.end(number)
        if self._must_restart():
            with self._locked("starting another keeper", POLL_WAIT_S) as is_locked:
                if is_locked and self._generation is not None and self._must_restart():
                    self._restarts.record_attempt(self._now_s())
                    self._begin_keeper(self._generation, is_replaced=True)

    def _must_restart(self) -> bool:
        generation = self._generation
        if (
            self._keeper is not None
            or generation is None
            or generation.lost_s is None
            or self._is_over
        ):
            return False
        return self._is_used and self._restarts.is_due(self._now_s(), generation.lost_s)

    def _now_s(self) -> float:
        return self._clock.mono_ns() / NS_PER_S

    def state(self) -> CheckpointState | None:
        return self._state

    def flush(self, within_s: float, *, is_end: bool = False) -> FinalFlush | None:
        """Persist the newest state; at the end of a run (*is_end*) a directory may be missing."""
        began_ns, done = self._clock.mono_ns(), None
        with self._locked("persisting the newest checkpoint", within_s) as is_locked:
            if is_locked:
                self._poll()
            done = FinalFlush(why="the keeper did not answer in time")
            if self._keeper is None:
                done = FinalFlush()
            elif is_locked:
                # Also where no state is known yet: the only one may just be in the hashing.
                done = self._flushed(within_s - self._seconds_since(began_ns))
            known = [state for state in (done.newest, done.state) if state is not None]
            if self._lost is not None and all(state < self._lost for state in known):
                why = "the keeper is gone, and the states in it"
                done = replace(done, newest=self._lost, fitted=False, why=why)
            elif not known and (is_locked or self._keeper is None):
                return None
            seconds = self._seconds_since(began_ns)
            done = replace(done, seconds=seconds, within_s=within_s, is_end=is_end)
            if done.has_place or not is_end:
                self._record.flushed(done)
        return done

    def _flushed(self, within_s: float) -> FinalFlush:
        assert self._keeper is not None
        client, began_ns = self._keeper.client, self._clock.mono_ns()
        if self._final_commit is not None and self._final_commit.follower.is_on:
            self._final_commit.follower.is_over = True
            done = self._final_commit.persist(within_s)
            if done is not None:
                return done
            within_s -= self._seconds_since(began_ns)
        newest = self._newest
        try:
            result = client.flush(max(0.0, within_s))
        except KeeperError as exc:
            self._lose_keeper("persisting the newest checkpoint", exc)
            return FinalFlush(newest=newest, why=str(exc))
        self._poll()
        state = result.state
        return FinalFlush(
            state=self._persisted if state is None else state,
            # A state that was sealed before may have been committed meanwhile.
            newest=newest if state is None else max(state, newest or state),
            fitted=state is not None,
            has_place=result.why != NO_DIRECTORY,
            directory=result.directory,
            why=result.why or None,
        )

    def settle(self, within_s: float) -> None:
        follower, began_ns = self._follower, self._clock.mono_ns()
        if follower is None or self._final_commit is None or not follower.is_on:
            return
        follower.is_over = True
        with self._locked("persisting the newest checkpoint", within_s) as is_locked:
            if is_locked and self._keeper is not None:
                self._poll()  # the ranks may have saved since the last poll
                if follower.node_status() is not None:
                    self._final_commit.persist(within_s - self._seconds_since(began_ns))

    def _seconds_since(self, then_ns: int) -> float:
        return (self._clock.mono_ns() - then_ns) / NS_PER_S

    def end(self, save_s: float) -> None:
        self._stopping.set()
        self._poll_request.wake()
        if save_s > 0:
            self.flush(save_s, is_end=True)
        self._finish("ending the keeper", END_S, ends=True)

    def _end_keeper(self, keeper: StartedKeeper) -> bool:
        try:
            keeper.client.shut_down()
        except KeeperError as exc:
            self._record.failed("ending the keeper of the checkpoints", exc)
            return False
        finally:
            keeper.client.close()
        return True

    def leave(self) -> None:
        self._stopping.set()
        self._poll_request.wake()
        self._finish("leaving the keeper", POLL_WAIT_S, ends=False)

    def _finish(self, what: str, within_s: float, *, ends: bool) -> None:
        """Release the keeper, or end it (*ends*); one that another call holds is only released."""
        with self._locked(what, within_s) as is_locked:
            if self._is_over:
                return
            self._is_over, has_ended = True, False
            if is_locked:
                self._poll()
                self._record.end_generation()
                if ends:
                    has_ended = self._keeper is None or self._end_keeper(self._keeper)
                    self._keeper = None
            if not ends and self._keeper is not None:
                self._keeper.client.close()
            self._release(has_ended)

    def _run(self) -> None:
        with self._locked("starting the keeper", self._times.ready_s) as is_locked:
            if is_locked and self._keeper is None and not self._is_over:
                self._open_keeper()
        while not self._stopping.is_set():
            self._poll_request.wait(self._wait_s())
            if not self._stopping.is_set():
                self.run_once()

    def _wait_s(self) -> float:
        is_waiting = self._follower is not None and self._follower.is_waiting
        return self._times.hurried_s if is_waiting else min(self._times.every_s, self.exchange_s())

    @contextmanager
    def _locked(self, what: str, within_s: float) -> Iterator[bool]:
        """Hold the lock for the block; yield whether it was acquired within *within_s*.

        An exception in the block is recorded, and suppressed.
        """
        is_locked = self._lock.acquire(timeout=max(0.0, within_s))
        try:
            yield is_locked
        except Exception as exc:  # boundary: our bug must not stop the training
            log.warning("%s failed", what, exc_info=True)
            with suppress(Exception):
                self._record.failed(what, exc)
        finally:
            if is_locked:
                self._lock.release()

    def _open_keeper(self, lost: StateId | None = None) -> StartedKeeper | None:
        """Start or adopt a keeper and return it, None where that failed.

        *lost*: the newest state in the previous keeper.
        """
        try:
            self._keeper = self._start()
        except KeeperError as exc:
            self._record.failed("starting the keeper of the checkpoints", exc)
            return None
        self._newest = None
        self._poll(is_first=True)
        if self._keeper is not None:
            self._at_begin = self._newest
            self._record.keeper_started(self._keeper, self._newest, lost=lost)
        return self._keeper

    def _poll_alive(self) -> bool:
        """Poll the keeper; return whether it is alive."""
        self._poll()
        return self._keeper is not None

    def _poll(self, *, is_first: bool = False) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        events: list[KeeperEvent] = []
        try:
            try:
                events = read_events(keeper.client.events())
                status = keeper.client.status()
                if self._follower is not None:
                    self._follower.update(keeper.client, status)
            finally:
                if events:  # also after an error: the keeper does not send them again
                    self._record.record_events(events)
        except KeeperError as exc:
            self._lose_keeper("polling the keeper of the checkpoints", exc)
            return
        self._update(status, is_first=is_first)

    def _update(self, status: KeeperStatus, *, is_first: bool) -> None:
        newest, persisted = status.progress.newest, status.progress.persisted
        if self._follower is not None and self._follower.is_on:
            persisted = self._follower.agreed.persisted
        has_changed = newest is not None and newest != self._newest
        if newest is not None and (has_changed or is_first):
            is_new = not is_first and (self._at_begin is None or newest > self._at_begin)
            self._record.newest(newest, is_new=is_new)
        self._newest, self._persisted = newest, persisted
        if self._generation is not None and newest is not None:
            saved = newest.epoch if status.epoch == newest.epoch else self._generation.epoch
            self._generation = replace(self._generation, epoch=saved, newest=newest)
        now_ns, used = self._clock.mono_ns(), self._is_used
        self._state = checkpoint_state(self._state, status, persisted, now_ns, is_used=used)

    def _lose_keeper(self, what: str, error: KeeperError) -> None:
        """Give the keeper up; `run_once` starts another one."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.client.close()
        if self._generation is not None and self._generation.lost_s is None:
            self._generation = replace(self._generation, lost_s=self._now_s())
        if self._follower is not None:
            self._follower.detach()
        self._state = without_keeper(self._state)
        if self._persisted is None or self._persisted < (self._newest or self._persisted):
            self._lost = self._newest or self._lost
        self._newest = self._at_begin = None
        self._record.failed(what, error)
