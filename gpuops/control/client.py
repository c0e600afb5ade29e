"""The control threads of one agent: one sends heartbeats, one runs the leader's duties.

They are two, so that a leader whose calls are answered late still sends its heartbeat in time. A
third thread only watches the time since the last round trip: an agent that is cut off cannot learn
that it was removed, so it ends its own workers before its peers count it dead. That thread makes no
call, so no slow answer delays it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from gpuops.control.record import (
    RECORD_KEY,
    SLOW_FLAG,
    ControlKeys,
    ControlRecord,
    Member,
    RecordView,
    RunPhase,
    pack,
    read_own_record,
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
FAST_HOLD_S = 0.1  # while a generation is being ended or formed, for agents that may lead
RETRY_S = 0.25
SLOW_S, SLOW_HEARTBEATS = 1.0, 4  # slow: so many round trips in a row take so long
WATCH_S = 0.25
UNREACHABLE_S = 3 * HOLD_S
# A leader that hangs must not look alive, or no other agent takes its place: after this its agent
# sends no heartbeat. It is the time of a dozen calls that each take as long as a call may.
COORDINATE_S_MAX = 60.0
SILENT_S = 5.0  # an outage this long is recorded
END_TIMEOUT_S = 15.0
_FAST_PHASES = frozenset({RunPhase.RENDEZVOUS, RunPhase.COLLECT, RunPhase.DRAIN})
# Phases in which the workers of the record's generation must have ended.
_ENDED_PHASES = frozenset({RunPhase.RENDEZVOUS, RunPhase.COLLECT, RunPhase.STOP})


class Coordinator(Protocol):
    """The leader's duties of an agent; called in a thread of their own."""

    def tick(self, view: RecordView) -> None:
        """Read the store and write what changes next; raises what the store raises."""
        ...

    @property
    def is_candidate(self) -> bool:
        """Say whether this agent leads, or may soon have to."""
        ...


