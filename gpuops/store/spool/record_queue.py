"""A recorder for a thread that must not wait for a file system: another thread does the writing.

A run directory is on a shared file system, which may hold a writer for minutes. What is recorded
waits in memory, in order, up to a limit; beyond it events are dropped, counted, and the count is
recorded as soon as there is room again.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from gpuops.host.clock import Clock
from gpuops.model import Event
from gpuops.store.events import lost_events_event
from gpuops.store.spool.record import Recorder

EVENTS_MAX = 8192  # a failure of 8 ranks with full log tails is about 12 events, 200 KB
CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class QueuedRecorder:
    """Hands events to *inner* from a thread of its own. No method raises or waits for *inner*."""

    def __init__(
        self,
        inner: Recorder,
        *,
        node: str,
        clock: Clock,
        randomness: Callable[[int], bytes] = os.urandom,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self._inner = inner
        self._node = node
        self._clock = clock
        self._randomness = randomness
        self._events_max = events_max
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting = 0
        self._unreported = 0
        self._is_closing = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="gpuops-recorder", daemon=True)
        self._thread.start()

    def record(self, *events: Event) -> None:
        """Queue *events* as one batch; drop all of them where there is no room or after the end."""
        with self._changed:
            if not self._enqueue(len(events), lambda: self._inner.record(*events)):
                self._unreported += len(events)

    def call(self, action: Callable[[], None]) -> None:
        """Have *action* called after what was recorded before; not where there is no room."""
        with self._changed:
            self._enqueue(1, action)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what waits and close *inner*; give up after *timeout_s* and say so."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            message = "%d events of this run are not written: the file system holds them up"
            _log.warning(message, self._waiting)

    def _enqueue(self, size: int, action: Callable[[], None]) -> bool:
        if self._is_closed or self._waiting + size > self._events_max:
            return False
        self._queue.append((size, action))
        self._waiting += size
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        while (item := self._next()) is not None:
            size, action = item
            self._call_safely(action)
            with self._changed:
                self._waiting -= size
        self._call_safely(self._inner.close)

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """Return what is to be done next, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._unreported or self._is_closing)
            if self._queue:
                return self._queue.popleft()
            if self._unreported:
                lost = self._lost_event(self._unreported)
                self._unreported = 0
                return 0, lambda: self._inner.record(lost)
            self._is_closed = True
            return None

    def _call_safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 boundary: the thread must outlive whatever it was given
            _log.warning("a write for this run failed", exc_info=True)

    def _lost_event(self, count: int) -> Event:
        return lost_events_event(
            "recorder",
            f"{count} events were dropped: writing could not keep up",
            count,
            node=self._node,
            clock=self._clock,
            randomness=self._randomness,
        )
