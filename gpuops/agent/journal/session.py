"""Everything that one agent keeps about its run: folder, journal, spool, chronicle."""

import logging
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.journal.event_drafts import EventDraft
from gpuops.agent.journal.flusher import Flusher, FlushSummary
from gpuops.agent.journal.payloads import NodeFacts, RunFacts
from gpuops.agent.journal.run_dir import RunDirectory, create_rings
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.launch.identity import RunIdentity
from gpuops.agent.monitors.kernel_log import AttemptKernelLog
from gpuops.host.clock import Clock
from gpuops.model import Event
from gpuops.rules import LogRule
from gpuops.store.events import new_event
from gpuops.store.spool.record import QueuedRecorder, Recorder

log = logging.getLogger(__name__)
RING_PARENTS = (Path("/dev/shm"), Path(tempfile.gettempdir()))  # noqa: S108 mkdtemp makes it private


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What does not change during a run, and how to make what does."""

    node: str
    clock: Clock
    root: Path
    run_parent: Path
    rules: Sequence[LogRule]
    node_facts: NodeFacts
    run_facts: Callable[[Path], RunFacts]
    make_recorder: Callable[[Path], Recorder]
    flush: Callable[[float], FlushSummary]


class RunSession:
    """One run as this agent records it."""

    def __init__(self, around: NodeContext, identity: RunIdentity, *, leads: bool) -> None:
        path = around.run_parent / identity.folder
        self.identity = identity
        self.leads = leads
        self.rules = around.rules
        self.directory = RunDirectory(path, *_rings())
        self.kernel_log = AttemptKernelLog(around.root)
        path.mkdir(parents=True, exist_ok=True)
        self._recorder = QueuedRecorder(
            around.make_recorder(self.directory.journal), node=around.node, clock=around.clock
        )
        self._flusher = Flusher(around.flush)
        self._failures: Counter[str] = Counter()
        self._clock = around.clock
        self._node = around.node
        self.journal = RunJournal(
            self._emit,
            around.clock,
            run_id=identity.run_id,
            node=around.node,
            rules=around.rules,
        )
        self.journal.node_seen(around.node_facts)
        if leads:
            self.journal.run_started(around.run_facts(path))

    def _emit(self, *news: EventDraft) -> None:
        self._recorder.record(*(self._event(item) for item in news))

    def _event(self, news: EventDraft) -> Event:
        return new_event(
            news.kind,
            node=self._node,
            clock=self._clock,
            severity=news.severity,
            run_id=self.identity.run_id,
            attempt=news.attempt,
            payload=news.payload,
        )

    def write_state(self, state: Mapping[str, object], *, group_rank: int) -> None:
        """Have the state file replaced, without waiting for its file system."""

        def write() -> None:
            self.directory.write_state(state, group_rank=group_rank)

        self._recorder.call(lambda: self.safely("writing the run's state", write))

    def safely(self, what: str, act: Callable[[], None]) -> None:
        """Do *act*; a failure of it is recorded as ours and ends there.

        The first of each *what* is; the others, ten a second at worst, are counted until the end.
        """
        try:
            act()
        except Exception as exc:  # noqa: BLE001 boundary: our bug must not stop the training
            self._failures[what] += 1
            if self._failures[what] == 1:
                log.warning("%s failed: %s", what, exc)
                self.journal.tool_failed(what, exc, traceback.format_exc())

    def close(self, outcome: str, exit_code: int, reason: str) -> str | None:
        """End the run's record; return a note on what could not be delivered."""
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
