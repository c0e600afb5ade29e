"""The supervision of this node's keeper by its agent: started or adopted, polled, ended.

The keeper is started with the agent, in parallel with the health check: a start on demand could
fail in the middle of a training, and costs as much, some 15 MB and 0.1 s of one core. What follows
when it dies, and when the run ends, its life-cycle says (`keeper_lifecycle`).

Nothing here stops a job: failures are recorded. Calls are bounded in time. The agent's main and
control threads call in.
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
from gpuops.agent.checkpoint.keeper_events import KeeperEvent, read_events
from gpuops.agent.checkpoint.keeper_lifecycle import KeeperGeneration, KeeperLifecycle, KeeperPhase
from gpuops.agent.checkpoint.record import CheckpointRecord
from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.messages import NO_DIRECTORY
from gpuops.checkpoint.types import KeeperError
from gpuops.control.record import Roster
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

END_S = 5.0


@dataclass(frozen=True, slots=True)
class KeeperTimeouts:
    """How often the keeper is polled, and how long others wait for that and for its start."""

    every_s: float = 1.0
    poll_s: float = 0.8
    ready_s: float = 30.0  # longer than ending a keeper that hangs and starting another
    hurried_s: float = 0.2  # while a rank waits for an agreement of all nodes


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
        times: KeeperTimeouts | None = None,
        follower: CommitFollower | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(directory)
        self._start = start
        self._record = record
        self._clock = clock
        self._release = release
        self._refusal = refusal
        self._times = times or KeeperTimeouts()
        self._follower = follower
        self._final_commit = None
        if follower is not None:
            wait = pause or threading.Event().wait
            self._final_commit = FinalCommit(
                follower, self._poll, lambda: self._life.newest, wait, clock
            )
        self._lock = threading.Lock()  # one call to the keeper at a time, and its events in order
        self._life = KeeperLifecycle()
        self._moving = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuops-keeper", daemon=True)

    def open(self) -> "KeeperSupervisor":
        """Begin to start and to poll the keeper, without waiting; return this object."""
        self._thread.start()
        return self

    def env(self) -> Mapping[str, str]:
        """Return the keeper's socket for the workers; `OFF` where there is no keeper."""
        life = self._life
        socket = OFF if life.keeper is None or not life.is_used else life.keeper.socket
        has_state = {HAS_STATE: "1"} if socket and life.newest is not None else {}
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
            if not is_locked or self._life.is_over:
                return None
            keeper = self._life.keeper or self._open_keeper()
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
            if not is_locked or self._life.is_over:
                return
            self._poll()
            self._record.end_generation()
            # On several nodes all have to agree on which states are complete.
            self._move(lambda life: life.between_generations(is_used=n_nodes == 1))
            current = KeeperGeneration(generation, n_nodes, excluded_step, roster)
            if not self._begin_keeper(current):
                self._begin_keeper(current)
            self._poll()

    def _begin_keeper(self, current: KeeperGeneration, *, is_replaced: bool = False) -> bool:
        """Prepare a keeper for this generation; return whether there is one.

        *is_replaced*: the workers run, and the previous keeper has died with its states.
        """
        life, follower, roster = self._life, self._follower, current.roster
        keeper, is_used = life.keeper or self._open_keeper(), life.is_used
        if keeper is None:
            return False
        client = keeper.client
        try:
            if is_replaced and keeper.adopted and keeper.pid == life.pid:
                # It was only slow, and still has its state.
                if follower is not None:
                    follower.reattach()
            else:
                client.begin_generation(current.number, current.n_nodes, current.excluded_step)
                if follower is not None and roster is not None and is_replaced:
                    is_used = follower.begin_replaced(client, roster, life.epoch)
                elif follower is not None and roster is not None:
                    is_used = follower.begin(client, roster)
                elif life.epoch is not None:
                    client.take_over(life.epoch)
        except KeeperError as exc:
            what = "letting another keeper take over" if is_replaced else "beginning a generation"
            self._lose_keeper(what, exc)
            return False
        self._move(lambda life: life.prepared(current, is_used=is_used))
        return True

    def refusal(self, pause: Callable[[float], object]) -> str | None:
        keeper = self._life.keeper
        return self._refusal(keeper.pid if keeper else None, pause)

    def poll(self) -> None:
        """Poll the keeper; one that does not answer is not waited for."""
        polling = threading.Thread(target=self._poll_locked, name="gpuops-poll", daemon=True)
        polling.start()
        polling.join(self._times.poll_s)

    def _poll_locked(self) -> None:
        with self._locked("polling the keeper", self._times.poll_s) as is_locked:
            if is_locked:
                self._poll()

    def run_once(self) -> None:
        """Poll the keeper; replace one that has died while workers run."""
        if self._follower is not None:
            self._follower.fetch()
        self._poll_locked()
        if self._life.must_restart(self._now_s()):
            with self._locked("starting another keeper", self._times.poll_s) as is_locked:
                now_s, life = self._now_s(), self._life
                if is_locked and life.generation is not None and life.must_restart(now_s):
                    self._move(lambda life: life.restarting(now_s))
                    self._begin_keeper(life.generation, is_replaced=True)

    def _now_s(self) -> float:
        return self._clock.mono_ns() / NS_PER_S

    def state(self) -> CheckpointState | None:
        return self._life.state

    def flush(self, within_s: float, *, is_end: bool = False) -> FinalFlush | None:
        """Persist the newest state; at the end of a run (*is_end*) a directory may be missing."""
        began_s, done = self._now_s(), None
        with self._locked("persisting the newest checkpoint", within_s) as is_locked:
            if is_locked:
                self._poll()
            done = FinalFlush(why="the keeper did not answer in time")
            keeper = self._life.keeper
            if keeper is None:
                done = FinalFlush()
            elif is_locked:
                # Also where no state is known yet: the only one may just be in the hashing.
                done = self._flushed(keeper.client, within_s - self._now_s() + began_s)
            known = [state for state in (done.newest, done.state) if state is not None]
            lost = self._life.lost
            if lost is not None and all(state < lost for state in known):
                why = "the keeper is gone, and the states in it"
                done = replace(done, newest=lost, fitted=False, why=why)
            elif not known and (is_locked or self._life.keeper is None):
                return None
            seconds = self._now_s() - began_s
            done = replace(done, seconds=seconds, within_s=within_s, is_end=is_end)
            if done.has_place or not is_end:
                self._record.flushed(done)
        return done

    def _flushed(self, client: KeeperClient, within_s: float) -> FinalFlush:
        end_s, commit = self._now_s() + within_s, self._final_commit
        if commit is not None and commit.follower.is_on:
            commit.follower.is_over = True
            done = commit.persist(within_s)
            if done is not None:
                return done
        newest = self._life.newest
        try:
            left_s = max(0.0, end_s - self._now_s())
            result = client.flush(left_s, self._record.waiting)
        except KeeperError as exc:
            self._lose_keeper("persisting the newest checkpoint", exc)
            return FinalFlush(newest=newest, why=str(exc))
        self._poll()
        state = result.state
        return FinalFlush(
            state=self._life.persisted if state is None else state,
            # A state that was sealed before may have been committed meanwhile.
            newest=newest if state is None else max(state, newest or state),
            fitted=state is not None,
            has_place=result.why != NO_DIRECTORY,
            directory=result.directory,
            why=result.why or None,
        )

    def settle(self, within_s: float) -> None:
        end_s, commit = self._now_s() + within_s, self._final_commit
        if commit is None or not commit.follower.is_on:
            return
        commit.follower.is_over = True
        with self._locked("persisting the newest checkpoint", within_s) as is_locked:
            # The ranks may have saved since the last poll.
            if is_locked and self._poll() and commit.follower.node_status() is not None:
                commit.persist(end_s - self._now_s())

    def end(self, save_s: float) -> None:
        self._stop_polling()
        if save_s > 0:
            self.flush(save_s, is_end=True)
        self._finish("ending the keeper", END_S, ends=True)

    def leave(self) -> None:
        self._stop_polling()
        self._finish("leaving the keeper", self._times.poll_s, ends=False)

    def _stop_polling(self) -> None:
        self._move(KeeperLifecycle.finishing)
        self._is_over.set()

    def _finish(self, what: str, within_s: float, *, ends: bool) -> None:
        """Release the keeper, or end it (*ends*); one that another call holds is only released."""
        with self._locked(what, within_s) as is_locked:
            if self._life.phase is KeeperPhase.ENDED:
                return
            if is_locked:
                self._poll()
                self._record.end_generation()
            keeper, has_ended = self._life.keeper, False
            self._move(KeeperLifecycle.ended)
            if is_locked and ends:
                has_ended = keeper is None or self._end_keeper(keeper)
            elif keeper is not None and not ends:
                keeper.client.close()
            self._release(has_ended)

    def _end_keeper(self, keeper: StartedKeeper) -> bool:
        try:
            keeper.client.shut_down()
        except KeeperError as exc:
            self._record.failed("ending the keeper of the checkpoints", exc)
            return False
        finally:
            keeper.client.close()
        return True

    def _run(self) -> None:
        with self._locked("starting the keeper", self._times.ready_s) as is_locked:
            if is_locked and self._life.keeper is None and not self._life.is_over:
                self._open_keeper()
        while not self._is_over.wait(self._wait_s()):
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

    def _move(self, step: Callable[[KeeperLifecycle], KeeperLifecycle]) -> KeeperLifecycle:
        """Make a *step* of the life-cycle; a run that ends does not wait for the lock for it."""
        with self._moving:
            self._life = step(self._life)
            return self._life

    def _open_keeper(self) -> StartedKeeper | None:
        """Start or adopt a keeper and return it, None where that failed."""
        try:
            keeper = self._start()
        except KeeperError as exc:
            self._record.failed("starting the keeper of the checkpoints", exc)
            return None
        self._move(lambda life: life.started(keeper))
        if self._poll():
            life = self._life
            self._record.keeper_started(keeper, life.newest, lost=life.died_with)
        return self._life.keeper

    def _poll(self) -> bool:
        """Poll the keeper; return whether there is one that answers."""
        before, follower, events = self._life, self._follower, list[KeeperEvent]()
        if before.keeper is None:
            return False
        client = before.keeper.client
        try:
            try:
                events = read_events(client.events())
                status = client.status()
                if follower is not None:
                    follower.update(client, status)
            finally:
                if events:  # also after an error: the keeper does not send them again
                    self._record.record_events(events)
        except KeeperError as exc:
            self._lose_keeper("polling the keeper of the checkpoints", exc)
            return False
        persisted = status.progress.persisted
        if follower is not None and follower.is_on:
            persisted = follower.agreed.persisted
        life = self._move(lambda life: life.polled(status, persisted, self._clock.mono_ns()))
        if life.newest is not None and life.newest != before.newest:
            is_new = life.first is None or life.newest > life.first
            self._record.newest(life.newest, is_new=is_new)
        return True

    def _lose_keeper(self, what: str, error: KeeperError) -> None:
        """Give the keeper up; `run_once` starts another one."""
        if self._life.keeper is not None:
            self._life.keeper.client.close()
        self._move(lambda life: life.died(self._now_s()))
        if self._follower is not None:
            self._follower.detach()
        self._record.failed(what, error)
