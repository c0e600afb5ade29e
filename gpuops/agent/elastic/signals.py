"""Ctrl-C and its kin: noted at once, acted on where it is safe.

torch's own handler raises wherever the main thread happens to be, in the middle of starting
workers too, which then nobody knows of. Ours raises only inside `Cancellation.interruptible`
(waiting for other nodes) and at `Cancellation.check` (each time the workers are polled).

Python runs a handler between two of the main thread's bytecodes; torch's connect to a host that
does not answer is one call of a minute. So a thread reads the wakeup descriptor
(signal.set_wakeup_fd): it notes the time, informs the user, and ends what the main thread cannot.
"""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from gpuops.host.clock import Clock

UNUSED_SIGNAL = "SIGRTMAX"  # what torch may handle in our place: nothing that anyone sends
ANSWER_S = 1.0  # a main thread that runs Python at all takes a signal within milliseconds


@dataclass(frozen=True, slots=True)
class SignalActions:
    """What a signal causes at once, in a thread of its own.

    *on_signal* is called with the first signal, and with the one after a drain. *abandon* is called
    when the main thread sits in `Cancellation.interruptible` and does not answer: it must end the
    process. None: the main thread takes the signal once it runs Python again.
    """

    on_signal: Callable[[signal.Signals], None]
    abandon: Callable[[signal.Signals], None] | None = None


def _ignore(_number: signal.Signals) -> None:
    return


class Cancellation:
    """Whether, when and by which signal the user or the scheduler asked this agent to end.

    A signal of *drains* asks for an orderly end: it is noted in ``drain`` and raises nowhere. The
    next signal, of any kind, is obeyed at once.
    """

    def __init__(self, names: Iterable[str], clock: Clock, drains: Iterable[str] = ()) -> None:
        self.received: signal.Signals | None = None
        self.drain: signal.Signals | None = None
        self.seen_mono_ns: int | None = None
        self.is_urgent = False
        self._drains = frozenset(drains)
        self._names = tuple(dict.fromkeys((*names, *self._drains)))
        self._clock = clock
        self._raises = False
        self._actions = SignalActions(_ignore)
        self._has_acted = False
        self._has_acted_on_drain = False
        self._before: dict[signal.Signals, Any] = {}
        self._has_answered = threading.Event()
        self._turn = threading.Lock()  # taken once, by whoever acts on the signal
        self._watch: _Wakeup | None = None

    def install(self, actions: SignalActions | None = None) -> None:
        """Take the signals over, from now on with *actions*; None: with those given last.

        Called again after torch has set its own handlers. A SIGHUP that is ignored (nohup) stays
        ignored.
        """
        if actions is not None:
            self._actions = actions
        for name in self._names:
            number = getattr(signal, name.strip(), None)
            if not isinstance(number, signal.Signals):
                continue
            before = signal.getsignal(number)
            if number is signal.SIGHUP and before is signal.SIG_IGN:
                continue
            self._before.setdefault(number, before)
            signal.signal(number, self._on_signal)
        if self._watch is None:
            self._watch = _Wakeup(self._on_wakeup)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

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
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            self.is_urgent = True
            return
        if self.drain is None and signal.Signals(number).name in self._drains:
            self.drain = signal.Signals(number)
            self.seen_mono_ns = self._clock.mono_ns()
            return
        if not self._turn.acquire(blocking=False):
            threading.Event().wait()  # the process is being ended
        if self.seen_mono_ns is None:
            self.seen_mono_ns = self._clock.mono_ns()
        self.received = signal.Signals(number)
        self._has_answered.set()
        if self._raises:
            self.check()

    def _on_wakeup(self, code: int) -> None:
        if self._has_acted or code not in self._before:
            return
        if self.seen_mono_ns is None:
            self.seen_mono_ns = self._clock.mono_ns()
        number = signal.Signals(code)
        actions = self._actions
        if number.name in self._drains and not self._has_acted_on_drain:
            self._has_acted_on_drain = True
            actions.on_signal(number)
            return
        self._has_acted = True
        actions.on_signal(number)
        if self._has_answered.wait(ANSWER_S) or not self._raises or actions.abandon is None:
            return
        if self._turn.acquire(blocking=False):
            actions.abandon(number)


class _Wakeup:
    """A thread that calls *act* with each signal's number as it arrives, whatever main does."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="gpuops-signals", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            select.select([self._read], [], [])
            for code in os.read(self._read, 64):
                if code == 0:
                    return
                self._act(code)

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.write(self._write, b"\0")
        self._thread.join(timeout=1)
        if not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)
