"""One agent's client of the control store: the run's record as known here, and its heartbeat."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gpuops.control.record import (
    RECORD_KEY,
    SENT_KEY,
    SLOW_FLAG,
    ControlKeys,
    ControlRecord,
    Member,
    RecordView,
    Roster,
    pack,
    read_own_record,
)
from gpuops.control.store import (
    CLOSED_FENCE_S,
    ControlStore,
    ControlStoreError,
    ControlStoreResetError,
    Entry,
)
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.model import Json
from gpuops.units import NS_PER_S

SLOW_S, SLOW_HEARTBEATS = 1.0, 4  # slow: so many round trips in a row take so long


def _ignore(_record: ControlRecord) -> None:
    return


class ControlClient:
    """One agent's client of the control store; `ControlThreads` sends its heartbeats.

    *on_record_change* is called with each change of the record, in the thread that read it.
    ``fence_timeout_s`` is the silence after which peers remove this agent; None: never (a store in
    this process).
    """

    def __init__(
        self,
        store: ControlStore,
        me: Member,
        view: RecordView,
        clock: Clock,
        *,
        fence_timeout_s: float | None,
        on_record_change: Callable[[ControlRecord], None] = _ignore,
    ) -> None:
        self.store = store
        self.me = me
        self.keys = ControlKeys(run_id=view.record.run_id)
        self.fence_timeout_s = fence_timeout_s
        self.is_fenced = False
        self.round_trip_s = 0.0
        self.roster: Roster | None = None  # the newest that `read_roster` returned
        self._clock = clock
        self._on_record_change = on_record_change
        self._view = view
        self._last_reply_ns = self._heartbeat_sent_ns = clock.mono_ns()
        self._unanswered_since_ns: int | None = None
        self._round_trips_s: deque[float] = deque(maxlen=SLOW_HEARTBEATS)
        self._changed = threading.Condition()
        self._record_lock = threading.Lock()
        self._number = 0
        self._reset_error: ControlStoreResetError | None = None

    def read_roster(self, generation: int) -> Roster:
        """Return the roster of *generation*, which has workers or had them.

        Raises:
            ControlStoreError: See `ControlStore`.
            RecordError: There is none, or it cannot be read.
        """
        self.roster = Roster.from_bytes(self.store.get(self.keys.roster(generation)).value)
        return self.roster

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
    def is_cut_off(self) -> bool:
        """Say whether peers may count this agent as dead soon: workers must not live on here."""
        timeout_s = self.fence_timeout_s
        if timeout_s is None:
            return False
        return self.since_heartbeat_s >= timeout_s or self.store.disconnected_s() >= CLOSED_FENCE_S

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

    def mark_reset(self, error: ControlStoreResetError) -> None:
        """Note that the run's record is lost for good."""
        self._reset_error = error

    def wait_until(self, predicate: Callable[[ControlRecord], bool], timeout_s: float) -> bool:
        """Wait until *predicate* holds for the record; say whether it did within *timeout_s*."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self._view.record), timeout_s)

    def wake(self) -> None:
        """Have every `wait_until` test its predicate again."""
        with self._changed:
            self._changed.notify_all()

    def clear_fence(self) -> bool:
        """Clear the fence once peers see this agent's heartbeats again; say whether they do.

        For an agent without workers.
        """
        if self.is_cut_off:
            return False
        self.is_fenced = False
        return True

    def read_record(self) -> ControlRecord:
        """Read the record from the store and return it.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        return self._accept(self.store.get(RECORD_KEY))

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

        With a *suffix* it is an additional report: on another node, or by the leader on any.

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

    def mark_settled(self, generation: int) -> None:
        """Say that this agent has nothing more to do for *generation*, its last state included.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        self.store.put(self.keys.settled(generation, self.me.agent), b"1")

    def send_heartbeat(self, payload: Json, hold_s: float) -> None:
        """Send a heartbeat with *payload*, and read the record if it changes within *hold_s*.

        Raises:
            ControlStoreError: It was not written, or there was no answer.
        """
        try:
            self._send_heartbeat(payload, hold_s)
        except ControlStoreError:
            if self._unanswered_since_ns is None:
                self._unanswered_since_ns = self._clock.mono_ns()
            raise

    def _send_heartbeat(self, payload: Json, hold_s: float) -> None:
        view = self.view
        self._number += 1
        began_ns = self._clock.mono_ns()
        flags = {SLOW_FLAG: True} if self.is_slow else {}
        reply = self.store.heartbeat(
            self.keys.heartbeat(self.me.agent),
            pack({"seq": self._number, SENT_KEY: began_ns, **flags, **payload}),
            watch=RECORD_KEY,
            seen_version=view.version,
            hold_s=hold_s,
        )
        now_ns = self._clock.mono_ns()
        self._last_reply_ns, self._heartbeat_sent_ns = now_ns, began_ns
        self._unanswered_since_ns = None
        self.round_trip_s = max(0.0, (now_ns - began_ns) / NS_PER_S - hold_s)
        if reply.watched is None:  # otherwise the server held it for an unknown time
            self._round_trips_s.append(self.round_trip_s)
        with self._changed:
            self._view = replace(self._view, store_s=reply.store_s, received_ns=now_ns)
        if reply.watched is not None:
            self._accept(reply.watched)

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
            self._on_record_change(record)
        return record
