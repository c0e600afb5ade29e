"""Ctrl-C and its kin: noted at once, acted on where it is safe.

torch's own handler raises wherever the main thread happens to be, in the middle of starting
workers too, which then nobody knows of. Ours raises only inside `Cancellation.interruptible`
(waiting for other nodes) and at `Cancellation.check` (once per look at the workers).
"""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

UNUSED_SIGNAL = "SIGRTMAX"  # what torch may handle in our place: nothing that anyone sends


class Cancellation:
    """Whether, and by which signal, the user or the scheduler asked this agent to end."""

    def __init__(self, names: Iterable[str]) -> None:
        self.received: signal.Signals | None = None
        self.is_urgent = False
        self._names = tuple(names)
        self._raises = False
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take the signals over; again after torch has set its own handlers.

        A SIGHUP that is ignored (nohup) stays ignored.
        """
        for name in self._names:
            number = getattr(signal, name.strip(), None)
            if not isinstance(number, signal.Signals):
                continue
            before = signal.getsignal(number)
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue
            self._before.setdefault(number, before)
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def check(self) -> None:
        """Raise if a signal has come.

        Raises:
            SignalException: torch's own; its agent stops the workers with the same signal.
        """
        if self.received is not None:
            raise SignalException(f"{self.received.name} received", sigval=self.received)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise at once within the block."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            self.is_urgent = True
            return
        self.received = signal.Signals(number)
        if self._raises:
            self.check()
