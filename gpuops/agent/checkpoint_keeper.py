"""The keeper of this node's checkpoints, as its agent has it: started or adopted, asked, ended.

It is started with the agent, beside the health gate, and not when a script first asks for it: it
is a Python process without torch that costs some 15 MB and a tenth of a second of one core, and
sleeps from then on. A start on demand would save that for scripts without a Checkpointer, and
would put a start that can fail, and the question who does it, into the middle of the training of
all others.

Nothing here stops a job: what fails is recorded, the workers save nothing until the next restart,
and then it is tried again. Every call is bounded in time. The agent's main thread, its control
thread and the thread in here call in.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpuops.agent.agent_state import CheckpointState
from gpuops.agent.checkpoint_news import KeeperEvent, pair, read_events, whole
from gpuops.checkpoint.states import KeeperError, StateId
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

KEEPER, DIRECTORY = "GPUOPS_KEEPER", "GPUOPS_CKPT_DIR"
OFF = ""  # a worker must not take one of somebody else's environment either
LOOK_WAIT_S = 1.0
END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """What a flush came to. ``state`` is what lies in ``directory`` now, None where nothing does.

    ``fitted``: the newest state that was committed is there; else ``why`` says what kept it.
    ``has_place`` False: no directory was ever named, by nobody.
    """

    state: StateId | None = None
    newest: StateId | None = None
    fitted: bool = False
    has_place: bool = True
    seconds: float = 0.0
    within_s: float = 0.0
    directory: str | None = None
    why: str | None = None


class KeeperTie(Protocol):
    """What an agent asks of its node's keeper; each call ends, with KeeperError at the latest."""

    def begin_generation(self, generation: int, n_nodes: int, excluded_step: int | None) -> None:
        """Say that new workers come, and which state they are not to load."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return counts by name; ``newest`` and ``persisted`` are ``[epoch, step]`` or None."""
        ...

    def events(self) -> Sequence[Mapping[str, Any]]:
        """Return what happened since the last call, oldest first; see `read_events`."""
        ...

    def flush(self, deadline_s: float) -> Flushed:
        """Persist the newest committed state within *deadline_s*; ``state`` is that, or None."""
        ...

    def end(self) -> None:
        """Have the keeper end, with all that it holds in memory."""
        ...

    def close(self) -> None:
        """Let go of it: it lives on for its lease. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A keeper that answers. ``adopted``: the one of an agent that was killed."""

    tie: KeeperTie
    socket: str
    pid: int | None = None
    adopted: bool = False


class KeeperRecord(Protocol):
    """Who writes down what a keeper tells; called by one thread at a time."""

    def began(self, started: Started, newest: StateId | None) -> None:
        """Hear that there is a keeper now, and what it holds."""
        ...

    def heard(self, events: Sequence[KeeperEvent]) -> None:
        """Hear what happened in it."""
        ...

    def newest(self, state: StateId, *, is_new: bool) -> None:
        """Hear of a newer state than before; *is_new*: this generation saved it."""
        ...

    def failed(self, what: str, error: Exception) -> None:
        """Hear that the keeper failed at *what*, or is gone."""
        ...

    def flushed(self, done: Flushed) -> None:
        """Hear what became of a flush."""
        ...

    def over(self) -> None:
        """Hear that a generation has ended: what was counted is told."""
        ...


class Checkpoints(Protocol):
    """What the other parts of an agent ask; none of it raises."""

    def env(self) -> Mapping[str, str]:
        """Return what the workers of the next generation find in their environment."""
        ...

    def begin(self, generation: int, n_nodes: int, excluded_step: int | None) -> None:
        """Prepare for the workers of a generation, which start next."""
        ...

    def look(self) -> None:
        """Take in what there is to hear; waits `LOOK_WAIT_S` at most."""
        ...

    def state(self) -> CheckpointState | None:
        """Return what is held, None where nothing is kept; from any thread, never waits."""
        ...

    def flush(self, within_s: float) -> Flushed | None:
        """Persist the newest state within *within_s*; None where there is nothing to persist."""
        ...

    def end(self, save_s: float) -> None:
        """End the keeper; what is newest is persisted before, within *save_s* (0: at once)."""
        ...

    def leave(self) -> None:
        """Let go of the keeper, which waits for the next agent of this job."""
        ...


