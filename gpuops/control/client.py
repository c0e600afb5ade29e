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

from gpuops.control.keys import ControlKeys
from gpuops.control.own_record import read_own_record
from gpuops.control.record import (
    RECORD_KEY,
    SLOW_FLAG,
    ControlRecord,
    Member,
    RecordView,
    RunPhase,
    pack,
)
from gpuops.control.store import (
    ControlStore,
    ControlStoreError,
    ControlStoreResetError,
    ControlStoreUnreachableError,
    Entry,
)
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

HOLD_S = 1.0
FAST_HOLD_S = 0.1  # while a generation is being ended or formed, for those who may decide
RETRY_S = 0.25
SLOW_S, SLOW_HEARTBEATS = 1.0, 4  # a round trip that so many beats in a row exceed
WATCH_S = 0.25
UNREACHABLE_S = 3 * HOLD_S
# A leader that comes to no end must not look alive, or nobody takes its place: beyond this its
# agent beats no more. It is a dozen calls that each take as long as a call may.
COORDINATE_S_MAX = 60.0
SILENT_S = 5.0  # so long without an answer is worth a line in the history
END_TIMEOUT_S = 15.0
_FAST_PHASES = frozenset({RunPhase.RENDEZVOUS, RunPhase.COLLECT, RunPhase.DRAIN})
# For the workers that run.
_ENDED_PHASES = frozenset({RunPhase.RENDEZVOUS, RunPhase.COLLECT, RunPhase.STOP})


class Coordinator(Protocol):
    """What an agent does for all, if it is the one to do it. Called in a thread of its own."""

    def tick(self, view: RecordView) -> None:
        """Look at the board and write what follows; raises what the board raises."""
        ...

    @property
    def is_candidate(self) -> bool:
        """Say whether this agent leads, or may soon have to."""
        ...


