"""The end of a run on several nodes: what was saved last is committed, and persists, on all.

It takes as long as something is written, within the time that was given; it is over as soon as any
node has said that it cannot, or `STALLED_S` after the last sign that any comes on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpuops.agent.checkpoint.api import FinalFlush
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.checkpoint.types import StateId
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S, format_seconds

COMMIT_S = 45.0  # until all nodes have the state in memory
STALLED_S = 60.0
TELL_S = 10.0  # until the others know of trouble here
LOOK_S = 0.2


@dataclass(slots=True)
class FinalCommit:
    """One node's part in it.

    *look* takes in how far the keeper is and says whether it is there; *newest* is the newest state
    that it has committed.
    """

    agreement: CommitFollower
    look: Callable[[], bool]
    newest: Callable[[], StateId | None]
    pause: Callable[[float], object]
    clock: Clock
    _given_up: tuple[StateId, str] | None = None
    _sign: object = None
    _sign_ns: int = 0
    _trouble_ns: int | None = None

    def persist(self, within_s: float) -> FinalFlush | None:
        """Have all nodes write the newest state; None where nobody sees to it that all do."""
        agreement, began_ns = self.agreement, self.clock.mono_ns()
        self._await_commit(min(COMMIT_S, within_s / 2))
        newest = self.newest()
        if not agreement.has_directory:
            return FinalFlush(newest=newest, has_place=False, why="nobody named a directory")
        if newest is None:
            return FinalFlush(why="nothing was saved")
        agreement.must_persist = True
        try:
            why = self._written(newest, began_ns, within_s)
        finally:
            agreement.must_persist = False
        if why is None:
            return None
        last = agreement.last
        if not why and last is not None and last > newest:
            why = agreement.why_missed(last) or "not all nodes have it"
            newest = last
        elif why:
            self._given_up = (newest, why)
        return FinalFlush(
            state=agreement.persisted,
            newest=newest,
            fitted=not why,
            directory=agreement.directory,
            why=why or None,
        )

    def _await_commit(self, within_s: float) -> None:
        """Wait for the agreement of all on what the ranks saved last."""
        agreement, began_ns = self.agreement, self.clock.mono_ns()
        while agreement.is_on and agreement.is_led() and agreement.is_uncommitted:
            is_missed = agreement.last is not None and agreement.why_missed(agreement.last)
            if is_missed or self._seconds_since(began_ns) >= within_s:
                break
            self.pause(LOOK_S)
            agreement.fetch()
            self.look()

    def _written(self, newest: StateId, began_ns: int, within_s: float) -> str | None:
        """Return "" once *newest* persists, else why it does not; None where nobody judges."""
        agreement = self.agreement
        self._sign, self._sign_ns = agreement.sign, self.clock.mono_ns()
        self._trouble_ns = None
        while True:
            agreement.fetch()
            is_there = self.look()
            if agreement.persisted is not None and agreement.persisted >= newest:
                return ""
            why = self._why_never(newest) or ("" if is_there else "its keeper is gone")
            why = why or self._why_no_longer()
            if why or not agreement.is_led() or not agreement.is_on:
                return why or None
            if self._seconds_since(began_ns) >= within_s:
                return "not all nodes have written their shards"
            self.pause(LOOK_S)

    def _why_never(self, newest: StateId) -> str:
        """Return why *newest* was given up by all, "" where it was not."""
        if self._given_up is not None and self._given_up[0] >= newest:
            return self._given_up[1]
        return self.agreement.why_missed(newest)

    def _why_no_longer(self) -> str:
        """Return why nobody need wait any longer, "" where there is hope."""
        agreement, now_ns = self.agreement, self.clock.mono_ns()
        if agreement.trouble:
            self._trouble_ns = self._trouble_ns or now_ns
            return agreement.trouble if self._seconds_since(self._trouble_ns) >= TELL_S else ""
        self._trouble_ns = None
        if agreement.sign != self._sign:
            self._sign, self._sign_ns = agreement.sign, now_ns
        if self._seconds_since(self._sign_ns) < STALLED_S:
            return ""
        names = ", ".join(agreement.behind) or "a node"
        return f"{names} has written nothing for {format_seconds(STALLED_S)}"

    def _seconds_since(self, then_ns: int) -> float:
        return (self.clock.mono_ns() - then_ns) / NS_PER_S
