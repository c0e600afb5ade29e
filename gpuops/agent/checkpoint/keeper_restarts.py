"""When to start a keeper again that died under running workers, and how to wait for it.

One that dies at once again and again, for want of memory for example, is not worth the memory and
the time of the training beside it: a few tries, ever later, and then none for a while.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuops.checkpoint.types import StateId
from gpuops.control.record import Roster

WAITS_S = (0.0, 10.0, 60.0)
WINDOW_S = 600.0
LOOK_S = 0.1


@dataclass(slots=True)
class KeeperRestarts:
    """Says when to try: after so many seconds the first, second, … time within *window_s*."""

    waits_s: tuple[float, ...] = WAITS_S
    window_s: float = WINDOW_S
    _tried_s: deque[float] = field(default_factory=deque)

    def is_due(self, now_s: float, lost_s: float) -> bool:
        """Say whether one that was lost at *lost_s* is to be started anew now."""
        while self._tried_s and now_s - self._tried_s[0] >= self.window_s:
            self._tried_s.popleft()
        n_tried = len(self._tried_s)
        if n_tried >= len(self.waits_s):
            return False
        since_s = max([lost_s, *self._tried_s])
        return now_s - since_s >= self.waits_s[n_tried]

    def tried(self, now_s: float) -> None:
        """Take note of a try, whatever comes of it."""
        self._tried_s.append(now_s)


@dataclass(frozen=True, slots=True)
class KeeperGeneration:
    """The generation that the keeper ``pid`` knows.

    ``epoch``: of the states that its workers have saved in it, None while they have saved none and
    may still ask what to load. ``newest`` of them was lost with the keeper, at ``lost_s``.
    """

    generation: int
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
        self._looked = threading.Condition()
        self._n_asked = self._n_answered = 0

    def ask(self, wait_s: float) -> bool:
        """Return True after a poll that began after this call; False after *wait_s*."""
        with self._looked:
            self._n_asked += 1
            number = self._n_asked
            self._wake.set()
            return self._looked.wait_for(lambda: self._n_answered >= number, wait_s)

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
        """Let those go on who asked before that poll began."""
        with self._looked:
            self._n_answered = max(self._n_answered, number)
            self._looked.notify_all()


def awaited(act: Callable[[], object], waiting: Callable[[], None]) -> None:
    """Do *act*, which is bounded in time, in a thread; call *waiting* until it is done.

    What *waiting* raises ends the wait, not the act: the keeper goes on with it by itself.
    """
    acting = threading.Thread(target=act, name="gpuops-last-save", daemon=True)
    acting.start()
    acting.join(LOOK_S)
    while acting.is_alive():
        waiting()
        acting.join(LOOK_S)
