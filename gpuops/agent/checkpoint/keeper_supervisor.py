"""The keeper of this node's checkpoints, seen from its agent: started or adopted, polled, ended.

It is started with the agent, beside the health gate: a start on demand would put one that can fail
into the middle of a training, and costs as much, some 15 MB and a tenth of a second of one core.

Nothing here stops a job: what fails is recorded. A keeper that dies under running workers is soon
followed by another. Calls are bounded in time. The agent's main and control thread call in.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from gpuops.agent.checkpoint.api import (
    KEEPER,
    OFF,
    CheckpointService,
    FinalFlush,
    Refusal,
    StartedKeeper,
    place_of,
)
from gpuops.agent.checkpoint.final_commit import FinalCommit
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.keeper_events import KeeperEvent, held_by_it, held_by_none, read_events
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

LOOK_WAIT_S = 0.8
END_S = 5.0


@dataclass(frozen=True, slots=True)
class KeeperTimeouts:
    """How often the keeper is listened to, and how long workers wait for one that starts."""

    every_s: float = 1.0
    ready_s: float = 30.0  # more than it takes to end one that hangs and to start another
    hurried_s: float = 0.2  # while a rank waits for what all agree on


TIMES = KeeperTimeouts()


class KeeperSupervisor(CheckpointService):
    """The keeper of this node and job.

    *start* starts or adopts it; it raises KeeperError within a time of its own. *release* is called
    once it has been ended (True) or let go of (False). *refusal*: see `CheckpointService`, of a
    keeper's pid. *agreement*: with the other nodes of the run, if any. *pause* waits so many
    seconds.
    """

    def __init__(  # noqa: PLR0913 what it is made of, and its times
        self,
        start: Callable[[], StartedKeeper],
        record: CheckpointRecord,
        clock: Clock,
        *,
        directory: str | None = None,
        release: Callable[[bool], None] = lambda _ended: None,
        refusal: Refusal = lambda _keeper_pid, _pause: None,
        times: KeeperTimeouts = TIMES,
        agreement: CommitFollower | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(directory)
        self._start = start
        self._record = record
        self._clock = clock
        self._release = release
        self._refusal = refusal
        self._times = times
        self._agreement = agreement
        self._together = None
        if agreement is not None:
            wait = pause or threading.Event().wait
            self._together = FinalCommit(
                agreement, self._is_there, lambda: self._newest, wait, clock
            )
        self._turn = threading.Lock()  # one call to the keeper at a time, and its news in order
        self._keeper: StartedKeeper | None = None
        self._newest: StateId | None = None
        self._persisted: StateId | None = None
        self._at_begin: StateId | None = None
        self._begun: KeeperGeneration | None = None
        self._restarts = KeeperRestarts()
        self._state: CheckpointState | None = CheckpointState(is_alive=False)
        self._stopping = threading.Event()
        self._is_over = False
        self._is_shared = True  # by all who are to save
        self._looks = PollRequest()
        self._thread = threading.Thread(target=self._run, name="gpuops-keeper", daemon=True)

    def open(self) -> "KeeperSupervisor":
        """Begin to start the keeper and to listen to it, without waiting; return this."""
        self._thread.start()
        return self

    def env(self) -> Mapping[str, str]:
        """Return where the workers find the keeper; one that is not there is `OFF`."""
        keeper = self._keeper
        socket = OFF if keeper is None or not self._is_shared else keeper.socket
        return {KEEPER: socket, **place_of(self._directory)}

    def said(self) -> Json | None:
        return None if self._agreement is None else self._agreement.said()

    def holding(self) -> Json | None:
        agreement, found = self._agreement, None
        if agreement is None:
            return None
        with self._called("telling what is held in memory", self._times.ready_s) as has_turn:
            keeper = (self._keeper or self._opened()) if has_turn and not self._is_over else None
            if keeper is not None:
                try:
                    found = agreement.holding(keeper.client)
                except KeeperError as exc:
                    self._lost("telling what is held in memory", exc)
        return found

    def begin(
        self,
        generation: int,
        n_nodes: int,
        excluded_step: int | None,
        roster: Roster | None = None,
    ) -> None:
        """Prepare for the workers of a generation; one that died is replaced first."""
        with self._called("preparing the checkpoints", self._times.ready_s) as has_turn:
            if not has_turn or self._is_over:
                return
            self._begun = None
            self._look()
            self._record.over()
            # States of several nodes need all of them to agree on what is whole.
            self._is_shared = n_nodes == 1
            begun = KeeperGeneration(generation, n_nodes, excluded_step, roster)
            if not self._began(begun):
                self._began(begun)
            self._look()
            self._at_begin = self._newest

    def _began(self, begun: KeeperGeneration, *, is_again: bool = False) -> bool:
        """Say whether a keeper serves this generation now.

        *is_again*: its workers run, and the keeper before has died; what that held is gone.
        """
        keeper = self._keeper or self._opened(lost=begun.newest)
        if keeper is None:
            return False
        client, agreement, roster = keeper.client, self._agreement, begun.roster
        try:
            if is_again and keeper.adopted and keeper.pid == begun.pid:
                # It was only slow, and knows it all.
                if agreement is not None:
                    agreement.found_again()
            else:
                client.begin_generation(begun.generation, begun.n_nodes, begun.excluded_step)
                if agreement is not None and roster is not None and is_again:
                    self._is_shared = agreement.begin_again(client, roster, begun.epoch)
                elif agreement is not None and roster is not None:
                    self._is_shared = agreement.begin(client, roster)
                elif begun.epoch is not None:
                    client.take_over(begun.epoch)
        except KeeperError as exc:
            what = "letting another keeper take over" if is_again else "beginning a generation"
            self._lost(what, exc)
            return False
        self._begun = replace(begun, pid=keeper.pid, newest=None, lost_s=None)
        return True

    def refusal(self, pause: Callable[[float], object]) -> str | None:
        return self._refusal(self._keeper.pid if self._keeper else None, pause)

    def look(self) -> None:
        """Take in what there is to hear; a keeper that does not answer is not waited for."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            self._hear()
        else:
            self._looks.ask(LOOK_WAIT_S)

    def _hear(self) -> None:
        with self._called("hearing the keeper", LOOK_WAIT_S) as has_turn:
            if has_turn:
                self._look()

    def tend(self) -> None:
        """Hear the keeper; where it has died under running workers, start another one."""
        number = self._looks.begin()
        if self._agreement is not None:
            self._agreement.fetch()
        self._hear()
        self._looks.end(number)
        if self._is_due_again():
            with self._called("starting another keeper", LOOK_WAIT_S) as has_turn:
                if has_turn and self._begun is not None and self._is_due_again():
                    self._restarts.tried(self._now_s())
                    self._began(self._begun, is_again=True)

    def _is_due_again(self) -> bool:
        begun = self._begun
        if self._keeper is not None or begun is None or begun.lost_s is None or self._is_over:
            return False
        return self._is_shared and self._restarts.is_due(self._now_s(), begun.lost_s)

    def _now_s(self) -> float:
        return self._clock.mono_ns() / NS_PER_S

    def state(self) -> CheckpointState | None:
        return self._state

    def flush(self, within_s: float, *, is_end: bool = False) -> FinalFlush | None:
        """Persist the newest state; at the end of a run (*is_end*) a directory may be missing."""
        began_ns, before, done = self._clock.mono_ns(), self._newest, None
        with self._called("persisting the newest checkpoint", within_s) as has_turn:
            if has_turn:
                self._look()
            if self._keeper is None and before is None:
                return None
            done = FinalFlush(why="the keeper did not answer in time")
            if self._keeper is None:
                done = FinalFlush(newest=before, why="the keeper is gone, and what it held")
            elif has_turn:
                # Also where no state is known yet: the last, or only, one may be hashed just now.
                done = self._flushed(within_s - self._seconds_since(began_ns))
                if done.newest is None and done.state is None:
                    return None
            seconds = self._seconds_since(began_ns)
            done = replace(done, seconds=seconds, within_s=within_s, is_end=is_end)
            if done.has_place or not is_end:
                self._record.flushed(done)
        return done

    def _flushed(self, within_s: float) -> FinalFlush:
        assert self._keeper is not None
        client, began_ns = self._keeper.client, self._clock.mono_ns()
        if self._together is not None and self._together.agreement.is_on:
            done = self._together.persist(within_s)
            if done is not None:
                return done
            within_s -= self._seconds_since(began_ns)
        newest = self._newest
        try:
            result = client.flush(max(0.0, within_s))
        except KeeperError as exc:
            self._lost("persisting the newest checkpoint", exc)
            return FinalFlush(newest=newest, why=str(exc))
        self._look()
        state = result.state
        return FinalFlush(
            state=self._persisted if state is None else state,
            # A state may have been committed meanwhile: what was sealed before is waited for.
            newest=newest if state is None else max(state, newest or state),
            fitted=state is not None,
            has_place=result.why != NO_DIRECTORY,
            directory=result.directory,
            why=result.why or None,
        )

    def settle(self, within_s: float) -> None:
        agreement, began_ns = self._agreement, self._clock.mono_ns()
        if agreement is None or self._together is None or not agreement.is_on:
            return
        agreement.is_over = True
        with self._called("persisting the newest checkpoint", within_s) as has_turn:
            if has_turn and self._keeper is not None:
                self._look()  # what the ranks did last
                if agreement.said() is not None:
                    self._together.persist(within_s - self._seconds_since(began_ns))

    def _seconds_since(self, then_ns: int) -> float:
        return (self._clock.mono_ns() - then_ns) / NS_PER_S

    def end(self, save_s: float) -> None:
        self._stopping.set()
        self._looks.wake()
        if save_s > 0:
            self.flush(save_s, is_end=True)
        with self._called("ending the keeper", END_S) as has_turn:
            if self._is_over:
                return
            self._is_over = True
            if not has_turn:
                self._release(False)
                return
            self._look()
            self._record.over()
            ended = self._keeper is None or self._ended(self._keeper)
            self._keeper = None
            self._release(ended)

    def _ended(self, keeper: StartedKeeper) -> bool:
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
        self._looks.wake()
        with self._called("leaving the keeper", LOOK_WAIT_S) as has_turn:
            if self._is_over:
                return
            self._is_over = True
            if has_turn:
                self._look()
                self._record.over()
            if self._keeper is not None:
                self._keeper.client.close()
            self._release(False)

    def _run(self) -> None:
        with self._called("starting the keeper", self._times.ready_s) as has_turn:
            if has_turn and self._keeper is None and not self._is_over:
                self._opened()
        while not self._stopping.is_set():
            self._looks.wait(self._wait_s())
            if not self._stopping.is_set():
                self.tend()

    def _wait_s(self) -> float:
        is_waiting = self._agreement is not None and self._agreement.is_waiting
        return self._times.hurried_s if is_waiting else self._times.every_s

    @contextmanager
    def _called(self, what: str, within_s: float) -> Iterator[bool]:
        """Take the turn for the length of the block; the block gets whether it has it.

        A mistake in here is recorded, and no more.
        """
        has_turn = self._turn.acquire(timeout=max(0.0, within_s))
        try:
            yield has_turn
        except Exception as exc:  # boundary: our bug must not stop the training
            log.warning("%s failed", what, exc_info=True)
            with suppress(Exception):
                self._record.failed(what, exc)
        finally:
            if has_turn:
                self._turn.release()

    def _opened(self, lost: StateId | None = None) -> StartedKeeper | None:
        """Return a keeper that was started or adopted just now, None where that failed.

        *lost*: the newest state that one before it held.
        """
        try:
            self._keeper = self._start()
        except KeeperError as exc:
            self._record.failed("starting the keeper of the checkpoints", exc)
            return None
        self._newest = None
        self._look(is_first=True)
        if self._keeper is not None:
            self._at_begin = self._newest
            self._record.began(self._keeper, self._newest, lost=lost)
        return self._keeper

    def _is_there(self) -> bool:
        """Take in how far the keeper is; say whether it is there."""
        self._look()
        return self._keeper is not None

    def _look(self, *, is_first: bool = False) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        events: list[KeeperEvent] = []
        try:
            try:
                events = read_events(keeper.client.events())
                status = keeper.client.status()
                if self._agreement is not None:
                    self._agreement.look(keeper.client, status)
            finally:
                if events:  # whatever came after: they are not recorded twice
                    self._record.heard(events)
        except KeeperError as exc:
            self._lost("hearing the keeper of the checkpoints", exc)
            return
        self._take_in(status, is_first=is_first)

    def _take_in(self, status: KeeperStatus, *, is_first: bool) -> None:
        newest, persisted = status.progress.newest, status.progress.persisted
        if self._agreement is not None and self._agreement.is_on:
            persisted = self._agreement.persisted
        has_changed = newest is not None and newest != self._newest
        if newest is not None and (has_changed or is_first):
            is_new = not is_first and (self._at_begin is None or newest > self._at_begin)
            self._record.newest(newest, is_new=is_new)
        self._newest, self._persisted = newest, persisted
        if self._begun is not None and newest is not None:
            saved = newest.epoch if status.epoch == newest.epoch else self._begun.epoch
            self._begun = replace(self._begun, epoch=saved, newest=newest)
        now_ns, used = self._clock.mono_ns(), self._is_shared
        self._state = held_by_it(self._state, status, persisted, now_ns, is_used=used)

    def _lost(self, what: str, error: KeeperError) -> None:
        """Give the keeper up; another one takes its place."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.client.close()
        if self._begun is not None and self._begun.lost_s is None:
            self._begun = replace(self._begun, lost_s=self._now_s())
        if self._agreement is not None:
            self._agreement.lost()
        self._state = held_by_none(self._state)
        self._newest = self._at_begin = None
        self._record.failed(what, error)
