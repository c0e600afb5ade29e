"""Sends what the spool holds to the store from a thread, so that training waits for no database."""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from gpuops.errors import SpoolError

FIRST_AFTER_S = 5.0
EVERY_S = 15.0
DEADLINE_S = 5.0
log = logging.getLogger(__name__)


class FlushSummary(Protocol):
    """The part of the store's flush report that is used here."""

    @property
    def remaining(self) -> int: ...

    @property
    def note(self) -> str | None: ...


Flush = Callable[[float], FlushSummary]


class Flusher:
    """Calls *flush* (with its deadline in seconds) now and then, and once more at the end."""

    def __init__(
        self, flush: Flush, *, first_after_s: float = FIRST_AFTER_S, every_s: float = EVERY_S
    ) -> None:
        self._flush = flush
        self._first_after_s = first_after_s
        self._every_s = every_s
        self._stop = threading.Event()
        self._last: FlushSummary | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="gpuops-flusher", daemon=True)
        self._thread.start()

    def close(self, within_s: float = 2 * DEADLINE_S) -> str | None:
        """Flush a last time; return what the user should know of what stays in the spool.

        Returns after *within_s* even if a file system or a server holds the thread.
        """
        self._stop.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            return f"the store did not answer within {within_s:.0f} s"
        if self._error is not None:
            return self._error
        if self._last is None or not self._last.remaining:
            return None
        return f"{self._last.remaining} events wait in the spool: {self._last.note}"

    def _run(self) -> None:
        wait_s = self._first_after_s
        while not self._stop.wait(wait_s):
            self._flush_once()
            wait_s = self._every_s
        self._flush_once()

    def _flush_once(self) -> None:
        try:
            self._last = self._flush(DEADLINE_S)
            self._error = None
        except SpoolError:
            # Whoever records has said, once, what is wrong with the spool.
            log.debug("flush failed", exc_info=True)
        except Exception as exc:  # boundary: a broken store must not end the run
            self._error = f"sending events to the store failed: {exc}"
            log.debug("flush failed", exc_info=True)
