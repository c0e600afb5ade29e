"""The files and the recorder of one agent's run: folder, journal, spool, kernel log.

A thread sends the spool to the store, so that training never waits for a database.
"""

import logging
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuops.agent.journal.event_drafts import EventDraft
from gpuops.agent.journal.payloads import NodeFacts, RunFacts
from gpuops.agent.journal.run_dir import RunDirectory, create_rings
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.launch.identity import RunIdentity
from gpuops.control.record import ControlRecord
from gpuops.control.step import DecisionRecord
from gpuops.errors import EXIT_OK, EXIT_REQUEUE, ProbeError, SpoolError
from gpuops.host.clock import Clock
from gpuops.host.kmsg import KernelRecord, kernel_records
from gpuops.host.xid import OffBusLines
from gpuops.incident.decision import RestartDecision
from gpuops.model import Event
from gpuops.rules import LogRule
from gpuops.store.events import new_event
from gpuops.store.spool.record import QueuedRecorder, Recorder

if TYPE_CHECKING:  # SQLAlchemy is imported late
    from gpuops.store.spool.send import FlushReport

log = logging.getLogger(__name__)

LINES_MAX = 2000
FIRST_AFTER_S = 5.0
EVERY_S = 15.0
DEADLINE_S = 5.0
RING_PARENTS = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108 mkdtemp makes it private


class AttemptKernelLog:
    """This node's kernel log since a mark; empty where it cannot be read. Never raises.

    It proves an OOM kill, or an Xid. Records are identified by their sequence number, not by time:
    the kernel's clock for its log drifts from the monotonic clock that is used everywhere else.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._mark: int | None = None

    def mark(self) -> None:
        """Set the mark to the end of the log."""
        records = self._read()
        self._mark = None if records is None else max((r.sequence for r in records), default=-1)

    def since_mark(self) -> tuple[str, ...]:
        """Return the newest lines after the mark, oldest first; none without a mark."""
        mark = self._mark
        if mark is None:
            return ()
        lines = [record.text for record in self._read() or () if record.sequence > mark]
        return tuple(lines[-LINES_MAX:])

    def _read(self) -> list[KernelRecord] | None:
        try:
            joiner = OffBusLines()
            return [joiner.join(record) for record in kernel_records(self._root)]
        except ProbeError:
            return None


class Flusher:
    """Calls *flush* (with its deadline in seconds) periodically, and once more at the end."""

    def __init__(self, flush: "Callable[[float], FlushReport]") -> None:
        self._flush = flush
        self._stop = threading.Event()
        self._last: FlushReport | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="gpuops-flusher", daemon=True)
        self._thread.start()

    def close(self, within_s: float = 2 * DEADLINE_S) -> str | None:
        """Flush a last time; return a note for the user on events that remain in the spool.

        Returns after *within_s* even if a file system or a server blocks the thread.
        """
        self._stop.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            return f"the store did not answer within {within_s:.0f} s"
        if self._error is not None:
            return self._error
        if self._last is None or not self._last.remaining:
            return None
        return f"{self._last.remaining} events wait in the spool: {self._last.note}"

    def _run(self) -> None:
        wait_s = FIRST_AFTER_S
        while not self._stop.wait(wait_s):
            self._flush_once()
            wait_s = EVERY_S
        self._flush_once()

    def _flush_once(self) -> None:
        try:
            self._last = self._flush(DEADLINE_S)
            self._error = None
        except SpoolError:
            # The recorder has already reported the problem of the spool.
            log.debug("flush failed", exc_info=True)
        except Exception as exc:  # boundary: a broken store must not end the run
            self._error = f"sending events to the store failed: {exc}"
            log.debug("flush failed", exc_info=True)


class DecisionLog:
    """Records the decisions on this run."""

    def __init__(self, journal: RunJournal) -> None:
        self._journal = journal
        self._proposed: dict[tuple[int, float], DecisionRecord] = {}
        self._recorded: tuple[int, float] | None = None

    def propose(self, decided: DecisionRecord) -> None:
        """Keep the inputs of this agent's own decision; `record` writes it once it is valid.

        From any thread. A decision that loses against another leader's replaces no earlier one.
        """
        self._proposed[_key(decided.decision)] = decided

    def record(self, record: ControlRecord, generation: int | None) -> None:
        """Write the decision in *record* if this agent made it, or if *generation* ran here."""
        decision = record.decision
        if decision is None or _key(decision) == self._recorded:
            return
        ours = self._proposed.get(_key(decision))
        if ours is not None:
            self._journal.decided(
                ours.decision,
                ours.reports,
                ours.cluster,
                by_us=True,
                note=ours.note,
                history=ours.history,
            )
        elif decision.failure.generation == generation:
            by = record.decided_by
            self._journal.decided(decision, (), None, by_us=False, decided_by=by)
        else:
            return
        self._recorded = _key(decision)

    def record_end(self, record: ControlRecord, *, leads: bool) -> None:
        """Write why a run has ended whose nodes still joined, if this agent ended it (*leads*)."""
        self.record(record, None)
        is_decided = record.decision is not None or record.drain_signal is not None
        if leads and record.exit_code and not is_decided:
            self._journal.rendezvous_failed(record.reason)


def _key(decision: RestartDecision) -> tuple[int, float]:
    """Return a key that is unique even for two decisions on one generation by two leaders."""
    return decision.failure.generation, decision.failure.at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended on this node, for the command to print."""

    exit_code: int
    outcome: str
    reason: str
    run_id: str | None = None
    run_dir: Path | None = None
    note: str | None = None
    goes_on: bool = False  # the run continues without this node


