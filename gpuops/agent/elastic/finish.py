"""The end of one generation on one node: say so, gather evidence, stop the workers, report, wait.

What cannot reach the control store is retried while this agent waits for the decision: a store
that does not answer for some seconds delays a restart, and ends nothing.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from signal import SIGTERM
from zlib import crc32

from gpuops.agent.checkpoint.api import awaited
from gpuops.agent.elastic.attempt import Attempt
from gpuops.agent.launch.services import Services
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.control.store import ControlStoreError
from gpuops.errors import EXIT_REQUEUE
from gpuops.incident.budget import count_failures
from gpuops.incident.cause import JudgedExits, judge_exits
from gpuops.incident.correlate import CausalRank, causal_rank_of
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.incident.kernel import JobXidFilter, job_lines
from gpuops.incident.report import build_node_report
from gpuops.incident.suspicion import RECENT_S, Suspicion, explain, reports_of
from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    Evidence,
    FailureClass,
    Role,
    Side,
    WorkerExit,
)
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

# After the first failure the others get this long to fail by themselves: what they raise is
# evidence, and an end of their own is not taken for our teardown.
COLLECT_S = 0.1
RETRY_S = 0.2
# `grace.MARGIN_S` is more: a small state still persists when the workers took all of their time.
LAST_SAVE_S_MIN = 1.0
# Why a generation ends here: what monitors report, one for each node they blame, the one with the
# cause first; what became of the workers; None: because of another node.
EndTrigger = tuple[NodeReport, ...] | ReportKind | None


def has_moved_on(now: ControlRecord, generation: int) -> bool:
    """Say whether the workers of *generation* have to stop."""
    return now.generation > generation or now.phase in {
        RunPhase.COLLECT,
        RunPhase.STOP,
        RunPhase.RENDEZVOUS,
    }


class AttemptFinish:
    """One generation's end here. *waiting* is called while others are waited for; it may raise."""

    def __init__(
        self,
        services: Services,
        attempt: Attempt,
        waiting: Callable[[ControlRecord], None],
    ) -> None:
        self._services = services
        self._attempt = attempt
        self._workers = attempt.workers
        self._waiting = waiting
        self._trigger: tuple[ReportKind, str] | None = None
        self._unfiled: list[NodeReport] = []
        self._evidence: tuple[Evidence, ...] = ()
        self._hang_here: NodeReport | None = None
        self._drain_ns: int | None = None
        self._is_settled = self._is_marked = False

    def drain_within(self, grace_s: float) -> None:
        """Note that the run drains, and that all of it has to be over after *grace_s*."""
        self._drain_ns = self._services.clock.mono_ns() + round(grace_s * NS_PER_S)

    def reports_of(self, suspicions: Iterable[Suspicion]) -> tuple[NodeReport, ...]:
        """Return the reports of what ends this generation among *suspicions*."""
        return reports_of(suspicions, here=self._services.node, generation=self._attempt.generation)

    def announce(self, trigger: EndTrigger) -> None:
        """Take the generation out of RUN for everybody, because of what was seen here."""
        if trigger is None:
            return
        if isinstance(trigger, tuple):
            kind, reason = trigger[0].kind, trigger[0].how
            self._unfiled += [each for each in trigger if each.node != self._services.node]
        else:
            kind, reason = trigger, _REASONS[trigger]
        self._trigger = (kind, f"{self._services.node}: {reason}")
        self._try_again()

    def collect_evidence(self, trigger: EndTrigger) -> None:
        """Ask the monitors what the workers are doing, where they do not simply fail."""
        if self._is_hang(trigger):
            self._evidence += tuple(self._services.monitors.evidence())

    def reconsider(self, trigger: EndTrigger) -> EndTrigger:
        """Return *trigger*, or what was seen here since that explains the hang that it is.

        A GPU that failed may be noticed just after the ranks that wait for it; what it reported
        when they fell silent explains the hang too. Called before the workers are ended: what that
        causes explains nothing.
        """
        if not self._is_hang(trigger):
            return trigger
        here, suspicions = self._services.node, self._services.monitors.poll()
        hangs = [s for s in suspicions if s.kind is ReportKind.HANG]
        since_ns = min((s.since_ns for s in hangs if s.since_ns), default=None)
        if since_ns is None:
            since_ns = self._services.clock.mono_ns()
        found = self.reports_of(s for s in suspicions if s.explains_failures(since_ns))
        own = tuple(each for each in found if each.node == here)
        if own:
            return own
        if isinstance(trigger, tuple):
            return tuple(explain(each, suspicions, since_ns) for each in trigger)
        for each in self.reports_of(hangs):
            self._hang_here = explain(each, suspicions, since_ns)
        return trigger

    def _is_hang(self, trigger: EndTrigger) -> bool:
        if isinstance(trigger, tuple):
            return any(report.kind is ReportKind.HANG for report in trigger)
        return (trigger or self._services.control.record.trigger) is ReportKind.HANG

    def wind_down(self) -> None:
        """End the workers that are left.

        Raises:
            SignalException: A signal to this agent reached the workers first.
        """
        if not self._workers.all_ended:
            self._workers.let_others_fail(COLLECT_S)
        self._services.cancellation.check()
        urgent = self._services.cancellation
        self._workers.end(SIGTERM, self._services.failure_grace_s, lambda: urgent.is_urgent)

    def report(
        self, trigger: EndTrigger, codes: Mapping[int, int], *, was_asked: bool = True
    ) -> None:
        """Record what happened here and file it for whoever decides.

        Workers that ended with exit code 0 while the run drains are done unless one *was_asked* to.
        """
        session = self._services.session
        journal = session.journal
        exits = self._workers.exits(self._services.node, journal.rank_progress, codes)
        xids = self._job_xids(exits)
        kernel_lines = job_lines(session.kernel_log.since_mark(), xids)
        judged = self._judge(exits, kernel_lines, xids)
        report = self._node_report(judged)
        reports = trigger if isinstance(trigger, tuple) else ()
        own = next((each for each in reports if each.node == report.node), None)
        if trigger is None and self._makes_room() and causal_rank_of(report) >= CausalRank.SYMPTOM:
            # The workers of another node were ended first, and ranks here have lost their peers.
            report = replace(report, kind=ReportKind.STOPPED)
        # What ends here because of another node's hang is reported by what it did meanwhile.
        is_interrupted = report.kind is ReportKind.STOPPED
        if own is not None:
            report, is_interrupted = merge_reports(own, report), False
        elif self._hang_here is not None and causal_rank_of(report) > CausalRank.HANG:
            report = merge_reports(self._hang_here, report)
        is_interrupted = is_interrupted and not self._workers.stuck_ranks
        report = with_stuck(report, self._workers.stuck_ranks)
        self._evidence += exiting_evidence(self._workers.exiting_ranks)
        drains = self._services.control.record.phase is RunPhase.DRAIN
        if drains and was_asked and report.kind is ReportKind.DONE:
            report = replace(report, kind=ReportKind.STOPPED)
        self._file(report)
        if drains:
            name = self._services.control.record.drain_signal or "SIGTERM"
            self._save_last(self._left_s(name))
        if drains and report.kind is ReportKind.DONE:
            session.safely("recording the success", journal.attempt_completed)
        elif drains:
            session.safely(
                "recording the drain", lambda: journal.drained(name, exits, EXIT_REQUEUE)
            )
        elif is_interrupted:
            session.safely(
                "recording the restart",
                lambda: journal.attempt_interrupted(report, self._evidence),
            )
        else:
            session.safely("recording the failure", lambda: self._failed(report, judged))

    def _makes_room(self) -> bool:
        """Say whether this generation ends for nodes that join, and not because of a failure."""
        record = self._services.control.record
        is_over = record.generation > self._attempt.generation
        return is_over and record.decision is None and record.phase is not RunPhase.STOP

    def _save_last(self, within_s: float) -> None:
        """Have the newest checkpoint persist; the others do not wait for that.

        Raises:
            SignalException: A second signal: it is not waited for any more.
        """
        checkpoints, control = self._services.checkpoints, self._services.control
        awaited(lambda: checkpoints.flush(within_s), lambda: self._waiting(control.record))

    def _left_s(self, name: str) -> float:
        """Return the seconds that the grace of a drain leaves; a grace ends before the SIGKILL."""
        if self._drain_ns is None:
            return self._services.drain_grace_s(name)
        left_s = (self._drain_ns - self._services.clock.mono_ns()) / NS_PER_S
        return max(left_s, LAST_SAVE_S_MIN)

    def _judge(
        self,
        exits: Sequence[WorkerExit],
        kernel_lines: Sequence[str] = (),
        xids: JobXidFilter | None = None,
    ) -> JudgedExits:
        """Return *exits* classified; none of them where that fails."""
        session, own_gpus = self._services.session, () if xids is None else xids.addresses
        judged = judge_exits((), ())

        def judge() -> None:
            nonlocal judged
            judged = judge_exits(exits, session.rules, kernel_lines, own_gpus)

        session.safely("judging the workers' ends", judge)
        return judged

    def _node_report(self, judged: JudgedExits) -> NodeReport:
        """Return what the exits say of this node; without our judgement where that fails."""
        parts = self._services
        found = NodeReport(
            kind=ReportKind.WORKERS_FAILED if self._workers.has_failed else ReportKind.STOPPED,
            node=parts.node,
            generation=self._attempt.generation,
        )

        def judge() -> None:
            nonlocal found
            found = build_node_report(
                judged,
                node=parts.node,
                generation=self._attempt.generation,
                gpu_uuids=parts.gpu_uuids(),
                checkpoint_step=parts.step_tracker.base_step,
            )
            found = explain(found, parts.monitors.poll(), parts.clock.mono_ns())

        parts.session.safely("reporting the workers' ends", judge)
        return found

    def _job_xids(self, exits: Sequence[WorkerExit]) -> JobXidFilter | None:
        """Return which Xids may have to do with *exits*; None: not known."""
        found = None

        def ask() -> None:
            nonlocal found
            found = self._services.job_xids(_well_until_ns(exits))

        self._services.session.safely("asking which GPUs are the job's", ask)
        return found

    def _failed(self, report: NodeReport, judged: JudgedExits) -> None:
        session = self._services.session
        incident = session.journal.attempt_failed(
            judged,
            report=report,
            evidence=self._evidence,
        )
        if not report.is_usage_error:  # that one ends the run, in words
            self._services.say(f"attempt {self._attempt.generation} failed: {incident.title}")

    def file_done(self) -> None:
        """Say that every worker here ended with exit code 0."""
        # With each worker's end: if others still need one of them, its early end is the cause.
        exits = self._workers.exits(
            self._services.node, self._services.session.journal.rank_progress, {}
        )
        self._file(
            replace(
                self._node_report(self._judge(exits)),
                kind=ReportKind.DONE,
                failure_class=FailureClass.UNRESOLVED,
                how="every worker here ended with exit code 0",
                culprits=(),
            )
        )
        if self._services.plan.restart_policy.nodes_max == 1:
            # Nobody else's news will wake the control thread; without it the end takes a beat more.
            with contextlib.suppress(ControlStoreError):
                self._services.control.touch_record()

    def fenced(self, silent_s: float) -> None:
        """Record that this node ended its own workers."""
        session = self._services.session
        why = f"no round trip to the control store for {silent_s:.1f} s"
        session.safely("recording the fence", lambda: session.journal.fenced(why))

    def report_fence(self, silent_s: float) -> None:
        """File that this node had been away, for the generation that it was away from."""
        report = NodeReport(
            kind=ReportKind.NODE_LOST,
            node=self._services.node,
            generation=self._attempt.generation,
            failure_class=FailureClass.STORE_LOST,
            side=Side.INFRA,
            confidence=Confidence.CONFIRMED,
            how=f"it was cut off from the control store for {silent_s:.1f} s and ended its workers",
        )
        self._file(with_stuck(report, self._workers.stuck_ranks))

    def wait_for_the_others(self) -> ControlRecord:
        """Return the record once it says anything but that this generation runs."""
        return self._wait(lambda now: has_moved_on(now, self._attempt.generation) or _drains(now))

    def await_decision(self) -> ControlRecord:
        """Return the record once it is decided what comes after this generation."""
        self._is_settled = True
        self._try_again()
        record = self._wait(
            lambda now: now.generation > self._attempt.generation or now.phase is RunPhase.STOP
        )
        self._services.session.safely("recording the decision", lambda: self._record(record))
        return record

    def _record(self, record: ControlRecord) -> None:
        if record.decision is not None and record.phase is RunPhase.RENDEZVOUS:
            terms = self._services.plan.restart_policy
            used = count_failures(record.history, terms, self._services.control.store_now_s)
            budget = f"{used} of {terms.restarts_max} restarts used"
            self._services.say(
                f"attempt {record.generation} follows ({budget}): {record.decision.reason}"
            )
        self._services.decisions.record(record, self._attempt.generation)

    def _wait(self, until: Callable[[ControlRecord], bool]) -> ControlRecord:
        control = self._services.control
        while not control.wait_until(until, RETRY_S):
            self._waiting(control.record)
            self._try_again()
        return control.record

    def _file(self, report: NodeReport) -> None:
        self._unfiled.append(report)
        self._try_again()

    def _try_again(self) -> None:
        """Do on the control store what could not be done yet."""
        control = self._services.control
        try:
            while self._unfiled:
                control.file_report(self._unfiled[0], self._suffix(self._unfiled[0]))
                del self._unfiled[0]
            if self._trigger is not None:
                control.update_record(self._gathering)
                self._trigger = None
            drains = control.record.phase is RunPhase.DRAIN
            if self._is_settled and drains and not self._is_marked:
                control.mark_settled(self._attempt.generation)
                self._is_marked = True
        except ControlStoreError as exc:
            log.debug("not in the control store yet: %s", exc)

    def _suffix(self, report: NodeReport) -> str:
        is_own = report.node == self._services.node
        return "" if is_own else f"+{crc32(report.node.encode()):08x}"

    def _gathering(self, now: ControlRecord) -> ControlRecord | None:
        if (now.generation, now.phase) != (self._attempt.generation, RunPhase.RUN):
            return None
        assert self._trigger is not None
        kind, reason = self._trigger
        node = self._services.node
        return replace(now, phase=RunPhase.COLLECT, trigger=kind, reason=reason, decided_by=node)


