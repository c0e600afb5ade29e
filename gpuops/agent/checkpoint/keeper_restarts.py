"""When to restart a keeper that died while workers run, and how to wait for it.

A keeper may die again and again, for lack of memory for example, and restarts take memory and time
from the training: so there are a few attempts with growing delays, and then none for a while.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.checkpoint.types import StateId
from gpuops.control.record import Roster

WAITS_S = (0.0, 10.0, 60.0)
WINDOW_S = 600.0
POLL_S = 0.1


@dataclass(slots=True)
class KeeperRestarts:
    """Schedules restarts: *waits_s* has the delay of the first, second, … within *window_s*."""

    waits_s: tuple[float, ...] = WAITS_S
    window_s: float = WINDOW_S
    _attempts_s: deque[float] = field(default_factory=deque)

    def is_due(self, now_s: float, lost_s: float) -> bool:
        """Return whether to restart now a keeper that was lost at *lost_s*."""
        while self._attempts_s and now_s - self._attempts_s[0] >= self.window_s:
            self._attempts_s.popleft()
        n_attempts = len(self._attempts_s)
        if n_attempts >= len(self.waits_s):
            return False
        since_s = max([lost_s, *self._attempts_s])
        return now_s - since_s >= self.waits_s[n_attempts]

    def record_attempt(self, now_s: float) -> None:
        """Record an attempt, successful or not."""
        self._attempts_s.append(now_s)


@dataclass(frozen=True, slots=True)
class KeeperGeneration:
    """The generation for which the keeper ``pid`` was prepared.

    ``epoch``: of the states that the workers have saved, None while they have saved none and may
    still ask what to load. ``newest`` of them was lost with the keeper, at ``lost_s``.
    """

    number: int
    n_nodes: int
    excluded_step: int | None
    roster: Roster | None
    pid: int | None = None
    epoch: int | None = None
    newest: StateId | None = None
    lost_s: float | None = None


class PollRequest:
    """Lets other threads ask the polling thread for a poll, and wait for its end.

    A keeper may be slow to answer; the wait is bounded all the same.
    """

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._polled = threading.Condition()
        self._n_asked = self._n_answered = 0

    def ask(self, wait_s: float) -> bool:
        """Return True after a poll that began after this call; False after *wait_s*."""
        with self._polled:
            self._n_asked += 1
            number = self._n_asked
            self._wake.set()
            return self._polled.wait_for(lambda: self._n_answered >= number, wait_s)

    def wake(self) -> None:
        """End the wait of the polling thread."""
        self._wake.set()

    def wait(self, wait_s: float) -> None:
        """Wait for a request, *wait_s* seconds at most; for the polling thread."""
        self._wake.wait(wait_s)
        self._wake.clear()

    def begin(self) -> int:
        """Return what to give to `end` after a poll that begins now."""
        return self._n_asked

    def end(self, number: int) -> None:
        """Wake the threads that asked before that poll began."""
        with self._polled:
            self._n_answered = max(self._n_answered, number)
            self._polled.notify_all()


def awaited(act: Callable[[], object], waiting: Callable[[], None]) -> None:
    """Run *act*, which is bounded in time, in a thread; call *waiting* until it has finished.

    An exception of *waiting* ends the wait, not *act*: the keeper continues on its own.
    """
    acting = threading.Thread(target=act, name="gpuops-last-save", daemon=True)
    acting.start()
    acting.join(POLL_S)
    while acting.is_alive():
        waiting()
        acting.join(POLL_S)
