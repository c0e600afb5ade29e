"""The end of a run on several nodes: the last state is committed, and persisted, on all of them.

This continues while any node writes, within the given time. It ends as soon as a node reports that
it cannot write, or `STALLED_S` after the last progress of any node.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpuops.agent.checkpoint.api import FinalFlush
from gpuops.agent.checkpoint.follower import CommitFollower
from gpuops.agent.checkpoint.messages import CommitRecord
from gpuops.checkpoint.types import StateId
from gpuops.host.clock import Clock
from gpuops.units import NS_PER_S, format_seconds

COMMIT_S = 45.0  # for all nodes to have the state in memory
STALLED_S = 60.0
REPORT_S = 10.0  # for the other nodes to learn of an error here
POLL_S = 0.2


@dataclass(slots=True)
class FinalCommit:
    """One node's part in it.

    *poll* polls the keeper and returns whether it is alive; *newest* returns the newest state that
    it has committed.
    """

    follower: CommitFollower
    poll: Callable[[], bool]
    newest: Callable[[], StateId | None]
    pause: Callable[[float], object]
    clock: Clock
    _given_up: tuple[StateId, str] | None = None
    _progress: object = None
    _progress_ns: int = 0
    _trouble_ns: int | None = None

    def persist(self, within_s: float) -> FinalFlush | None:
        """Have all nodes write the newest state; None where no leader coordinates them."""
        follower, began_ns = self.follower, self.clock.mono_ns()
        self._await_commit(min(COMMIT_S, within_s / 2))
        newest = self.newest()
        if follower.directory is None:
            return FinalFlush(newest=newest, has_place=False, why="no directory is configured")
        if newest is None:
            return FinalFlush(why="nothing was saved")
        follower.must_persist = True
        try:
            why = self._await_persisted(newest, began_ns, within_s)
        finally:
            follower.must_persist = False
        if why is None:
            return None
        last = follower.last
        if not why and last is not None and last > newest:
            why = follower.agreed.last.why_missed(last) or "not all nodes have it"
            newest = last
        elif why:
            self._given_up = (newest, why)
        return FinalFlush(
            state=follower.agreed.persisted,
            newest=newest,
            fitted=not why,
            directory=follower.directory,
            why=why or None,
        )

    def _await_commit(self, within_s: float) -> None:
        """Wait until all nodes have committed the last state of the ranks."""
        follower, began_ns = self.follower, self.clock.mono_ns()
        while follower.is_on and follower.is_led() and follower.is_uncommitted:
            last = follower.last
            is_missed = last is not None and follower.agreed.last.why_missed(last)
            if is_missed or self._seconds_since(began_ns) >= within_s:
                break
            self.pause(POLL_S)
            follower.fetch()
            self.poll()

    def _await_persisted(self, newest: StateId, began_ns: int, within_s: float) -> str | None:
        """Return "" once *newest* is persistent, else why it is not; None without a leader."""
        follower = self.follower
        self._progress, self._progress_ns = _progress_of(follower.agreed), self.clock.mono_ns()
        self._trouble_ns = None
        while True:
            follower.fetch()
            is_alive = self.poll()
            persisted = follower.agreed.persisted
            if persisted is not None and persisted >= newest:
                return ""
            why = self._why_missed(newest) or ("" if is_alive else "its keeper is gone")
            why = why or self._why_stalled()
            if why or not follower.is_led() or not follower.is_on:
                return why or None
            if self._seconds_since(began_ns) >= within_s:
                return "not all nodes have written their shards"
            self.pause(POLL_S)

    def _why_missed(self, newest: StateId) -> str:
        """Return why all nodes gave *newest* up, "" where they did not."""
        if self._given_up is not None and self._given_up[0] >= newest:
            return self._given_up[1]
        return self.follower.agreed.last.why_missed(newest)

    def _why_stalled(self) -> str:
        """Return why waiting longer is useless, "" while it is not."""
        follower, now_ns = self.follower, self.clock.mono_ns()
        if follower.trouble:
            self._trouble_ns = self._trouble_ns or now_ns
            return follower.trouble if self._seconds_since(self._trouble_ns) >= REPORT_S else ""
        self._trouble_ns = None
        progress = _progress_of(follower.agreed)
        if progress != self._progress:
            self._progress, self._progress_ns = progress, now_ns
        if self._seconds_since(self._progress_ns) < STALLED_S:
            return ""
        names = ", ".join(follower.agreed.last.behind) or "a node"
        return f"{names} has written nothing for {format_seconds(STALLED_S)}"

    def _seconds_since(self, then_ns: int) -> float:
        return (self.clock.mono_ns() - then_ns) / NS_PER_S


def _progress_of(record: CommitRecord) -> object:
    """Return a value that changes while any node makes progress with persisting."""
    return (record.committed, record.persist, record.sealed, record.persisted, record.last)