def ended_as(exit_code: int) -> str:
    """Return the store's outcome of a run that ended with *exit_code* by agreement."""
    if exit_code == EXIT_OK:
        return "completed"
    return "preempted" if exit_code == EXIT_REQUEUE else "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The constants of a run on this node, and the factories of its parts."""

    node: str
    clock: Clock
    root: Path
    run_parent: Path
    rules: Sequence[LogRule]
    node_facts: NodeFacts
    run_facts: Callable[[Path], RunFacts]
    make_recorder: Callable[[Path], Recorder]
    flush: "Callable[[float], FlushReport]"


class RunSession:
    """The record of one run by this agent."""

    def __init__(self, context: NodeContext, identity: RunIdentity, *, leads: bool) -> None:
        path = context.run_parent / identity.folder
        self.identity = identity
        self.leads = leads
        self.rules = context.rules
        self.directory = RunDirectory(path, *_rings())
        self.kernel_log = AttemptKernelLog(context.root)
        path.mkdir(parents=True, exist_ok=True)
        self._recorder = QueuedRecorder(
            context.make_recorder(self.directory.journal), node=context.node, clock=context.clock
        )
        self._flusher = Flusher(context.flush)
        self._failures: Counter[str] = Counter()
        self._clock = context.clock
        self._node = context.node
        self.journal = RunJournal(
            self._emit,
            context.clock,
            run_id=identity.run_id,
            node=context.node,
            rules=context.rules,
        )
        self.journal.node_seen(context.node_facts)
        if leads:
            self.journal.run_started(context.run_facts(path))

    def _emit(self, *drafts: EventDraft) -> None:
        self._recorder.record(*(self._event(draft) for draft in drafts))

    def _event(self, draft: EventDraft) -> Event:
        return new_event(
            draft.kind,
            node=self._node,
            clock=self._clock,
            severity=draft.severity,
            run_id=self.identity.run_id,
            attempt=draft.attempt,
            payload=draft.payload,
        )

    def write_state(self, state: Mapping[str, object], *, group_rank: int) -> None:
        """Replace the state file, without waiting for its file system."""

        def write() -> None:
            self.directory.write_state(state, group_rank=group_rank)

        self._recorder.call(lambda: self.safely("writing the run's state", write))

    def safely(self, what: str, act: Callable[[], None]) -> None:
        """Call *act*; record its exception as a failure of gpuops, and suppress it.

        Only the first one of each *what* is recorded; the others, up to ten a second, are counted.
        """
        try:
            act()
        except Exception as exc:  # noqa: BLE001 boundary: our bug must not stop the training
            self._failures[what] += 1
            if self._failures[what] == 1:
                log.warning("%s failed: %s", what, exc)
                self.journal.tool_failed(what, exc, traceback.format_exc())

    def close(self, outcome: str, exit_code: int, reason: str) -> str | None:
        """End the record of the run; return a note on events that could not be delivered."""
        for what, times in self._failures.items():
            if times > 1:
                self.journal.tool_failed_again(what, times - 1)
        if outcome != "completed":
            self.journal.given_up(exit_code)
        if self.leads:
            self.journal.run_ended(outcome, exit_code, reason)
        self._recorder.close()
        self.directory.remove_rings()
        return self._flusher.close()


def _rings() -> tuple[Path, int]:
    try:
        return create_rings(RING_PARENTS)
    except OSError as exc:
        log.warning("no heartbeats: cannot make a directory for them: %s", exc)
        return Path("/nonexistent"), -1
