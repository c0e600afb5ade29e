"""How fast this node's workers step, where they saved last: what others want to know of them."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from gpuops.wire import STEP_UNKNOWN, Beat, Phase

# A request reaches every rank of the run in at most about this time.
SPREAD_S = 1.5
_KEPT = 32


class Pace:
    """One generation's last steps, and the newest step after which a checkpoint was completed.

    A checkpoint is known by the word of the keeper that holds it, or by the script's own,
    ``gpuops.phase("checkpoint")``; which one was loaded by the keeper's word, or by the first step
    after ``gpuops.phase("restore")``.
    """

    def __init__(self) -> None:
        self.checkpoint_step: int | None = None
        self._loaded: int | None = None
        self._has_restored: set[int] = set()
        self._has_saved = False
        self._steps_ns: dict[int, list[int]] = {}
        self._highest: int | None = None
        self._saving: dict[int, int | None] = {}
        self._step_of: dict[int, int] = {}

    def begin(self) -> None:
        """Forget the workers of the last generation, not what they saved."""
        self._steps_ns.clear()
        self._saving.clear()
        self._step_of.clear()
        self._has_restored.clear()
        self._has_saved = False
        self._loaded = self._highest = None

    @property
    def base_step(self) -> int | None:
        """Return the step of the checkpoint that a failure now would be soon after.

        The newest that was saved or loaded by these workers, else the newest that is known.
        """
        if self._loaded is None or self._has_saved:
            return self.checkpoint_step
        return self._loaded

    def kept(self, step: int, *, is_new: bool) -> None:
        """Take it from the keeper that its newest state is that of *step*.

        It may be lower than what was known: steps are made again. *is_new*: these workers saved it.
        """
        self.checkpoint_step = step
        self._has_saved = self._has_saved or is_new

    def loaded(self, step: int) -> None:
        """Take it from the keeper that these workers go on from the state of *step*."""
        self._loaded = step

    def feed(self, by_rank: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the next beats."""
        for rank, beats in by_rank.items():
            for beat in beats:
                self._feed_one(rank, beat)

    def _feed_one(self, rank: int, beat: Beat) -> None:
        # A script that says its steps beats twice in each: by its word, and by its optimizer.
        is_same = beat.step != STEP_UNKNOWN and beat.step == self._step_of.get(rank)
        if beat.step != STEP_UNKNOWN:
            self._step_of[rank] = beat.step
            self._highest = max(self._highest or 0, beat.step)
        if beat.phase is Phase.STEPPING and not is_same:
            times = self._steps_ns.setdefault(rank, [])
            times.append(beat.mono_ns)
            del times[:-_KEPT]
        if beat.phase is Phase.CHECKPOINT:
            self._saving[rank] = self._step_of.get(rank)
        elif rank in self._saving:
            saved = self._saving.pop(rank)
            if saved is not None and beat.phase is not Phase.RAISED:
                self.checkpoint_step = max(self.checkpoint_step or 0, saved)
                self._has_saved = True
        if beat.phase is Phase.RESTORE:
            self._has_restored.add(rank)
        elif beat.phase is Phase.STEPPING and rank in self._has_restored:
            self._has_restored.clear()
            if self._loaded is None and beat.step > 1:
                self._loaded = beat.step - 1

    def step_s(self) -> float | None:
        """Return the time of a step in the median, None before the second."""
        # Also asked by the control thread, while beats of another rank may come in.
        by_rank = [list(times) for times in list(self._steps_ns.values())]
        gaps = [(b - a) / 1e9 for times in by_rank for a, b in pairwise(times)]
        return median(gaps) if gaps else None

    def common_step(self) -> int | None:
        """Return a step that no rank has begun by the time it hears of it; None where unknown."""
        step_s = self.step_s()
        if self._highest is None or step_s is None:
            return None
        return self._highest + 1 + math.ceil(SPREAD_S / max(step_s, 1e-4))
