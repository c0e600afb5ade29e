"""SIGTERM as Ctrl-C, in commands that record what was done until they were interrupted."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM came, from ``scancel``, systemd or ``timeout``."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise `Terminated` at the first SIGTERM; later ones are ignored while that is handled."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # it is ignored, or has another handler
        return

    def interrupt(number: int, _frame: object) -> None:
        # No SIG_IGN: programs that are started meanwhile would inherit it.
        signal.signal(number, lambda *_: None)
        raise Terminated

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
