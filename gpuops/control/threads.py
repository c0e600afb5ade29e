"""The control threads of one agent: one sends heartbeats, one runs the leader's duties.

They are two, so that a leader whose calls are answered late still sends its heartbeat in time. A
third thread only watches the time since the last round trip: an agent that is cut off cannot learn
that it was removed, so it ends its own workers before its peers count it dead. That thread makes no
call, so no slow answer delays it.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gpuops.control.client import ControlClient
from gpuops.control.record import RecordView, RunPhase
from gpuops.control.store import (
    ControlStoreError,
    ControlStoreResetError,
    ControlStoreUnreachableError,
    Entry,
)
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

HOLD_S = 1.0
FAST_HOLD_S = 0.1  # while a generation is being ended or formed, for agents that may lead
RETRY_S = 0.25
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


def _ignore(_value: object) -> None:
    return


def _no_generation() -> int | None:
    return None


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCallbacks:
    """What the control threads call on their agent, each in one of these threads.

    ``on_fence`` ends the workers; it gets the seconds since the last heartbeat that peers saw, 0
    for workers whose generation has ended long ago. ``running_generation`` returns the generation
    that has workers here. ``heartbeat_payload`` returns what peers are to know of them; it must not
    block. ``on_store_silent`` and ``on_store_back`` get for how long the store has not answered.
    ``on_heartbeats`` gets all heartbeats while ``wants_heartbeats`` returns true. ``hold_s``
    returns the seconds between two heartbeats while workers run, at most `HOLD_S`.
    """

    on_fence: Callable[[float], None] = _ignore
    running_generation: Callable[[], int | None] = _no_generation
    heartbeat_payload: Callable[[], Json] = dict
    on_store_silent: Callable[[float], None] = _ignore
    on_store_back: Callable[[float], None] = _ignore
    wants_heartbeats: Callable[[], bool] = _never
    on_heartbeats: Callable[[Mapping[str, Entry]], None] = _ignore
    hold_s: Callable[[], float] = lambda: HOLD_S


class ControlThreads:
    """Keeps one agent in its run: sends its heartbeats, leads where it must, fences its workers.

    Workers that live *end_timeout_s* after their generation has ended are ended like those of an
    agent that is cut off.
    """

    def __init__(
        self,
        client: ControlClient,
        callbacks: AgentCallbacks,
        coordinator: Coordinator | None,
        clock: Clock,
        *,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._callbacks = callbacks
        self._coordinator = coordinator
        self._clock = clock
        self._end_timeout_s = end_timeout_s
        self._ended_since_ns: int | None = None
        self._was_unreachable = False
        self._is_candidate = False
        self._coordinating_since_ns: int | None = None
        self._heartbeat_done = threading.Event()
        self._stopping = threading.Event()
        self._payload_failed = False
        self._silence_s: float | None = None
        self._is_refused = False
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
        self._client.wake()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=2 * HOLD_S)

    def _retry_forever(self, step: Callable[[], None]) -> None:
        while not self._stopping.is_set() and self._client.reset_error is None:
            try:
                step()
            except ControlStoreUnreachableError as exc:
                log.debug("the control store does not answer: %s", exc)
                self._stopping.wait(RETRY_S)
            except ControlStoreResetError as exc:
                self._client.mark_reset(exc)
                log.warning("%s", exc)
            except ControlStoreError as exc:
                if not self._is_refused:
                    log.warning("the control store of this run refuses this agent: %s", exc)
                self._is_refused = True
                self._stopping.wait(RETRY_S)
            except Exception:  # boundary: a bug of ours must not end the heartbeat
                log.exception("a control thread failed and continues")
                self._stopping.wait(RETRY_S)
        self._heartbeat_done.set()  # the other thread waits for it, and must end

    def _heartbeat_unless_stuck(self) -> None:
        since_ns = self._coordinating_since_ns
        if since_ns is not None and self._clock.mono_ns() - since_ns >= COORDINATE_S_MAX * NS_PER_S:
            self._stopping.wait(RETRY_S)
            return
        is_hurried = self._is_candidate and self._client.record.phase in _FAST_PHASES
        self.send_heartbeat(FAST_HOLD_S if is_hurried else self._callbacks.hold_s())
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
        client = self._client
        # A store that answers late is not unreachable, and more calls would not help.
        was_unreachable = client.since_reply_s > UNREACHABLE_S + 4 * client.round_trip_s
        self.check_fence()  # a heartbeat now would hide that peers may have removed this agent
        client.send_heartbeat(self._payload(), hold_s)
        self.check_fence()  # the connection may have been closed meanwhile for too long
        self._is_refused = False
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
                self._client.read_record()
                self._was_unreachable = False
            if self._callbacks.wants_heartbeats():
                client = self._client
                self._callbacks.on_heartbeats(client.store.list(client.keys.heartbeat()))
            if self._coordinator is not None:
                self._coordinator.tick(self._client.view)
        finally:
            self._coordinating_since_ns = None
            self._is_candidate = self._coordinator is not None and self._coordinator.is_candidate

    def _payload(self) -> Json:
        """Return the payload of a heartbeat; a bug in it must not stop the heartbeat."""
        try:
            return self._callbacks.heartbeat_payload()
        except Exception as exc:  # noqa: BLE001 boundary: see above
            if not self._payload_failed:
                self._payload_failed = True
                log.warning("the progress of this node cannot be published: %r", exc)
            return {}

    def _watch(self) -> None:
        checks = (self.check_fence, self.check_overdue_workers, self._report_silence)
        while self._client.fence_timeout_s is not None and not self._stopping.wait(WATCH_S):
            for check in checks:
                self._run_safely(check)

    def _run_safely(self, check: Callable[[], None]) -> None:
        """Run *check*; a bug of ours must not leave the workers without their fence."""
        try:
            check()
        except Exception:  # boundary: see above
            log.exception("the watch over the workers failed and continues")

    def _report_silence(self) -> None:
        silence_s = self._client.since_reply_s
        if self._silence_s is None and silence_s >= SILENT_S:
            self._silence_s = silence_s
            self._callbacks.on_store_silent(silence_s)
        elif self._silence_s is not None and silence_s < SILENT_S:
            self._callbacks.on_store_back(self._silence_s)
            self._silence_s = None
        elif self._silence_s is not None:
            self._silence_s = silence_s

    def check_fence(self) -> None:
        """End this agent's workers if the store has been unreachable for too long."""
        client = self._client
        if client.is_fenced or not client.is_cut_off:
            return
        client.is_fenced = True
        self._callbacks.on_fence(client.since_heartbeat_s)
        client.wake()

    def check_overdue_workers(self) -> None:
        """End workers whose generation ended so long ago that others no longer wait for them.

        The thread that should have ended them hangs, for example in a file system.
        """
        record, generation = self._client.record, self._callbacks.running_generation()
        is_over = record.phase in _ENDED_PHASES or record.generation > (generation or 0)
        if generation is None or not is_over:
            self._ended_since_ns = None
            return
        now_ns = self._clock.mono_ns()
        if self._ended_since_ns is None:
            self._ended_since_ns = now_ns
        if now_ns - self._ended_since_ns >= self._end_timeout_s * NS_PER_S:
            self._callbacks.on_fence(0.0)
