"""What of the keeper's events goes into the run's journal and to the user.

States are committed with every step, so commits and skips are counted and recorded once a minute.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence

from gpuops.agent.checkpoint.api import FinalFlush, StartedKeeper
from gpuops.agent.checkpoint.keeper_events import (
    ALIKE,
    APART,
    RESTORED,
    KeeperEvent,
    SaveCounter,
    is_counted,
    resumed,
    single,
)
from gpuops.agent.journal.payloads import LastSave
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.monitors.progress import StepTracker
from gpuops.checkpoint.types import CheckpointError, KeeperError, StateId
from gpuops.host.clock import Clock
from gpuops.model import FailureClass, Severity
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

TOLD_EVERY_S = 60.0
# What is wrong with the state itself, or with where it is kept: an incident of its own.
_TROUBLE = {
    "persist_failed": "persisting a checkpoint",
    "corrupt": "the bytes of a checkpoint",
}
_NUMBERS = re.compile(r"[0-9a-f]{16}|\d+")


class CheckpointRecord:
    """The record of one agent's keeper; *n_ranks* are this node's.

    *say* tells the user what is worth a warning, *say_news* what went well.
    """

    def __init__(
        self,
        chronicle: RunJournal,
        pace: StepTracker,
        clock: Clock,
        say: Callable[[str], None],
        *,
        say_news: Callable[[str], None] | None = None,
        n_ranks: int,
    ) -> None:
        self._chronicle = chronicle
        self._pace = pace
        self._clock = clock
        self._say = say
        self._say_news = say_news or say
        self._n_ranks = n_ranks
        self._tally = SaveCounter()
        self._told_ns = clock.mono_ns()
        self._loads: list[KeeperEvent] = []
        self._has_said = False
        self._warned: dict[str, str] = {}  # of which trouble last
        self._repeats: Counter[str] = Counter()

    def began(
        self, started: StartedKeeper, newest: StateId | None, *, lost: StateId | None = None
    ) -> None:
        """Record that there is a keeper; the user is shown one that was adopted with a state."""
        payload = {
            "adopted": started.adopted,
            "pid": started.pid,
            "step": None if newest is None else newest.step,
            "epoch": None if newest is None else newest.epoch,
            "lost_step": None if lost is None else lost.step,
            "ended": started.ended or None,
        }
        self._chronicle.checkpoint("checkpoint.keeper", payload)
        if started.ended:
            self._hung(started, lost)
        elif lost is not None and newest is None:
            self._say(
                f"the keeper of the checkpoints died, and with it the state of step {lost.step} "
                "in memory; another one has begun, and the next state is saved as ever"
            )
        if started.adopted and newest is not None and lost is None:
            self._say_news(
                f"found the checkpoint of step {newest.step} in memory, of an agent of this job "
                "that was killed: the workers go on from there"
            )

    def _hung(self, started: StartedKeeper, lost: StateId | None) -> None:
        """Tell of a keeper that hung and was ended, so that another one could begin."""
        self.failed("keeping checkpoints in memory", KeeperError(started.ended))
        what = "what it held" if lost is None else f"the state of step {lost.step}"
        self._say(
            f"the keeper of the checkpoints hung and was ended ({started.ended}), and with it "
            f"{what} in memory; another one has begun, and the next state is saved as ever"
        )

    def heard(self, events: Sequence[KeeperEvent]) -> None:
        """Record *events*, one by one or counted."""
        for event in events:
            if is_counted(event):
                self._tally.add(event)
                continue
            self._chronicle.checkpoint(*single(event))
            self._replicas(event)
            if event.kind in _TROUBLE:
                self._trouble(event)
            elif event.kind == "persisted":
                self._warned.pop("persist_failed", None)
        self._resumed([event for event in events if event.kind == RESTORED])
        if self._clock.mono_ns() - self._told_ns >= TOLD_EVERY_S * NS_PER_S:
            self._tell()

    def newest(self, state: StateId, *, is_new: bool) -> None:
        """Let the restart decision know up to where the job is safe."""
        self._pace.kept(state.step, is_new=is_new)

    def failed(self, what: str, error: Exception) -> None:
        """Record a failure of ours; training goes on without."""
        log.warning("%s failed: %s", what, error)
        self._chronicle.tool_failed(what, error, "")

    def flushed(self, done: FinalFlush) -> None:
        """Record what became of a flush, and say so."""
        facts = LastSave(
            fitted=done.fitted,
            has_place=done.has_place,
            step=None if done.state is None else done.state.step,
            newest_step=None if done.newest is None else done.newest.step,
            seconds=done.seconds,
            within_s=done.within_s,
            directory=done.directory,
            why=done.why,
        )
        self._chronicle.saved_last(facts)
        if done.is_end and not done.fitted:
            error = CheckpointError(facts.words())
            self._chronicle.tool_failed("persisting the last checkpoint", error, "")
        (self._say_news if facts.fitted else self._say)(facts.words())

    def over(self) -> None:
        """Tell what was counted: a generation has ended, or the run has."""
        self._tell()
        for kind, times in self._repeats.items():
            self._chronicle.tool_failed_again(_TROUBLE[kind], times)
        self._repeats.clear()
        self._loads.clear()
        self._has_said = False

    def _tell(self) -> None:
        self._told_ns = self._clock.mono_ns()
        for kind, payload, severity in self._tally.take():
            self._chronicle.checkpoint(kind, payload, severity)

    def _resumed(self, loads: Sequence[KeeperEvent]) -> None:
        self._loads += loads
        found = resumed(self._loads) if loads else None
        if found is None:
            return
        self._pace.loaded(found.state.step)
        self._chronicle.resumed(found.words(), found.longest_s)
        if len(found.tiers) >= self._n_ranks and not self._has_said:
            self._has_said = True
            self._say_news(found.words())

    def _replicas(self, event: KeeperEvent) -> None:
        """Tell of ranks that differ where they must be equal; training goes on."""
        if event.differing is not None:
            found = event.differing
            self._chronicle.replicas_differ(found)
            where = f"gpuops runbook {FailureClass.REPLICAS_DIFFER.value}"
            self._say(f"replicas of the training state differ: {found.description}; {where}")
        elif event.kind == APART and event.why is not None:
            self._say(event.why)
        elif event.kind == ALIKE and event.state is not None and event.ranks is not None:
            self._chronicle.replicas_alike(event.ranks, event.state.step)

    def _trouble(self, event: KeeperEvent) -> None:
        """Warn of what is wrong; of the same again, with each try, only the number is shown."""
        same = _NUMBERS.sub("#", event.why or "")
        if self._warned.get(event.kind) == same:
            self._repeats[event.kind] += 1
            return
        self._warned[event.kind] = same
        which = "" if event.state is None else f"{event.state}: "
        error = CheckpointError(f"{which}{event.why or 'no reason was told'}")
        self.failed(_TROUBLE[event.kind], error)


class OverdueReporter:
    """What the leader records of them: each one; *say* tells the user, of the same again only once.

    Until there is another one nothing newer is in memory: a failure costs more than it should.
    """

    def __init__(self, chronicle: RunJournal, say: Callable[[str], None]) -> None:
        self._chronicle = chronicle
        self._say = say
        self._said = ""

    def gave_up(self, state: StateId, why: str) -> None:
        """Record that *state* was given up by all, for *why*."""
        payload = {"count": 1, "step": state.step, "epoch": state.epoch, "why": why}
        self._chronicle.checkpoint("checkpoint.given_up", payload, Severity.WARNING)
        if why != self._said:
            self._said = why
            self._say(f"the checkpoint of step {state.step} was given up: {why}")