class ControlClient:
    """One agent's client of the control store.

    ``on_fence`` ends the workers; it is called in a thread of its own when the store is unreachable
    for *fence_timeout_s*, or when workers live *end_timeout_s* after their generation has ended
    (``running_generation`` returns the one that lives). None: never (a store in this process).
    ``on_store_silent`` and ``on_store_back`` are called when the store stops answering and when it
    answers again, ``on_record_change`` with each change of the record, in any thread, and
    ``on_heartbeats`` with all heartbeats while ``wants_heartbeats`` returns true.
    ``heartbeat_payload`` returns what peers are to know of this agent's workers; it is called with
    every heartbeat and must not block.
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
        """Start to send heartbeats."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads. The store stays open; a call that waits for it ends by itself."""
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
        """Return the store's time."""
        return self.view.store_now_s(self._clock.mono_ns())

    @property
    def since_reply_s(self) -> float:
        """Return the seconds since the last round trip."""
        return (self._clock.mono_ns() - self._last_reply_ns) / NS_PER_S

    @property
    def since_heartbeat_s(self) -> float:
        """Return for how long peers may have seen no heartbeat of this agent.

        It counts from the start of the last heartbeat that was answered: peers saw that one,
        however late its answer came.
        """
        return (self._clock.mono_ns() - self._heartbeat_sent_ns) / NS_PER_S

    @property
    def is_slow(self) -> bool:
        """Say whether the last heartbeats were all answered late."""
        trips_s = self._round_trips_s
        return len(trips_s) == SLOW_HEARTBEATS and min(trips_s) >= SLOW_S

    @property
    def unreachable_s(self) -> float:
        """Return for how long calls to the store have failed, 0 where the last one succeeded.

        A frozen host makes no calls: what counts is the result of the first one after it thaws.
        """
        since_ns = self._unanswered_since_ns
        return 0.0 if since_ns is None else (self._clock.mono_ns() - since_ns) / NS_PER_S

    @property
    def reset_error(self) -> ControlStoreResetError | None:
        """Return the error that shows that the run's record is lost for good, None otherwise."""
        return self._reset_error

    def wait_until(self, predicate: Callable[[ControlRecord], bool], timeout_s: float) -> bool:
        """Wait until *predicate* holds for the record; say whether it did within *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._view.record), timeout_s)

    def clear_fence(self) -> bool:
        """Clear the fence once peers see this agent's heartbeats again; say whether they do.

        For an agent without workers.
        """
        if self._fence_timeout_s is not None and self.since_heartbeat_s >= self._fence_timeout_s:
            return False
        self.is_fenced = False
        return True

    def update_record(self, change: Callable[[ControlRecord], ControlRecord | None]) -> bool:
        """Change the record by compare-and-set; say whether our change was written.

        *change* gets the newest record at each try and returns None where nothing is left to do,
        because another agent was first.

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
        """File *report*, the final report of this agent on a generation.

        With a *suffix* it is filed beside that: on another node, or by the leader on any.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        key = self.keys.report(report.generation, f"{self.me.agent}{suffix}")
        self.store.put(key, pack(report.to_json()))

    def file_report_for(self, agent: str, report: NodeReport) -> None:
        """File *report* for *agent*, which is silent; a report of its own is kept.

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
            except Exception:  # boundary: a bug of ours must not end the heartbeat
                log.exception("a control thread failed and goes on")
                self._stopping.wait(RETRY_S)
        self._heartbeat_done.set()  # the other thread waits for it, and must end

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
        """Send one heartbeat and run the leader's duties, in one thread.

        Raises:
            ControlStoreError: Nothing was done, or not all of it.
        """
        self.send_heartbeat(hold_s)
        self.coordinate()

    def send_heartbeat(self, hold_s: float) -> None:
        """Send a heartbeat, and read the record if it has changed.

        Raises:
            ControlStoreError: It was not written, or there was no answer.
        """
        # A store that answers late is not unreachable, and more calls would not help.
        was_unreachable = self.since_reply_s > UNREACHABLE_S + 4 * self.round_trip_s
        try:
            self._send_heartbeat(hold_s)
        except ControlStoreError:
            if self._unanswered_since_ns is None:
                self._unanswered_since_ns = self._clock.mono_ns()
            raise
        self._was_unreachable = self._was_unreachable or was_unreachable

    def coordinate(self) -> None:
        """Run the leader's duties, if this agent leads.

        Raises:
            ControlStoreError: Nothing was done, or not all of it.
        """
        self._coordinating_since_ns = self._clock.mono_ns()
        try:
            if self._was_unreachable:
                # The run may have ended and been cleaned up: no heartbeat would show that.
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
        self.check_fence()  # a heartbeat now would hide that peers may have removed this agent
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
        if reply.watched is None:  # otherwise the server held it for an unknown time
            self._round_trips_s.append(self.round_trip_s)
        with self._changed:
            self._view = replace(self._view, store_s=reply.store_s, received_ns=now_ns)
        if reply.watched is not None:
            self._accept(reply.watched)

    def _payload(self) -> Json:
        """Return the payload of a heartbeat; a bug in it must not stop the heartbeat."""
        try:
            return self.heartbeat_payload()
        except Exception as exc:  # noqa: BLE001 boundary: see above
            if not self._payload_failed:
                self._payload_failed = True
                log.warning("the progress of this node cannot be told: %r", exc)
            return {}

    def _accept(self, entry: Entry) -> ControlRecord:
        """Return the record in *entry*, and keep it if it is newer."""
        try:
            record = read_own_record(entry, self.keys.run_id)
        except ControlStoreResetError as exc:
            self._reset_error = exc
            raise
        with self._record_lock:  # two threads read records; the callback gets them in order
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
        """Run *check*; a bug of ours must not leave the workers without their fence."""
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
        """End this agent's workers if the store has been unreachable for too long."""
        since_heartbeat_s, timeout_s = self.since_heartbeat_s, self._fence_timeout_s
        if timeout_s is None or self.is_fenced or since_heartbeat_s < timeout_s:
            return
        self.is_fenced = True
        self.on_fence(since_heartbeat_s)
        with self._changed:
            self._changed.notify_all()

    def check_overdue_workers(self) -> None:
        """End workers whose generation ended so long ago that others no longer wait for them.

        The thread that should have ended them hangs, for example in a file system.
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
