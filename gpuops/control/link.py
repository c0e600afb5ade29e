"""The control threads of one agent: one beats and follows the record, one lets its leader act.

They are two, so that a leader whose questions are answered slowly still beats in time. A third,
smaller one only watches the time since the last round trip: an agent that is cut off cannot learn
that it was removed, so it ends its own workers before its peers count it dead. That thread waits
for nothing, so no slow answer delays it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from gpuops.control.board import (
    Board,
    BoardError,
    BoardForgotError,
    BoardUnreachableError,
    Entry,
)
from gpuops.control.keys import Keys
from gpuops.control.record import CONTROL, SLOW, ControlRecord, Member, Phase, RecordError, pack
from gpuops.control.view import View
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

HOLD_S = 1.0
HURRIED_HOLD_S = 0.1  # while a generation is being ended or formed, for those who may decide
RETRY_S = 0.25
SLOW_S, SLOW_BEATS = 1.0, 4  # a round trip that so many beats in a row exceed
WATCH_S = 0.25
AWAY_S = 3 * HOLD_S
# A leader that comes to no end must not look alive, or nobody takes its place: beyond this its
# agent beats no more. It is a dozen calls that each take as long as a call may.
LEAD_S_MAX = 60.0
SILENT_S = 5.0  # so long without an answer is worth a line in the history
END_S = 15.0
_HURRIED = frozenset({Phase.FORM, Phase.GATHER, Phase.DRAIN})
_OVER = frozenset({Phase.FORM, Phase.GATHER, Phase.STOP})  # for the workers that run


class Leads(Protocol):
    """What an agent does for all, if it is the one to do it. Called in a thread of its own."""

    def tick(self, view: View) -> None:
        """Look at the board and write what follows; raises what the board raises."""
        ...

    @property
    def is_near(self) -> bool:
        """Say whether this agent leads, or may soon have to."""
        ...


class Link:
    """One agent's tie to the others of its run.

    ``on_fence`` ends the workers; it is called in a thread of its own when the tie is lost for
    *fence_s*, or when workers live *end_s* after their generation (``training`` says which lives).
    None: never (a board in this process is never far). ``on_silence`` and ``on_answer``
    hear of a board that does not answer and answers again. ``on_record`` hears each change of the
    record, in whichever thread learns of it, ``on_peers`` all heartbeats for as long as
    ``wants_peers`` says so. ``progress`` tells peers of this
    agent's workers; it is called with every beat and must not block. ``is_slow`` says that its
    last beats were all answered late.
    """

    def __init__(
        self,
        board: Board,
        me: Member,
        view: View,
        clock: Clock,
        *,
        fence_s: float | None,
        end_s: float = END_S,
    ) -> None:
        self.board = board
        self.me = me
        self.keys = Keys(run_id=view.record.run_id)
        self.leads: Leads | None = None
        self.progress: Callable[[], Json] = dict
        self.on_fence: Callable[[float], None] = _nothing
        self.training: Callable[[], int | None] = _nowhere
        self.on_record: Callable[[ControlRecord], None] = _nothing
        self.on_silence: Callable[[float], None] = _nothing
        self.on_answer: Callable[[float], None] = _nothing
        self.wants_peers: Callable[[], bool] = _no
        self.on_peers: Callable[[Mapping[str, Entry]], None] = _nothing
        self.is_fenced = False
        self.round_trip_s = 0.0
        self._clock = clock
        self._fence_s = fence_s
        self._end_s = end_s
        self._left_ns: int | None = None
        self._view = view
        self._last_ns = self._heard_ns = clock.mono_ns()
        self._in_vain_ns: int | None = None
        self._round_trips_s: deque[float] = deque(maxlen=SLOW_BEATS)
        self._was_away = False
        self._is_near = False
        self._leading_ns: int | None = None
        self._beaten = threading.Event()
        self._changed = threading.Condition()
        self._telling = threading.Lock()
        self._stopping = threading.Event()
        self._number = 0
        self._is_mute = False
        self._silent_since_s: float | None = None
        self._is_refused = False
        self._lost: BoardForgotError | None = None
        self._threads = [
            threading.Thread(target=act, args=args, name=name, daemon=True)
            for act, args, name in (
                (self._go_on, (self._beat_in_time,), "gpuops-control"),
                (self._go_on, (self._lead_after_a_beat,), "gpuops-lead"),
                (self._watch, (), "gpuops-fence"),
            )
        ]

    def start(self) -> None:
        """Begin to beat."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Beat no more. The board stays open; a call that waits for it ends by itself."""
        self._stopping.set()
        self._beaten.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2 * HOLD_S)

    @property
    def view(self) -> View:
        """Return what is known now."""
        with self._changed:
            return self._view

    @property
    def record(self) -> ControlRecord:
        """Return the record as it is known now."""
        return self.view.record

    @property
    def now_s(self) -> float:
        """Return the board's time."""
        return self.view.now_s(self._clock.mono_ns())

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last round trip."""
        return (self._clock.mono_ns() - self._last_ns) / NS_PER_S

    @property
    def unheard_s(self) -> float:
        """Return for how long peers may have heard nothing of this agent.

        It counts from the beginning of the last beat that was answered: that is what they saw,
        however late the answer came.
        """
        return (self._clock.mono_ns() - self._heard_ns) / NS_PER_S

    @property
    def is_slow(self) -> bool:
        """Say whether the board takes its time to answer this agent, for several beats now."""
        trips_s = self._round_trips_s
        return len(trips_s) == SLOW_BEATS and min(trips_s) >= SLOW_S

    @property
    def lost_s(self) -> float:
        """Return for how long the board has been asked in vain, 0 where it has not.

        A host that was frozen did not ask: what it finds when it thaws is what counts.
        """
        since_ns = self._in_vain_ns
        return 0.0 if since_ns is None else (self._clock.mono_ns() - since_ns) / NS_PER_S

    @property
    def lost(self) -> BoardForgotError | None:
        """Return what shows that the record of this run is gone for good, None where it is not."""
        return self._lost

    def wait(self, until: Callable[[ControlRecord], bool], timeout_s: float) -> bool:
        """Wait until the record is as *until* wants it; say whether it was within *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: until(self._view.record), timeout_s)

    def rejoin(self) -> bool:
        """Forget the fence once peers hear of this agent again; say whether they do.

        For an agent without workers.
        """
        if self._fence_s is not None and self.unheard_s >= self._fence_s:
            return False
        self.is_fenced = False
        return True

    def propose(self, change: Callable[[ControlRecord], ControlRecord | None]) -> bool:
        """Change the record by compare-and-swap; say whether our change was the one.

        *change* gets the newest record each time and returns None where nothing is to be done any
        more, because somebody else was first.

        Raises:
            BoardError: See `Board`.
        """
        while True:
            entry = self.board.get(CONTROL)
            record = self._follow(entry)
            wanted = change(record)
            if wanted is None:
                return False
            since_s = self.now_s if wanted.phase is not record.phase else wanted.since_s
            wanted = replace(wanted, since_s=since_s)
            done, entry = self.board.swap(CONTROL, wanted.to_bytes(), version=entry.version)
            self._follow(entry)
            if done:
                return True

    def nudge(self) -> None:
        """Wake every agent's control thread: write the record as it is.

        Raises:
            BoardError: See `Board`.
        """
        self.propose(lambda now: now)

    def report(self, report: NodeReport) -> None:
        """File *report*, the last word of this agent on a generation.

        Raises:
            BoardError: See `Board`.
        """
        key = self.keys.report(report.generation, self.me.agent)
        self.board.put(key, pack(report.to_json()))

    def report_for(self, agent: str, report: NodeReport) -> None:
        """File *report* on behalf of *agent*, which is silent; what it said itself stands.

        Raises:
            BoardError: See `Board`.
        """
        key = self.keys.report(report.generation, agent)
        self.board.swap(key, pack(report.to_json()), version=0)

    def _go_on(self, act: Callable[[], None]) -> None:
        while not self._stopping.is_set() and self._lost is None:
            try:
                act()
            except BoardUnreachableError as exc:
                log.debug("the board does not answer: %s", exc)
                self._stopping.wait(RETRY_S)
            except BoardForgotError as exc:
                self._lost = exc
                log.warning("%s", exc)
            except BoardError as exc:
                if not self._is_refused:
                    log.warning("the board of this run refuses this agent: %s", exc)
                self._is_refused = True
                self._stopping.wait(RETRY_S)
            except Exception:  # boundary: a mistake of ours must not end the heartbeat
                log.exception("a control thread failed and goes on")
                self._stopping.wait(RETRY_S)
        self._beaten.set()  # whoever waits for a beat is to see that there is none any more

    def _beat_in_time(self) -> None:
        since_ns = self._leading_ns
        if since_ns is not None and self._clock.mono_ns() - since_ns >= LEAD_S_MAX * NS_PER_S:
            self._stopping.wait(RETRY_S)
            return
        is_hurried = self._is_near and self.record.phase in _HURRIED
        self.beat(HURRIED_HOLD_S if is_hurried else HOLD_S)
        self._beaten.set()

    def _lead_after_a_beat(self) -> None:
        self._beaten.wait()
        self._beaten.clear()
        if not self._stopping.is_set():
            self.lead()

    def turn(self, hold_s: float) -> None:
        """Beat once, and do what is this agent's to do for all; for who has but one thread.

        Raises:
            BoardError: Nothing was done, or not all of it.
        """
        self.beat(hold_s)
        self.lead()

    def beat(self, hold_s: float) -> None:
        """Say that this agent lives, and follow the record.

        Raises:
            BoardError: Nobody heard of it, or nobody answers.
        """
        # A board that takes its time for each answer is not away, and asking it more is no help.
        was_away = self.silent_s > AWAY_S + 4 * self.round_trip_s
        try:
            self._beat(hold_s)
        except BoardError:
            if self._in_vain_ns is None:
                self._in_vain_ns = self._clock.mono_ns()
            raise
        self._was_away = self._was_away or was_away

    def lead(self) -> None:
        """Do what is this agent's to do for all.

        Raises:
            BoardError: Nothing was done, or not all of it.
        """
        self._leading_ns = self._clock.mono_ns()
        try:
            if self._was_away:
                # The run may have ended meanwhile and been cleaned up: no beat would ever say so.
                self._follow(self.board.get(CONTROL))
                self._was_away = False
            if self.wants_peers():
                self.on_peers(self.board.list(self.keys.alive()))
            if self.leads is not None:
                self.leads.tick(self.view)
        finally:
            self._leading_ns = None
            self._is_near = self.leads is not None and self.leads.is_near

    def _beat(self, hold_s: float) -> None:
        self.check_fence()  # a beat now would hide that peers may have gone on without us
        view = self.view
        self._number += 1
        began_ns = self._clock.mono_ns()
        beaten = self.board.beat(
            self.keys.alive(self.me.agent),
            pack({"seq": self._number, **({SLOW: True} if self.is_slow else {}), **self._told()}),
            watch=CONTROL,
            seen=view.version,
            hold_s=hold_s,
        )
        now_ns = self._clock.mono_ns()
        self._last_ns, self._heard_ns, self._in_vain_ns = now_ns, began_ns, None
        self._is_refused = False
        self.round_trip_s = max(0.0, (now_ns - began_ns) / NS_PER_S - hold_s)
        if beaten.watched is None:  # else it was not held, nobody knows for how long
            self._round_trips_s.append(self.round_trip_s)
        with self._changed:
            self._view = replace(self._view, board_s=beaten.board_s, seen_ns=now_ns)
        if beaten.watched is not None:
            self._follow(beaten.watched)

    def _told(self) -> Json:
        """Return what goes with a heartbeat; our bug there must not silence this agent."""
        try:
            return self.progress()
        except Exception as exc:  # noqa: BLE001 boundary: see above
            if not self._is_mute:
                self._is_mute = True
                log.warning("the progress of this node cannot be told: %r", exc)
            return {}

    def _follow(self, entry: Entry) -> ControlRecord:
        """Return the record in *entry*, which is the one to follow if it is newer."""
        record = self._ours(entry)
        with self._telling:  # two threads learn of records; `on_record` hears them in order
            with self._changed:
                if entry.version <= self._view.version:
                    return record
                self._view = replace(self._view, record=record, version=entry.version)
                self._changed.notify_all()
            self.on_record(record)
        return record

    def _ours(self, entry: Entry) -> ControlRecord:
        """Return the record in *entry*.

        Raises:
            BoardForgotError: It is gone, or another run's that came after ours.
            BoardError: It is none.
        """
        if entry.version:
            try:
                record = ControlRecord.from_bytes(entry.value)
            except RecordError as exc:
                raise BoardError(
                    f"the board does not hold a record of this version: {exc}"
                ) from exc
            if record.run_id == self.keys.run_id:
                return record
        why = "holds the record of another run" if entry.version else "has no record"
        self._lost = BoardForgotError(f"the board {why}: this one is over, or was cleaned up")
        raise self._lost

    def _watch(self) -> None:
        looks = (self.check_fence, self.check_overdue, self._note_silence)
        while self._fence_s is not None and not self._stopping.wait(WATCH_S):
            for look in looks:
                self._safely(look)

    def _safely(self, look: Callable[[], None]) -> None:
        """Do *look*; a mistake of ours must not leave the workers without their fence."""
        try:
            look()
        except Exception:  # boundary: see above
            log.exception("a watch over the workers failed and goes on")

    def _note_silence(self) -> None:
        silent_s = self.silent_s
        if self._silent_since_s is None and silent_s >= SILENT_S:
            self._silent_since_s = silent_s
            self.on_silence(silent_s)
        elif self._silent_since_s is not None and silent_s < SILENT_S:
            self.on_answer(self._silent_since_s)
            self._silent_since_s = None
        elif self._silent_since_s is not None:
            self._silent_since_s = silent_s

    def check_fence(self) -> None:
        """End this agent's workers if it has been without the board for too long."""
        unheard_s = self.unheard_s
        if self._fence_s is None or self.is_fenced or unheard_s < self._fence_s:
            return
        self.is_fenced = True
        self.on_fence(unheard_s)
        with self._changed:
            self._changed.notify_all()

    def check_overdue(self) -> None:
        """End workers whose generation was over so long ago that others wait no more.

        Whoever should have ended them hangs, in a file system that does not answer for example.
        """
        record, generation = self.record, self.training()
        is_over = record.phase in _OVER or record.generation > (generation or 0)
        if generation is None or not is_over:
            self._left_ns = None
            return
        now_ns = self._clock.mono_ns()
        if self._left_ns is None:
            self._left_ns = now_ns
        if now_ns - self._left_ns >= self._end_s * NS_PER_S:
            self.on_fence(0.0)


def _nothing(_news: object) -> None:
    return


def _nowhere() -> int | None:
    return None


def _no() -> bool:
    return False
