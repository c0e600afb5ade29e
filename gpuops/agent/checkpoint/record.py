"""Records the keeper's events in the run's journal and reports them to the user.

States are committed with every step, so commits and skips are counted and recorded once a minute.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuops.agent.checkpoint.api import FinalFlush, StartedKeeper
from gpuops.agent.checkpoint.keeper_events import (
    ALIKE,
    APART,
    FRESH_START,
    OFFERED,
    RESTORED,
    STEPS_DIFFER,
    KeeperEvent,
    SaveCounter,
    is_counted,
    journal_event,
    resume_report,
    state_json,
)
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.monitors.progress import StepTracker
from gpuops.checkpoint.types import CheckpointError, KeeperError, StateId, Tier
from gpuops.host.clock import Clock
from gpuops.model import FailureClass, Severity
from gpuops.units import NS_PER_S, format_seconds

log = logging.getLogger(__name__)

COUNTS_EVERY_S = 60.0
CORRUPT = "corrupt"
# Errors of saving, or of a copy in memory: each is an incident of gpuops itself, because it is not
# known whether the memory, the network or gpuops is to blame.
_TROUBLE = {
    "persist_failed": "persisting a checkpoint",
    CORRUPT: "verifying a checkpoint",
    "unreadable": "reading a checkpoint",
}
_NUMBERS = re.compile(r"[0-9a-f]{16}|\d+")


class CheckpointRecord:
    """Records what happens to one agent's keeper; *n_ranks* is the number of ranks on this node.

    *warn* shows a warning to the user, *say_news* good news.
    """

    def __init__(
        self,
        journal: RunJournal,
        step_tracker: StepTracker,
        clock: Clock,
        warn: Callable[[str], None],
        *,
        say_news: Callable[[str], None] | None = None,
        n_ranks: int,
    ) -> None:
        self._journal = journal
        self._step_tracker = step_tracker
        self._clock = clock
        self._warn = warn
        self._say_news = say_news or warn
        self._n_ranks = n_ranks
        self._counter = SaveCounter()
        self._counts_ns = clock.mono_ns()
        self._loads: list[KeeperEvent] = []
        self._has_shown = False
        self._lost: StateId | None = None  # with a keeper; nothing newer was saved since
        self._why_offered = ""
        self._known_damaged: set[StateId] = set()
        self._warned: dict[str, str] = {}  # the last reason by event kind
        self._repeats: Counter[str] = Counter()

    def keeper_started(
        self, started: StartedKeeper, newest: StateId | None, *, lost: StateId | None = None
    ) -> None:
        """Record that a keeper runs; tell the user if it was adopted with a state."""
        payload = {
            "adopted": started.adopted,
            "pid": started.pid,
            **state_json(newest),
            "lost_step": None if lost is None else lost.step,
            "ended": started.ended or None,
        }
        self._journal.checkpoint("checkpoint.keeper", payload)
        if lost is not None and (newest is None or newest < lost):
            self._lost = lost
        if started.ended:
            self.failed("keeping checkpoints in memory", KeeperError(started.ended))
        if started.ended or (lost is not None and newest is None):
            how = f"was ended ({started.ended})" if started.ended else "died"
            last = "" if lost is None else f" (the last one known: step {lost.step})"
            self._warn(
                f"the keeper of the checkpoints {how}, and the states in memory are lost{last}; it "
                "was restarted, and the next state is saved as usual"
            )
        if started.adopted and newest is not None and lost is None:
            self._say_news(
                f"found the checkpoint of step {newest.step} in memory, left by a killed agent of "
                "this job: the workers resume from it"
            )

    def record_events(self, events: Sequence[KeeperEvent]) -> None:
        """Record *events*, one by one or counted."""
        for event in events:
            if is_counted(event):
                self._counter.add(event)
                continue
            if event.kind in (OFFERED, FRESH_START):
                self._start(event)
                continue
            self._journal.checkpoint(*journal_event(event))
            self._replicas(event)
            if event.kind in _TROUBLE:
                self._trouble(event)
            elif event.kind == "persisted":
                self._warned.pop("persist_failed", None)
        self._record_loads([event for event in events if event.kind == RESTORED])
        if self._clock.mono_ns() - self._counts_ns >= COUNTS_EVERY_S * NS_PER_S:
            self._record_counts()

    def newest(self, state: StateId, *, is_new: bool) -> None:
        """Record the newest state in memory, on which the restart decision depends."""
        if self._lost is not None and state >= self._lost:
            self._lost = None
        self._step_tracker.saved(state.step, is_new=is_new)

    def failed(self, what: str, error: Exception) -> None:
        """Record a failure of gpuops; training continues."""
        log.warning("%s failed: %s", what, error)
        self._journal.tool_failed(what, error, "")

    def flushed(self, done: FinalFlush) -> None:
        """Record the result of a flush, and show it to the user."""
        text = done.to_text()
        self._journal.saved_last(done.to_json(), text)
        if done.is_end and not done.fitted:
            error = CheckpointError(text)
            self._journal.tool_failed("persisting the last checkpoint", error, "")
        (self._say_news if done.fitted else self._warn)(text)

    def waiting(self, at_most_s: float) -> None:
        """Show that the end of the run waits for other nodes, without the control store."""
        self._say_news(
            "waiting for other nodes to write their shards of the newest checkpoint, at most "
            f"{format_seconds(at_most_s)}: there is no control store to ask whether they still do"
        )

    def end_generation(self) -> None:
        """Record the counts: the generation, or the run, has ended."""
        self._record_counts()
        for kind, times in self._repeats.items():
            self._journal.tool_failed_again(_TROUBLE[kind], times)
        self._repeats.clear()
        self._loads.clear()
        self._has_shown = False
        self._why_offered = ""

    def _record_counts(self) -> None:
        self._counts_ns = self._clock.mono_ns()
        for kind, payload, severity in self._counter.take():
            self._journal.checkpoint(kind, payload, severity)

    def _record_loads(self, loads: Sequence[KeeperEvent]) -> None:
        self._loads += loads
        found = resume_report(self._loads) if loads else None
        if found is None:
            return
        self._step_tracker.loaded(found.state.step)
        text = found.to_text(self._why_offered)
        self._journal.resumed(text, found.longest_s)
        if len(found.tiers) >= self._n_ranks:
            self._show_start(text)

    def _start(self, event: KeeperEvent) -> None:
        """Record the state that the keeper offers to the ranks, or that it has none, and why."""
        why = event.why or ""
        lost = None if event.tier is Tier.MEMORY else self._lost
        if lost is not None:
            loss = (
                "the keeper of the checkpoints died, and the states in memory were lost with it"
                f" (the last one known: step {lost.step})"
            )
            why = f"{loss}; {why}" if why else loss
        self._why_offered = why
        kind, payload, severity = journal_event(replace(event, why=why or None))
        lost_step = None if lost is None else lost.step
        self._journal.checkpoint(kind, {**payload, "lost_step": lost_step}, severity)
        if event.kind == FRESH_START:
            self._show_start(f"the Checkpointer starts at step 0: {why}")

    def _show_start(self, text: str) -> None:
        """Tell the user what the workers start with, once in a generation."""
        if not self._has_shown:
            self._has_shown = True
            self._say_news(text)

    def _replicas(self, event: KeeperEvent) -> None:
        """Report replicas that differ; training continues."""
        if event.differing is not None:
            found = event.differing
            self._journal.replicas_differ(found)
            where = f"gpuops runbook {FailureClass.REPLICAS_DIFFER.value}"
            self._warn(f"replicas of the training state differ: {found.description}; {where}")
        elif event.kind in {APART, STEPS_DIFFER} and event.why is not None:
            self._warn(event.why)
        elif event.kind == ALIKE and event.state is not None and event.ranks is not None:
            self._journal.replicas_alike(event.ranks, event.state.step)

    def _trouble(self, event: KeeperEvent) -> None:
        """Warn of an error; repetitions of the same one are only counted."""
        if event.kind == CORRUPT and event.state is not None and _is_on_disk(event):
            self._damaged(event.state, event.why or "no reason was given")
            return
        same = _NUMBERS.sub("#", event.why or "")
        if self._warned.get(event.kind) == same:
            self._repeats[event.kind] += 1
            return
        self._warned[event.kind] = same
        which = "" if event.state is None else f"{event.state}: "
        error = CheckpointError(f"{which}{event.why or 'no reason was given'}")
        self.failed(_TROUBLE[event.kind], error)

    def _damaged(self, state: StateId, why: str) -> None:
        """Report a state that is damaged on disk, once: storage failed, not gpuops."""
        if state not in self._known_damaged:
            self._known_damaged.add(state)
            self._journal.state_damaged(why, step=state.step, epoch=state.epoch)
            self._warn(f"the checkpoint of step {state.step} is damaged on disk: {why}")


def _is_on_disk(event: KeeperEvent) -> bool:
    return event.tier is Tier.PERSISTENT or event.directory is not None


class OverdueReporter:
    """Records states that the leader dropped as overdue; *warn* gets each reason once in a row.

    Until a later state is committed nothing newer is in memory, so that a failure costs more.
    """

    def __init__(self, journal: RunJournal, warn: Callable[[str], None]) -> None:
        self._journal = journal
        self._warn = warn
        self._last_why = ""

    def gave_up(self, state: StateId, why: str) -> None:
        """Record that all nodes gave up *state*, for *why*."""
        payload = {"count": 1, **state_json(state), "why": why}
        self._journal.checkpoint("checkpoint.given_up", payload, Severity.WARNING)
        if why != self._last_why:
            self._last_why = why
            self._warn(f"the checkpoint of step {state.step} was given up: {why}")
