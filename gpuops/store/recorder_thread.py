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
from gpuops.store.new_event import dropped_event
from gpuops.store.recorder import Recorder

EVENTS_MAX = 8192  # a failure of 8 ranks with full log tails is about 12 events, 200 KB
CLOSE_S = 10.0
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
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="gpuops-recorder", daemon=True)
        self._thread.start()

    def record(self, *events: Event) -> None:
        """Queue *events* as one batch; drop all of them where there is no room or after the end."""
        with self._changed:
            if not self._put(len(events), lambda: self._inner.record(*events)):
                self._unreported += len(events)

    def call(self, act: Callable[[], None]) -> None:
        """Have *act* called after what was recorded before; not called where there is no room."""
        with self._changed:
            self._put(1, act)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what waits and close *inner*; give up after *within_s* and say so."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(within_s)
        if self._thread.is_alive():
            message = "%d events of this run are not written: the file system holds them up"
            _log.warning(message, self._waiting)

    def _put(self, size: int, act: Callable[[], None]) -> bool:
        if self._is_over or self._waiting + size > self._events_max:
            return False
        self._queue.append((size, act))
        self._waiting += size
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        while (item := self._next()) is not None:
            size, act = item
            self._do(act)
            with self._changed:
                self._waiting -= size
        self._do(self._inner.close)

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """Return what is to be done next, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._unreported or self._is_closing)
            if self._queue:
                return self._queue.popleft()
            if self._unreported:
                lost = self._loss(self._unreported)
                self._unreported = 0
                return 0, lambda: self._inner.record(lost)
            self._is_over = True
            return None

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 boundary: the thread must outlive whatever it was given
            _log.warning("a write for this run failed", exc_info=True)

    def _loss(self, count: int) -> Event:
        return dropped_event(
            "recorder",
            f"{count} events were dropped: writing could not keep up",
            count,
            node=self._node,
            clock=self._clock,
            randomness=self._randomness,
        )
