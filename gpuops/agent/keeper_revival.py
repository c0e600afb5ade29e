"""When a keeper that died under running workers is started anew, and what it is told then.

One that dies at once again and again, for want of memory for example, is not worth the memory and
the time of the training beside it: a few tries, ever later, and then none for a while.
"""

from collections import deque
from dataclasses import dataclass, field

from gpuops.checkpoint.states import StateId
from gpuops.control.record import Roster

WAITS_S = (0.0, 10.0, 60.0)
WINDOW_S = 600.0


@dataclass(slots=True)
class Restarts:
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
class Begun:
    """The generation that the keeper ``pid`` was told of.

    ``epoch``: of the states that its workers have saved in it, None while they have saved none and
    may still ask what to load. ``newest`` of them was lost with the keeper, at ``lost_s``.
    """

    generation: int
    n_nodes: int
    excluded_step: int | None
    roster: Roster | None
    pid: int | None
    epoch: int | None = None
    newest: StateId | None = None
    lost_s: float | None = None
