"""What one failure costs, by phase: moments in, seconds out. All times are monotonic nanoseconds.

The phases follow each other without gap or overlap, so that they add up to the time from the last
progress before the failure to the moment when the job is past its highest step again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuops.units import NS_PER_S
from gpuops.wire import Beat, Phase


@dataclass(slots=True, kw_only=True)
class Toll:
    """When the phases of one failure ended; None: not yet.

    ``progress_ns`` is the last progress before it. A decision counts once the workers are gone as
    well. ``goes_on`` False: nothing is tried any more, so that nothing is lost after the decision.
    """

    progress_ns: int
    detected_ns: int
    decided_ns: int | None = None
    stopped_ns: int | None = None
    started_ns: int | None = None
    stepped_ns: int | None = None
    restore_ns: int = 0
    goes_on: bool = True

    def lost_s(self, until_ns: int | None = None) -> dict[str, float]:
        """Return the seconds of each phase that is over.

        With *until_ns* also those of the phase that is not: up to that moment, the last one there
        is. What is made again (``redo``) is not in it.
        """
        found: dict[str, float] = {}
        cursor_ns = self.progress_ns
        for phase, end_ns in self._ends():
            is_over = end_ns is not None and (until_ns is None or end_ns <= until_ns)
            if not is_over and until_ns is None:
                break
            stop_ns = max(end_ns if is_over and end_ns is not None else until_ns or 0, cursor_ns)
            found[phase] = (stop_ns - cursor_ns) / NS_PER_S
            cursor_ns = stop_ns
            if not is_over:
                break
        return self._with_restore(found)

    def _ends(self) -> list[tuple[str, int | None]]:
        decided_ns = self.decided_ns
        if decided_ns is not None and self.stopped_ns is not None:
            decided_ns = max(decided_ns, self.stopped_ns)
        ends = [("detect", self.detected_ns), ("decide", decided_ns)]
        if self.goes_on:
            ends += [("rendezvous", self.started_ns), ("init", self.stepped_ns)]
        return ends

    def _with_restore(self, found: dict[str, float]) -> dict[str, float]:
        restore_s = min(self.restore_ns / NS_PER_S, found.get("init", 0.0))
        if restore_s > 0:
            found = {**found, "init": found["init"] - restore_s, "restore": restore_s}
        return found


@dataclass(slots=True)
class Restoring:
    """How long the ranks of one attempt read their checkpoint, as beats or the keeper tell."""

    _began: dict[int, int] = field(default_factory=dict)
    _took: dict[int, int] = field(default_factory=dict)
    _told_ns: int = 0

    def feed(self, rank: int, beats: Iterable[Beat]) -> None:
        """Take the next beats of *rank* in."""
        for beat in beats:
            began_ns = self._began.pop(rank, None)
            if began_ns is not None:
                self._took[rank] = self._took.get(rank, 0) + beat.mono_ns - began_ns
            if beat.phase is Phase.RESTORE:
                self._began[rank] = beat.mono_ns

    def told(self, seconds: float) -> None:
        """Take it from the keeper that a rank took so long: its script may not say so in beats."""
        self._told_ns = max(self._told_ns, round(seconds * NS_PER_S))

    @property
    def longest_ns(self) -> int:
        """Return the time of the rank that took longest: the others waited for it."""
        return max(self._told_ns, *self._took.values(), 0)