class ControlClient:
    """One agent's tie to the others of its run.

    ``on_fence`` ends the workers; it is called in a thread of its own when the tie is lost for
    *fence_timeout_s*, or when workers live *end_timeout_s* after their generation
    (``running_generation`` says which lives). None: never (a board in this process is never far).
    ``on_store_silent`` and ``on_store_back`` hear of a board that does not answer and answers
    again. ``on_record_change`` hears each change of the record, in whichever thread learns of it,
    ``on_heartbeats`` all heartbeats for as long as ``wants_heartbeats`` says so.
    ``heartbeat_payload`` tells peers of this agent's workers; it is called with every beat and must
    not block. ``is_slow`` says that its last beats were all answered late.
    """

    def __init__(
        self,
        store: ControlStore,
        me: Member,
        view: RecordView,
        clock: Clock,
        *,
        fence_timeout_s: float | None,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self.store = store
        self.me = me
        self.keys = ControlKeys(run_id=view.record.run_id)
        self.coordinator: Coordinator | None = None
        self.heartbeat_payload: Callable[[], Json] = dict
        self.on_fence: Callable[[float], None] = _ignore
        self.running_generation: Callable[[], int | None] = _no_generation
        self.on_record_change: Callable[[ControlRecord], None] = _ignore
        self.on_store_silent: Callable[[float], None] = _ignore
        self.on_store_back: Callable[[float], None] = _ignore
        self.wants_heartbeats: Callable[[], bool] = _never
        self.on_heartbeats: Callable[[Mapping[str, Entry]], None] = _ignore
        self.is_fenced = False
        self.round_trip_s = 0.0
        self._clock = clock
        self._fence_timeout_s = fence_timeout_s
        self._end_timeout_s = end_timeout_s
        self._ended_since_ns: int | None = None
        self._view = view
        self._last_reply_ns = self._heartbeat_sent_ns = clock.mono_ns()
        self._unanswered_since_ns: int | None = None
        self._round_trips_s: deque[float] = deque(maxlen=SLOW_HEARTBEATS)
        self._was_unreachable = False
        self._is_candidate = False
        self._coordinating_since_ns: int | None = None
        self._heartbeat_done = threading.Event()
        self._changed = threading.Condition()
        self._record_lock = threading.Lock()
        self._stopping = threading.Event()
        self._number = 0
        self._payload_failed = False
        self._silence_s: float | None = None
        self._is_refused = False
        self._reset_error: ControlStoreResetError | None = None
        self._threads = [
            threading.Thread(target=target, args=args, name=name, daemon=True)
            for target, args, name in (
                (self._retry_forever, (self._heartbeat_unless_stuck,), "gpuops-control"),
                (self._retry_forever, (self._coordinate_after_heartbeat,), "gpuops-lead"),
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
        self._heartbeat_done.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2 * HOLD_S)

    @property
    def view(self) -> RecordView:
        """Return what is known now."""
        with self._changed:
            return self._view

    @property
    def record(self) -> ControlRecord:
        """Return the record as it is known now."""
        return self.view.record

    @property
    def store_now_s(self) -> float:
        """Return the board's time."""
        return self.view.store_now_s(self._clock.mono_ns())

    @property
    def since_reply_s(self) -> float:
        """Return the seconds since the last round trip."""
        return (self._clock.mono_ns() - self._last_reply_ns) / NS_PER_S

    @property
    def since_heartbeat_s(self) -> float:
        """Return for how long peers may have heard nothing of this agent.

        It counts from the beginning of the last beat that was answered: that is what they saw,
        however late the answer came.
        """
        return (self._clock.mono_ns() - self._heartbeat_sent_ns) / NS_PER_S

    @property
    def is_slow(self) -> bool:
        """Say whether the board takes its time to answer this agent, for several beats now."""
        trips_s = self._round_trips_s
        return len(trips_s) == SLOW_HEARTBEATS and min(trips_s) >= SLOW_S

    @property
    def unreachable_s(self) -> float:
        """Return for how long the board has been asked in vain, 0 where it has not.

        A host that was frozen did not ask: what it finds when it thaws is what counts.
        """
        since_ns = self._unanswered_since_ns
        return 0.0 if since_ns is None else (self._clock.mono_ns() - since_ns) / NS_PER_S

    @property
    def reset_error(self) -> ControlStoreResetError | None:
        """Return what shows that the record of this run is gone for good, None where it is not."""
        return self._reset_error

    def wait_until(self, predicate: Callable[[ControlRecord], bool], timeout_s: float) -> bool:
        """Wait until the record is as *predicate* wants it; say whether it was in *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._view.record), timeout_s)

    def clear_fence(self) -> bool:
        """Forget the fence once peers hear of this agent again; say whether they do.

        For an agent without workers.
        """
        if self._fence_timeout_s is not None and self.since_heartbeat_s >= self._fence_timeout_s:
            return False
        self.is_fenced = False
        return True

    def update_record(self, change: Callable[[ControlRecord], ControlRecord | None]) -> bool:
        """Change the record by compare-and-swap; say whether our change was the one.

        *change* gets the newest record each time and returns None where nothing is to be done any
        more, because somebody else was first.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        while True:
            entry = self.store.get(RECORD_KEY)
            record = self._accept(entry)
            updated = change(record)
            if updated is None:
                return False
            since_s = self.store_now_s if updated.phase is not record.phase else updated.since_s
            updated = replace(updated, since_s=since_s)
            done, entry = self.store.compare_and_set(
                RECORD_KEY, updated.to_bytes(), version=entry.version
            )
            self._accept(entry)
            if done:
                return True

    def touch_record(self) -> None:
        """Wake every agent's control thread: write the record as it is.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        self.update_record(lambda now: now)

    def file_report(self, report: NodeReport, suffix: str = "") -> None:
        """File *report*, the last word of this agent on a generation.

        With a *suffix* it is filed beside that: on another node, or by the leader on any.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        key = self.keys.report(report.generation, f"{self.me.agent}{suffix}")
        self.store.put(key, pack(report.to_json()))

    def file_report_for(self, agent: str, report: NodeReport) -> None:
        """File *report* on behalf of *agent*, which is silent; what it said itself stands.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        key = self.keys.report(report.generation, agent)
        self.store.compare_and_set(key, pack(report.to_json()), version=0)

    def _retry_forever(self, step: Callable[[], None]) -> None:
        while not self._stopping.is_set() and self._reset_error is None:
            try:
                step()
            except ControlStoreUnreachableError as exc:
                log.debug("the board does not answer: %s", exc)
                self._stopping.wait(RETRY_S)
            except ControlStoreResetError as exc:
                self._reset_error = exc
                log.warning("%s", exc)
            except ControlStoreError as exc:
                if not self._is_refused:
                    log.warning("the board of this run refuses this agent: %s", exc)
                self._is_refused = True
                self._stopping.wait(RETRY_S)
            except Exception:  # boundary: a mistake of ours must not end the heartbeat
                log.exception("a control thread failed and goes on")
                self._stopping.wait(RETRY_S)
        self._heartbeat_done.set()  # whoever waits for a beat is to see that there is none any more

    def _heartbeat_unless_stuck(self) -> None:
        since_ns = self._coordinating_since_ns
        if since_ns is not None and self._clock.mono_ns() - since_ns >= COORDINATE_S_MAX * NS_PER_S:
            self._stopping.wait(RETRY_S)
            return
        is_hurried = self._is_candidate and self.record.phase in _FAST_PHASES
        self.send_heartbeat(FAST_HOLD_S if is_hurried else HOLD_S)
        self._heartbeat_done.set()

    def _coordinate_after_heartbeat(self) -> None:
        self._heartbeat_done.wait()
        self._heartbeat_done.clear()
        if not self._stopping.is_set():
            self.coordinate()

    def run_once(self, hold_s: float) -> None:
        """Beat once, and do what is this agent's to do for all; for who has but one thread.

        Raises:
            ControlStoreError: Nothing was done, or not all of it.
        """
        self.send_heartbeat(hold_s)
        self.coordinate()

    def send_heartbeat(self, hold_s: float) -> None:
        """Say that this agent lives, and follow the record.

        Raises:
            ControlStoreError: Nobody heard of it, or nobody answers.
        """
        # A board that takes its time for each answer is not away, and asking it more is no help.
        was_unreachable = self.since_reply_s > UNREACHABLE_S + 4 * self.round_trip_s
        try:
            self._send_heartbeat(hold_s)
        except ControlStoreError:
            if self._unanswered_since_ns is None:
                self._unanswered_since_ns = self._clock.mono_ns()
            raise
        self._was_unreachable = self._was_unreachable or was_unreachable

    def coordinate(self) -> None:
        """Do what is this agent's to do for all.

        Raises:
            ControlStoreError: Nothing was done, or not all of it.
        """
        self._coordinating_since_ns = self._clock.mono_ns()
        try:
            if self._was_unreachable:
                # The run may have ended meanwhile and been cleaned up: no beat would ever say so.
                self._accept(self.store.get(RECORD_KEY))
                self._was_unreachable = False
            if self.wants_heartbeats():
                self.on_heartbeats(self.store.list(self.keys.heartbeat()))
            if self.coordinator is not None:
                self.coordinator.tick(self.view)
        finally:
            self._coordinating_since_ns = None
            self._is_candidate = self.coordinator is not None and self.coordinator.is_candidate

    def _send_heartbeat(self, hold_s: float) -> None:
        self.check_fence()  # a beat now would hide that peers may have gone on without us
        view = self.view
        self._number += 1
        began_ns = self._clock.mono_ns()
        flags = {SLOW_FLAG: True} if self.is_slow else {}
        reply = self.store.heartbeat(
            self.keys.heartbeat(self.me.agent),
            pack({"seq": self._number, **flags, **self._payload()}),
            watch=RECORD_KEY,
            seen_version=view.version,
            hold_s=hold_s,
        )
        now_ns = self._clock.mono_ns()
        self._last_reply_ns, self._heartbeat_sent_ns = now_ns, began_ns
        self._unanswered_since_ns = None
        self._is_refused = False
        self.round_trip_s = max(0.0, (now_ns - began_ns) / NS_PER_S - hold_s)
        if reply.watched is None:  # else it was not held, nobody knows for how long
            self._round_trips_s.append(self.round_trip_s)
        with self._changed:
            self._view = replace(self._view, store_s=reply.store_s, received_ns=now_ns)
        if reply.watched is not None:
            self._accept(reply.watched)

    def _payload(self) -> Json:
        """Return what goes with a heartbeat; our bug there must not silence this agent."""
        try:
            return self.heartbeat_payload()
        except Exception as exc:  # noqa: BLE001 boundary: see above
            if not self._payload_failed:
                self._payload_failed = True
                log.warning("the progress of this node cannot be told: %r", exc)
            return {}

    def _accept(self, entry: Entry) -> ControlRecord:
        """Return the record in *entry*, which is the one to follow if it is newer."""
        try:
            record = read_own_record(entry, self.keys.run_id)
        except ControlStoreResetError as exc:
            self._reset_error = exc
            raise
        with self._record_lock:  # two threads learn of records; `on_record` hears them in order
            with self._changed:
                if entry.version <= self._view.version:
                    return record
                self._view = replace(self._view, record=record, version=entry.version)
                self._changed.notify_all()
            self.on_record_change(record)
        return record

    def _watch(self) -> None:
        checks = (self.check_fence, self.check_overdue_workers, self._report_silence)
        while self._fence_timeout_s is not None and not self._stopping.wait(WATCH_S):
            for check in checks:
                self._run_safely(check)

    def _run_safely(self, check: Callable[[], None]) -> None:
        """Do *check*; a mistake of ours must not leave the workers without their fence."""
        try:
            check()
        except Exception:  # boundary: see above
            log.exception("a watch over the workers failed and goes on")

    def _report_silence(self) -> None:
        silence_s = self.since_reply_s
        if self._silence_s is None and silence_s >= SILENT_S:
            self._silence_s = silence_s
            self.on_store_silent(silence_s)
        elif self._silence_s is not None and silence_s < SILENT_S:
            self.on_store_back(self._silence_s)
            self._silence_s = None
        elif self._silence_s is not None:
            self._silence_s = silence_s

    def check_fence(self) -> None:
        """End this agent's workers if it has been without the board for too long."""
        since_heartbeat_s, timeout_s = self.since_heartbeat_s, self._fence_timeout_s
        if timeout_s is None or self.is_fenced or since_heartbeat_s < timeout_s:
            return
        self.is_fenced = True
        self.on_fence(since_heartbeat_s)
        with self._changed:
            self._changed.notify_all()

    def check_overdue_workers(self) -> None:
        """End workers whose generation was over so long ago that others wait no more.

        Whoever should have ended them hangs, in a file system that does not answer for example.
        """
        record, generation = self.record, self.running_generation()
        is_over = record.phase in _ENDED_PHASES or record.generation > (generation or 0)
        if generation is None or not is_over:
            self._ended_since_ns = None
            return
        now_ns = self._clock.mono_ns()
        if self._ended_since_ns is None:
            self._ended_since_ns = now_ns
        if now_ns - self._ended_since_ns >= self._end_timeout_s * NS_PER_S:
            self.on_fence(0.0)


def _ignore(_news: object) -> None:
    return


def _no_generation() -> int | None:
    return None


def _never() -> bool:
    return False
