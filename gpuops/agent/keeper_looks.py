"""Asking a thread to look once more, and waiting a moment for it."""

import threading


class Looks:
    """Between the thread that looks and those who want it to have looked.

    What is looked at may take its time to answer; who asks does not wait for that.
    """

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._n_asked = self._n_answered = 0

    def ask(self, wait_s: float) -> bool:
        """Return once a look has been taken that began after this call; False after *wait_s*."""
        with self._looked:
            self._n_asked += 1
            number = self._n_asked
            self._wake.set()
            return self._looked.wait_for(lambda: self._n_answered >= number, wait_s)

    def wake(self) -> None:
        """End the wait of the thread that looks."""
        self._wake.set()

    def wait(self, wait_s: float) -> None:
        """Wait until somebody asks, *wait_s* seconds at most; for the thread that looks."""
        self._wake.wait(wait_s)
        self._wake.clear()

    def begin(self) -> int:
        """Return what to give to `end` after a look that begins now."""
        return self._n_asked

    def end(self, number: int) -> None:
        """Let those go on who asked before that look began."""
        with self._looked:
            self._n_answered = max(self._n_answered, number)
            self._looked.notify_all()
