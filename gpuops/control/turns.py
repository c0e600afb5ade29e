"""Turns at something that does one thing at a time, had in the order in which they were asked for.

`threading.Lock` promises no order. A thread that asks again as soon as it was answered mostly gets
the lock anew before one that waits for it has woken, and where each answer takes seconds the other
never has its turn.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """For several threads; one that holds a turn must not ask for another."""

    def __init__(self) -> None:
        self._line: list[object] = []
        self._changed = threading.Condition()

    @property
    def n_waiting(self) -> int:
        """Return how many wait for their turn."""
        with self._changed:
            return max(len(self._line) - 1, 0)

    @contextmanager
    def taken(self, within_s: float) -> Iterator[bool]:
        """Give a turn, or False where it did not come *within_s*; it ends with the block."""
        ticket = object()
        try:
            with self._changed:
                self._line.append(ticket)
                is_ours = self._changed.wait_for(lambda: self._line[0] is ticket, within_s)
            yield is_ours
        finally:
            # Also after an exception that a signal handler raised here.
            with self._changed:
                if ticket in self._line:
                    self._line.remove(ticket)
                self._changed.notify_all()
