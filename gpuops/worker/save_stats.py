"""What one rank saved and skipped, for its statistics and its log."""

import logging
import re
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from gpuops.checkpoint.keeper.rank_client import NO_ANSWER
from gpuops.units import format_seconds
from gpuops.worker.staging.copy_plan import some_names

_log = logging.getLogger(__name__)

N_TORN_MAX = 2  # copies beside the training that were torn; a third is not tried
N_RESERVED_WARN = 3  # consecutive saves without memory of their layout; a few are harmless
N_LATE_WARN = 8  # consecutive saves that came later than they were due
_N_STALLS = 64
_STATE = re.compile(r"step \d+ \(epoch \d+\)")  # a `StateId` as text, removed from reasons


class SaveStats:
    """Counts the saves of one rank, and logs each kind of trouble once.

    *every*: how often the user wants to save, "" where that is for us to choose.
    """

    def __init__(self, *, is_rank_zero: bool, every: str) -> None:
        self._is_rank_zero = is_rank_zero
        self._every = every
        self._waited = False  # since the last copy a save was skipped, until nodes agree
        self._late: deque[tuple[int, float]] = deque(maxlen=N_LATE_WARN + 1)  # steps and times
        self._n_saved = 0
        self._n_torn = 0
        self._n_reserved_in_row = 0
        self._skipped: Counter[str] = Counter()
        self._stalls_s: deque[float] = deque(maxlen=_N_STALLS)
        self._warned: set[str] = set()

    @property
    def may_overlap(self) -> bool:
        """Return whether a copy may still be made beside the training."""
        return self._n_torn < N_TORN_MAX

    def saved(self) -> None:
        self._n_saved += 1

    def copied(self, step: int, now_s: float) -> None:
        """Record that the state after *step* is copied; warn once where that is often late."""
        self._n_reserved_in_row = 0
        if not self._waited:
            self._late.clear()
        self._waited = False
        self._late.append((step, now_s))
        if len(self._late) > N_LATE_WARN and self._every and self._is_rank_zero:
            first, first_s = self._late[0]
            n_steps, seconds = (step - first) / N_LATE_WARN, (now_s - first_s) / N_LATE_WARN
            _log.warning(
                "every=%s is not met: a state is saved every %.3g steps (%s), since all nodes "
                "agree on one before they save the next; training does not wait for that",
                self._every,
                n_steps,
                format_seconds(seconds),
            )
            self._every = ""  # once

    def stalled(self, seconds: float) -> None:
        """Record for how long a save stopped the training."""
        self._stalls_s.append(seconds)

    def skip(self, why: str, *, is_due: bool = True, awaits_nodes: bool = False) -> None:
        """Record that a save was skipped; one that was not due is not counted.

        *awaits_nodes*: the state before is not committed by all nodes yet.
        """
        self._waited = self._waited or not is_due or awaits_nodes
        if is_due:
            self._skipped[_STATE.sub("the state before", why)] += 1
        if why == NO_ANSWER and self._is_rank_zero:
            self.warn_once(f"{NO_ANSWER}: no checkpoints are saved until it does")

    def skip_reserved(self, why: str, changed_names: str = "") -> None:
        """Record a save that needed memory of another layout; warn after several in a row.

        *changed_names*: of the tensors that made it necessary.
        """
        self.skip(why)
        self._n_reserved_in_row += 1
        if self._n_reserved_in_row == N_RESERVED_WARN:
            _log.warning(
                "the shapes of the state changed at each of the last %d saves (%s), and no "
                "checkpoint is saved while that continues: reserve room for what grows",
                N_RESERVED_WARN,
                changed_names,
            )

    def torn(self, step: int, written: Sequence[str]) -> None:
        """Record that tensors were *written* while they were copied, so that the copy is void.

        The first time it is logged.
        """
        self.skip("tensors were written while they were copied")
        self._n_torn += 1
        if self._n_torn == 1:
            _log.warning(
                "the state after step %d is not saved: %s changed while it was copied, before the "
                "next step of an optimizer (max_norm, clamping, train() of an optimizer, merged "
                "adapters); if that happens again, the training waits for each copy from then on: "
                "to avoid it, write before step(), or in the optimizer's step",
                step,
                some_names(written),
            )

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s", text)

    def as_dict(self) -> dict[str, Any]:
        return {
            "saved": self._n_saved,
            "skipped": dict(self._skipped),
            "stall_s": self._stalls_s[-1] if self._stalls_s else None,
            "stall_median_s": median(self._stalls_s) if self._stalls_s else None,
        }