_REASONS = {
    ReportKind.WORKERS_FAILED: "a worker failed",
    ReportKind.NODE_LOST: "it was cut off from the control store",
    ReportKind.START_FAILED: "its workers could not be started",
}


def _well_until_ns(exits: Sequence[WorkerExit]) -> int | None:
    """Return until when all ranks here surely were well, None where one has not made a step.

    An Xid comes seconds before the end of its rank, or at the beginning of a standstill.
    """
    beats = [worker.last_beat_mono_ns for worker in exits]
    known = [beat for beat in beats if beat is not None]
    if not known or len(known) < len(beats):
        return None
    return min(known) - round(RECENT_S * NS_PER_S)


def _drains(now: ControlRecord) -> bool:
    return now.phase is RunPhase.DRAIN


def merge_reports(trigger: NodeReport, ends: NodeReport) -> NodeReport:
    """Return what a monitor saw, with what became of the workers that were then ended."""
    return replace(
        trigger,
        has_stepped=ends.has_stepped,
        last_step=ends.last_step if trigger.last_step is None else trigger.last_step,
        ends=trigger.ends or ends.ends,
    )


def exiting_evidence(ranks: Sequence[int]) -> tuple[Evidence, ...]:
    """Return the remark on workers that the kernel still takes apart; it speaks against nobody."""
    text = "it had not given all of its memory back seconds after SIGKILL"
    return tuple(
        Evidence(role=Role.NOISE, text=f"rank {rank}: {text}", entity=_rank(rank)) for rank in ranks
    )


def _rank(rank: int) -> Entity:
    return Entity(EntityKind.RANK, str(rank))


def with_stuck(report: NodeReport, ranks: Sequence[int]) -> NodeReport:
    """Return *report* as it is where workers outlived SIGKILL: the node has to be left out.

    Such a process sits in the kernel (state D) and holds its GPU; nothing can be started there.
    """
    if not ranks:
        return report
    names = ", ".join(map(str, ranks))
    culprits = tuple(map(_rank, ranks))
    return replace(
        report,
        kind=ReportKind.HANG if report.kind is ReportKind.STOPPED else report.kind,
        failure_class=FailureClass.HANG_D_STATE,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED,
        how=f"rank {names} outlived SIGKILL: it sits in the kernel",
        culprits=(*culprits, Entity(EntityKind.NODE, report.node)),
        blames_node=True,
    )
