"""Turns at something that does one thing at a time, had in the order in which they were asked for.

`threading.Lock` promises no order. A thread that asks again as soon as it was answered mostly gets
the lock anew before one that waits for it has woken, and where each answer takes seconds the other
never has its turn.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """For several threads; one that holds a turn must not ask for another."""

    def __init__(self) -> None:
        self._tickets: list[object] = []
        self._changed = threading.Condition()

    @property
    def n_waiting(self) -> int:
        """Return how many wait for their turn."""
        with self._changed:
            return max(len(self._tickets) - 1, 0)

    @contextmanager
    def acquire(self, timeout_s: float) -> Iterator[bool]:
        """Give a turn, or False where it did not come *timeout_s*; it ends with the block."""
        ticket = object()
        try:
            with self._changed:
                self._tickets.append(ticket)
                acquired = self._changed.wait_for(lambda: self._tickets[0] is ticket, timeout_s)
            yield acquired
        finally:
            # Also after an exception that a signal handler raised here.
            with self._changed:
                if ticket in self._tickets:
                    self._tickets.remove(ticket)
                self._changed.notify_all()
