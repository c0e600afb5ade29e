"""Turn SIGTERM and SIGUSR1 into a flag, so that a step can be finished and saved.

Whether Slurm's notice reaches a worker itself depends on how the step is tracked, so a worker must
survive it either way. A handler that the script installs later replaces ours, as intended.
"""

import contextlib
import os
import signal
import time
from threading import get_ident
from types import FrameType

from gpuops.wire.ring import AgentRequest, WorkerFlag
from gpuops.worker.heartbeat import Heartbeat

_WATCHED = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Our handlers in this process.

    Children forked from it get the default back: those who end a data loader's worker with SIGTERM
    rely on it.
    """

    def __init__(self) -> None:
        self.signalled_ns: int | None = None
        self.heart: Heartbeat | None = None
        self.dumps_stacks = False
        self._pid = os.getpid()
        self._handler = self._handle  # one object, so that `is` distinguishes it from the script's
        self._masks: dict[int, set[signal.Signals | int]] = {}

    def install(self) -> None:
        """Install our handler for the signals without one.

        Raises:
            ValueError: Not in the main thread.
        """
        for number in _WATCHED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handler)
                # Libraries that do not expect EINTR would otherwise have been killed by the signal.
                signal.siginterrupt(number, False)
        # Python drops signals that arrive while it forks: fork with the default restored.
        os.register_at_fork(
            before=self._hold, after_in_parent=self._release, after_in_child=self._in_child
        )

    def uninstall(self) -> None:
        """Restore the default for those signals that are still ours."""
        for number in _WATCHED:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)

    def ours(self) -> WorkerFlag:
        """Return which handlers are still ours."""
        flags = WorkerFlag(0)
        if signal.getsignal(signal.SIGTERM) is self._handler:
            flags |= WorkerFlag.HANDLES_SIGTERM
        if signal.getsignal(signal.SIGUSR1) is self._handler:
            flags |= WorkerFlag.HANDLES_SIGUSR1
        # Python does not know of faulthandler's handlers: any other one is the script's.
        if self.dumps_stacks and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
            flags |= WorkerFlag.HANDLES_SIGUSR2
        return flags

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        heart = self.heart
        if heart is None or os.getpid() != self._pid:
            self._obey(number)
            return
        request = AgentRequest.NONE
        with contextlib.suppress(Exception):  # an exception in a handler would reach the script
            heart.flag(WorkerFlag.HANDLER_RAN)
            request = heart.request()[0]
        if request is AgentRequest.TERMINATE and number == signal.SIGTERM:
            self._obey(number)
        elif request is AgentRequest.NONE and self.signalled_ns is None:
            self.signalled_ns = time.monotonic_ns()
            with contextlib.suppress(Exception):
                heart.flag(WorkerFlag.SIGNALLED)

    def _hold(self) -> None:
        self._masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.pop(get_ident()))

    def _in_child(self) -> None:
        self.uninstall()
        self._release()

    def _obey(self, number: int) -> None:
        """End like a process without a handler."""
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
