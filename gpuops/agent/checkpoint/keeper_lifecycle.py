"""The life-cycle of this node's keeper as its agent sees it; pure.

A keeper may die again and again, for lack of memory for example, and restarts take memory and time
from the training: so there are a few attempts with growing delays, and then none for a while.
"""

from dataclasses import dataclass, replace
from enum import Enum

from gpuops.agent.checkpoint.api import StartedKeeper
from gpuops.agent.status.state import CheckpointState
from gpuops.checkpoint.agreement.progress import KeeperProgress
from gpuops.checkpoint.keeper.messages import KeeperStatus
from gpuops.checkpoint.types import StateId
from gpuops.control.record import Roster

RESTART_DELAYS_S = (0.0, 10.0, 60.0)  # of the first, second, … restart within the window
RESTART_WINDOW_S = 600.0
_NO_STATUS = KeeperStatus(progress=KeeperProgress())


class KeeperPhase(Enum):
    """What the agent does next with the keeper."""

    STARTING = "starting"  # await its first status; where there is none, `begin` starts one
    SERVING = "serving"
    RESTARTING = "restarting"  # it died under workers that use it: start another one when due
    FINISHING = "finishing"  # the run is over here: start none any more
    ENDED = "ended"  # or released, for the next agent


_AWAITED = {KeeperPhase.STARTING, KeeperPhase.RESTARTING}


@dataclass(frozen=True, slots=True)
class KeeperGeneration:
    """The generation that a keeper is prepared for."""

    number: int
    n_nodes: int
    excluded_step: int | None
    roster: Roster | None


@dataclass(frozen=True, slots=True)
class KeeperLifecycle:
    """The ``phase``, and what is known in it; the methods return what comes next.

    ``keeper`` answers. ``generation`` has workers that use it; ``pid`` was prepared for them.
    ``is_used`` False: some other node has no keeper, so that nothing is saved. ``epoch``: of the
    states that the workers have saved, None while they have saved none and may still ask what to
    load. ``status``: the last one of a keeper. ``first`` is what ``newest`` was when the generation
    began. ``since_ns``: when the newest state was first known. ``died_with``: the newest state of
    the previous keeper, until another one is prepared; ``lost``: one that did not persist.
    """

    phase: KeeperPhase = KeeperPhase.STARTING
    keeper: StartedKeeper | None = None
    generation: KeeperGeneration | None = None
    pid: int | None = None
    is_used: bool = True
    epoch: int | None = None
    status: KeeperStatus = _NO_STATUS
    first: StateId | None = None
    newest: StateId | None = None
    persisted: StateId | None = None
    since_ns: int | None = None
    died_with: StateId | None = None
    died_s: float = 0.0
    lost: StateId | None = None
    restarts_s: tuple[float, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return whether no keeper is to be started any more."""
        return self.phase in {KeeperPhase.FINISHING, KeeperPhase.ENDED}

    def started(self, keeper: StartedKeeper) -> "KeeperLifecycle":
        """Use *keeper*."""
        return replace(self, keeper=keeper)

    def polled(
        self, status: KeeperStatus, persisted: StateId | None, now_ns: int
    ) -> "KeeperLifecycle":
        """Learn the keeper's *status* at *now_ns*; *persisted* is the newest in the directory."""
        newest, is_first = status.progress.newest, self.phase in _AWAITED
        has_saved = newest is not None and status.epoch == newest.epoch
        is_same = self.since_ns is not None and (newest or persisted) == self._known
        return replace(
            self._moved(KeeperPhase.SERVING),
            epoch=status.epoch if has_saved and self.generation is not None else self.epoch,
            status=status,
            first=newest if is_first else self.first,
            newest=newest,
            persisted=persisted,
            since_ns=self.since_ns if is_same else now_ns,
        )

    def between_generations(self, *, is_used: bool) -> "KeeperLifecycle":
        """Forget the workers of the generation before, which are gone."""
        life = replace(self._moved(KeeperPhase.STARTING), generation=None, is_used=is_used)
        return replace(life, epoch=None, lost=None)

    def prepared(self, generation: KeeperGeneration, *, is_used: bool) -> "KeeperLifecycle":
        """Have the workers of *generation* use the keeper."""
        pid = None if self.keeper is None else self.keeper.pid
        return replace(self, generation=generation, pid=pid, is_used=is_used, died_with=None)

    def died(self, now_s: float) -> "KeeperLifecycle":
        """Give the keeper up, which does not answer at *now_s*."""
        has_workers, newest = self.generation is not None and self.is_used, self.newest
        is_lost = newest is not None and (self.persisted is None or self.persisted < newest)
        return replace(
            self._moved(KeeperPhase.RESTARTING if has_workers else KeeperPhase.STARTING),
            keeper=None,
            newest=None,
            since_ns=None,
            died_with=newest or self.died_with,
            died_s=now_s,
            lost=newest if is_lost else self.lost,
        )

    def must_restart(self, now_s: float) -> bool:
        """Return whether to start another keeper now, for workers that run."""
        recent = self._recent_restarts(now_s)
        if self.phase is not KeeperPhase.RESTARTING or len(recent) == len(RESTART_DELAYS_S):
            return False
        return now_s - max((self.died_s, *recent)) >= RESTART_DELAYS_S[len(recent)]

    def restarting(self, now_s: float) -> "KeeperLifecycle":
        """Count an attempt to restart it, successful or not."""
        return replace(self, restarts_s=(*self._recent_restarts(now_s), now_s))

    def _recent_restarts(self, now_s: float) -> tuple[float, ...]:
        return tuple(each for each in self.restarts_s if now_s - each < RESTART_WINDOW_S)

    def finishing(self) -> "KeeperLifecycle":
        """Start no keeper any more."""
        return self._moved(KeeperPhase.FINISHING)

    def ended(self) -> "KeeperLifecycle":
        """Have no keeper any more: it was ended or released."""
        return replace(self, phase=KeeperPhase.ENDED, keeper=None)

    def _moved(self, phase: KeeperPhase) -> "KeeperLifecycle":
        return self if self.is_over else replace(self, phase=phase)

    @property
    def _known(self) -> StateId | None:
        return self.newest or self.persisted

    @property
    def state(self) -> CheckpointState:
        """The state of the checkpoints, for the agent's status."""
        status, persisted, is_alive = self.status, self.persisted, self.keeper is not None
        known = self._known if is_alive else None
        return CheckpointState(
            step=None if known is None else known.step,
            epoch=None if known is None else known.epoch,
            since_ns=None if known is None else self.since_ns,
            tier=None if known is None else ("memory" if self.newest else "persistent"),
            persisted_step=None if persisted is None else persisted.step,
            verified_step=None if status.verified is None else status.verified.step,
            committed=status.n_committed,
            skipped=status.skipped,
            is_alive=is_alive,
            copies=1 + status.n_holders - status.n_holders_gone if is_alive else 1,
            is_used=self.is_used or not is_alive,
        )