class NoCheckpoints:
    """A run that keeps nothing in memory."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory

    def env(self) -> Mapping[str, str]:
        """Return that there is no keeper, and that none is to be started."""
        return {KEEPER: OFF, **_place(self._directory)}

    def begin(self, generation: int, n_nodes: int, excluded_step: int | None) -> None:
        """Do nothing."""

    def look(self) -> None:
        """Do nothing."""

    def state(self) -> CheckpointState | None:
        """Return that nothing is kept."""
        return None

    def flush(self, within_s: float) -> Flushed | None:  # noqa: ARG002 the protocol's
        """Return that there is nothing to persist."""
        return None

    def end(self, save_s: float) -> None:
        """Do nothing."""

    def leave(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Times:
    """How often the keeper is listened to, and how long workers wait for one that starts."""

    every_s: float = 1.0
    ready_s: float = 15.0


TIMES = Times()


class Keeping:
    """The keeper of this node and job.

    *start* starts or adopts it; it raises KeeperError within a time of its own. *release* is called
    once it has been ended (True) or let go of (False).
    """

    def __init__(
        self,
        start: Callable[[], Started],
        record: KeeperRecord,
        clock: Clock,
        *,
        directory: str | None = None,
        release: Callable[[bool], None] = lambda _ended: None,
        times: Times = TIMES,
    ) -> None:
        self._start = start
        self._record = record
        self._clock = clock
        self._directory = directory
        self._release = release
        self._times = times
        self._turn = threading.Lock()  # one call to the keeper at a time, and its news in order
        self._keeper: Started | None = None
        self._newest: StateId | None = None
        self._persisted: StateId | None = None
        self._at_begin: StateId | None = None
        self._state: CheckpointState | None = CheckpointState(is_alive=False)
        self._stopping = threading.Event()
        self._is_over = False
        self._is_alone = True
        self._thread = threading.Thread(target=self._run, name="gpuops-keeper", daemon=True)

    def open(self) -> "Keeping":
        """Begin to start the keeper and to listen to it, without waiting; return this."""
        self._thread.start()
        return self

    def env(self) -> Mapping[str, str]:
        """Return where the workers find the keeper; one that is not there is `OFF`."""
        keeper = self._keeper
        socket = OFF if keeper is None or not self._is_alone else keeper.socket
        return {KEEPER: socket, **_place(self._directory)}

    def begin(self, generation: int, n_nodes: int, excluded_step: int | None) -> None:
        """Prepare for the workers of a generation; one that died is replaced first."""
        with self._called("preparing the checkpoints", self._times.ready_s) as has_turn:
            if not has_turn or self._is_over:
                return
            self._look()
            self._record.over()
            # States of several nodes need all of them to agree on what is whole.
            self._is_alone = n_nodes == 1
            if not self._began(generation, n_nodes, excluded_step):
                self._began(generation, n_nodes, excluded_step)
            self._look()
            self._at_begin = self._newest

    def _began(self, generation: int, n_nodes: int, excluded_step: int | None) -> bool:
        """Say whether a keeper waits for this generation now."""
        keeper = self._keeper or self._opened()
        if keeper is None:
            return False
        try:
            keeper.tie.begin_generation(generation, n_nodes, excluded_step)
        except KeeperError as exc:
            self._lost("beginning a generation", exc)
            return False
        return True

    def look(self) -> None:
        """Take in what there is to hear."""
        with self._called("hearing the keeper", LOOK_WAIT_S) as has_turn:
            if has_turn:
                self._look()

    def state(self) -> CheckpointState | None:
        """Return what is held."""
        return self._state

    def flush(self, within_s: float) -> Flushed | None:
        """Persist the newest state within *within_s*."""
        return self._flush(within_s)

    def _flush(self, within_s: float, *, is_told: bool = True) -> Flushed | None:
        """Persist the newest state; not *is_told*: it is no news that there is no directory."""
        began_ns, done = self._clock.mono_ns(), None
        with self._called("persisting the newest checkpoint", within_s) as has_turn:
            if has_turn:
                self._look()
            if self._keeper is None or (has_turn and self._newest is None):
                return done
            done = Flushed(why="the keeper did not answer in time")
            if has_turn:
                done = self._flushed(within_s - self._seconds_since(began_ns))
            done = replace(done, seconds=self._seconds_since(began_ns), within_s=within_s)
            if is_told or done.has_place:
                self._record.flushed(done)
        return done

    def _flushed(self, within_s: float) -> Flushed:
        assert self._keeper is not None
        newest, tie = self._newest, self._keeper.tie
        try:
            done = tie.flush(max(0.0, within_s))
        except KeeperError as exc:
            self._lost("persisting the newest checkpoint", exc)
            return Flushed(newest=newest, why=str(exc))
        self._look()
        persisted = self._persisted if done.state is None else done.state
        # A state may have been committed meanwhile: what was sealed before is waited for.
        newest = newest if done.state is None else max(done.state, newest or done.state)
        return replace(done, state=persisted, newest=newest)

    def _seconds_since(self, then_ns: int) -> float:
        return (self._clock.mono_ns() - then_ns) / NS_PER_S

    def end(self, save_s: float) -> None:
        """End the keeper; what is newest is persisted before."""
        self._stopping.set()
        if save_s > 0:
            self._flush(save_s, is_told=False)
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

    def _ended(self, keeper: Started) -> bool:
        try:
            keeper.tie.end()
        except KeeperError as exc:
            self._record.failed("ending the keeper of the checkpoints", exc)
            return False
        finally:
            keeper.tie.close()
        return True

    def leave(self) -> None:
        """Let go of the keeper."""
        self._stopping.set()
        with self._called("leaving the keeper", LOOK_WAIT_S) as has_turn:
            if self._is_over:
                return
            self._is_over = True
            if has_turn:
                self._look()
                self._record.over()
            if self._keeper is not None:
                self._keeper.tie.close()
            self._release(False)

    def _run(self) -> None:
        with self._called("starting the keeper", self._times.ready_s) as has_turn:
            if has_turn and self._keeper is None and not self._is_over:
                self._opened()
        while not self._stopping.wait(self._times.every_s):
            self.look()

    @contextmanager
    def _called(self, what: str, within_s: float) -> Iterator[bool]:
        """Take the turn for the length of the block; the block hears whether it got it.

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

    def _opened(self) -> Started | None:
        """Return a keeper that was started or adopted just now, None where that failed."""
        try:
            self._keeper = self._start()
        except KeeperError as exc:
            self._record.failed("starting the keeper of the checkpoints", exc)
            return None
        self._newest = None
        self._look(is_first=True)
        if self._keeper is not None:
            self._at_begin = self._newest
            self._record.began(self._keeper, self._newest)
        return self._keeper

    def _look(self, *, is_first: bool = False) -> None:
        keeper = self._keeper
        if keeper is None:
            return
        try:
            events, stats = read_events(keeper.tie.events()), keeper.tie.stats()
        except KeeperError as exc:
            self._lost("hearing the keeper of the checkpoints", exc)
            return
        self._take_in(stats, is_first=is_first)
        if events:
            self._record.heard(events)

    def _take_in(self, stats: Mapping[str, Any], *, is_first: bool) -> None:
        newest, persisted = pair(stats.get("newest")), pair(stats.get("persisted"))
        before = self._state
        has_changed = newest is not None and newest != self._newest
        if newest is not None and (has_changed or is_first):
            is_new = not is_first and (self._at_begin is None or newest > self._at_begin)
            self._record.newest(newest, is_new=is_new)
        self._newest, self._persisted = newest, persisted
        known = newest or persisted
        is_same = before is not None and known == _named(before)
        skipped = stats.get("skipped")
        self._state = CheckpointState(
            step=None if known is None else known.step,
            epoch=None if known is None else known.epoch,
            since_ns=before.since_ns if before and is_same else _now(known, self._clock),
            tier=None if known is None else ("memory" if newest is not None else "persistent"),
            persisted_step=None if persisted is None else persisted.step,
            committed=whole(stats.get("committed")) or 0,
            skipped=_counts(skipped) if isinstance(skipped, Mapping) else {},
        )

    def _lost(self, what: str, error: KeeperError) -> None:
        """Give the keeper up; the next generation gets another."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.tie.close()
        if self._state is not None:
            before = self._state
            self._state = CheckpointState(
                persisted_step=before.persisted_step,
                committed=before.committed,
                skipped=before.skipped,
                is_alive=False,
            )
        self._newest = self._at_begin = None
        self._record.failed(what, error)


def _place(directory: str | None) -> dict[str, str]:
    return {} if directory is None else {DIRECTORY: directory}


def _named(state: CheckpointState) -> StateId | None:
    if state.step is None or state.epoch is None:
        return None
    return StateId(state.epoch, state.step)


def _now(known: StateId | None, clock: Clock) -> int | None:
    return None if known is None else clock.mono_ns()


def _counts(found: Mapping[Any, Any]) -> dict[str, int]:
    return {str(k)[:40]: n for k, v in list(found.items())[:16] if (n := whole(v)) is not None}
