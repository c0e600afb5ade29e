"""The history of a run: which events to record when, and the time that each incident costs.

It only records: it makes no decision and touches no worker. Each agent records the events of its
own node; the deciding agent records the run's incident.

Seconds lost to an incident, by phase: ``detect`` from the last step before the failure to its
detection, ``decide`` until there is a decision and the workers are gone, ``rendezvous`` until new
workers start (health check and back-off included), ``init`` from there to the first new step
without the time to load a checkpoint, which is ``restore``, and ``redo`` until the job is past the
highest step it had ever reached. An attempt without a step is lost completely: its start is
``init`` up to its failure, ``detect`` from there. Phases of one run never overlap, and
`gpuops.report.time_breakdown` counts the same: a second failure ends the first one's redo.

The agent's main thread and its control thread both call in; a call takes a lock and never waits
for anything else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from gpuops.agent.journal import payloads
from gpuops.agent.journal.event_drafts import (
    Emit,
    EventDraft,
    EventJournal,
    exclusion,
    locked,
    of_incident,
    reported,
)
from gpuops.agent.journal.open_incidents import (
    RecoveryTime,
    RestartRecord,
    RestoreTime,
    RunIncident,
)
from gpuops.agent.monitors.progress import AttemptProgress, FirstStep, RankProgress
from gpuops.host.clock import Clock
from gpuops.incident.cause import JudgedExits
from gpuops.incident.decision import ClusterState, NodeReport, PastFailure, RestartDecision
from gpuops.incident.incidents.cancelled import incident_from_cancel, incident_from_drain
from gpuops.incident.incidents.cluster import merge_report
from gpuops.incident.incidents.rendezvous import incident_from_lost_store, incident_from_rendezvous
from gpuops.incident.incidents.worker_failure import incident_from_exits
from gpuops.model import Evidence, Incident, Severity, WorkerExit
from gpuops.rules import LogRule
from gpuops.units import US_PER_S
from gpuops.wire.ring import Beat

MINUTE_US = 60 * US_PER_S
# Phases of the control record in which a generation has ended.
_ENDS_A_GENERATION = frozenset({"gather", "drain", "stop"})


class RunJournal(EventJournal):
    """The events of one run, as recorded by one agent."""

    def __init__(
        self, emit: Emit, clock: Clock, *, run_id: str, node: str, rules: Sequence[LogRule]
    ) -> None:
        super().__init__(emit, clock, run_id=run_id, node=node)
        self._rules = rules
        self._wall_offset_us = clock.now_us() - clock.mono_ns() // 1000
        self._started_ns = clock.mono_ns()
        self._has_stepped = False
        self._leads = False
        self._progress = AttemptProgress()
        self._restoring = RestoreTime()
        self._sent: set[str] = set()
        self._highest: int | None = None
        self._incident = RunIncident(run_id, node, self._wall_us)
        self._ended_ns: dict[int, int] = {}  # generation -> when its end was first known
        self._marks: dict[str, int] = {}
        self._phase: tuple[str, int] | None = None
        self._is_regrouping = False
        self._evidence: tuple[Evidence, ...] = ()

    @property
    def badput_s(self) -> dict[str, float]:
        """Return the seconds lost by now, by phase, over all incidents of the run."""
        with self.lock:
            return self._incident.lost_s

    @property
    def restarts(self) -> dict[str, int]:
        """Return how often the run was restarted, by the class of the failure."""
        with self.lock:
            return self._incident.restarts

    @locked
    def attempt_started(self, ordinal: int, facts: payloads.AttemptFacts) -> None:
        """Begin the attempt *ordinal*; its workers have been started."""
        if not self._incident.waits_for_workers:
            self._close(self._last_progress_ns, "the run was restarted once more")
        self._attempt = ordinal
        self._leads = facts.group_rank == 0
        self._started_ns = (facts.start_us - self._wall_offset_us) * 1000
        self._progress = AttemptProgress(highest_before=self._highest)
        self._restoring = RestoreTime()
        self._is_regrouping = False
        self._evidence = ()
        self._sent.clear()
        self._incident.started(self._started_ns, leads=self._leads)
        marks = {f"{phase}_us": self._wall_us(at_ns) for phase, at_ns in self._marks.items()}
        self._marks.clear()
        self._emit("attempt.started", {**asdict(facts), **marks})

    @locked
    def beats(self, by_rank: Mapping[int, Sequence[Beat]]) -> None:
        """Take in the heartbeats of the rings and record the milestones in them."""
        for rank, beats in by_rank.items():
            self._restoring.feed(rank, beats)
            self._progress.feed(rank, beats)
        first, caught_up = self._progress.first, self._progress.caught_up
        if first is not None:
            self._first_step_seen(first)
        if caught_up is not None and self._is_new("caught_up"):
            at_us = self._wall_us(caught_up.mono_ns)
            self._emit("attempt.caught_up", {"redo_done_us": at_us, "step": caught_up.step})
            self._close(caught_up.mono_ns, "the job is past the step where it had failed")
        if minute := self._minute(at_once=False):
            self._emit_event(*minute)

    def _first_step_seen(self, first: FirstStep) -> None:
        """Record the first step at once, and its number when it is known not to precede a load."""
        is_new, may_load = self._is_new("first_step"), self._progress.may_load
        if is_new and may_load:
            self._sent.add("unnumbered")
            first = replace(first, step=None)
        elif not is_new and (may_load or "unnumbered" not in self._sent):
            return
        else:
            self._sent.discard("unnumbered")
        at_us = self._wall_us(first.mono_ns)
        self._emit("attempt.first_step", payloads.first_step(first, at_us))
        if is_new:
            self._has_stepped = True
            self._job_steps_again(first.mono_ns)

    def rank_progress(self, rank: int) -> RankProgress:
        """Return the progress of *rank* in this attempt."""
        return self._progress.ranks.get(rank, RankProgress())

    @locked
    def mark(self, phase: str) -> None:
        """Record that *phase* has ended just now: ``stopped``, ``gated``, ``seated``, ``started``.

        ``stopped``: this node's workers are gone. The others are written with the next attempt.
        """
        now_ns = self._clock.mono_ns()
        if phase != "stopped":
            self._marks[phase] = now_ns
            return
        if self._attempt is not None:
            self._ended_ns.setdefault(self._attempt, now_ns)
        if self._incident.is_about(self._attempt):
            self._incident.stopped(now_ns)

    @locked
    def phase_seen(self, phase: str, generation: int, reason: str) -> None:
        """Record that the control record's phase is *phase* now; the same one is recorded once."""
        if self._phase == (phase, generation):
            return
        self._phase = (phase, generation)
        now_ns = self._clock.mono_ns()
        is_over = phase in _ENDS_A_GENERATION
        if is_over:
            self._ended_ns.setdefault(generation, now_ns)
        elif self._attempt is not None and generation > self._attempt:
            # Without a failure in between, the agents regroup because nodes joined.
            self._is_regrouping = phase == "form" and self._attempt not in self._ended_ns
            self._ended_ns.setdefault(self._attempt, now_ns)
        if phase == "run":
            self._marks["running"] = now_ns
        payload = {"phase": phase, "generation": generation, "reason": reason}
        self._emit_event(EventDraft(kind="run.phase", payload=payload, attempt=generation))

    @locked
    def attempt_failed(
        self,
        judged: JudgedExits,
        *,
        report: NodeReport,
        evidence: Sequence[Evidence] = (),
    ) -> Incident:
        """Record a failure on this node and its *report*; `decided` records the consequence."""
        generation = report.generation
        time = self._recovery_time(generation)
        incident = incident_from_exits(
            judged,
            run_id=self._run_id,
            attempt=generation,
            node=self._node,
            detected_us=self._wall_us(time.detected_ns),
            detected_mono_ns=time.detected_ns,
        )
        incident = merge_report(incident, report)
        time.date_failure(incident)
        incident = replace(incident, evidence=(*incident.evidence, *evidence), lost_s=time.lost_s())
        exits = judged.workers
        drafts = [*self._exits(exits, Severity.ERROR), reported(report)]
        # A decision that did not wait for this node's report has already opened the incident.
        if not self._incident.is_about(generation):
            self._close(time.progress_ns, "another failure came first")
            incident = self._incident.open(incident, time)
        if generation == self._attempt:
            drafts += self._end_of_attempt("failed", payloads.first_exit_code(exits))
        self._emit_event(*drafts, of_incident(incident, Severity.ERROR))
        return incident

    @locked
    def attempt_completed(self) -> None:
        """Record that every rank finished with exit code 0."""
        self._emit_event(*self._end_of_attempt("completed", 0))
        self._close(self._clock.mono_ns(), "the job finished")

    @locked
    def attempt_interrupted(self, report: NodeReport, evidence: Sequence[Evidence] = ()) -> None:
        """Record that the workers were stopped although nothing failed here.

        The reason is a failure elsewhere, which `decided` records, or nodes that joined.
        """
        if self._attempt is None:
            return
        self._evidence = tuple(evidence)
        self._ended_ns.setdefault(self._attempt, self._clock.mono_ns())
        if self._is_regrouping:
            self._close(self._last_progress_ns, "the run was restarted to add nodes")
        outcome = "regrouped" if self._is_regrouping else "failed"
        self._emit_event(reported(report), *self._end_of_attempt(outcome, None))

    @locked
    def decided(  # noqa: PLR0913  its inputs
        self,
        decision: RestartDecision,
        reports: Sequence[NodeReport],
        cluster: ClusterState | None,
        *,
        by_us: bool,
        note: str | None = None,
        history: Sequence[PastFailure] = (),
        decided_by: str | None = None,
    ) -> None:
        """Record a decision; one of this agent with its inputs and the run's incident.

        Args:
            decision: The decision.
            reports: Its inputs, in order of arrival; none where another agent decided.
            cluster: The members; None where another agent decided.
            by_us: This agent decided.
            note: A note on the decision of the site's plug-in, if there was one.
            history: The failures before this one.
            decided_by: The node that decided.
        """
        generation, now_ns = decision.failure.generation, self._clock.mono_ns()
        if not self._incident.is_about(generation):
            time = self._recovery_time(generation)
            self._close(time.progress_ns, "another failure came first")
            self._incident.open_remote(decision, time)
        record = RestartRecord(
            decision=decision, reports=reports, by_us=by_us, decided_by=decided_by
        )
        incident = self._incident.decided(record, now_ns, self._evidence)
        drafts = [of_incident(incident, Severity.ERROR)]
        if by_us and cluster is not None:
            made = payloads.decision_made(decision, reports, cluster, history, note)
            payload = {**made, "incident": incident.id}
            drafts.append(EventDraft(kind="decision.made", payload=payload, attempt=generation))
            drafts += [exclusion(n, why, generation) for n, why in decision.exclude.items()]
        self._emit_event(*drafts)

    @locked
    def fenced(self, why: str) -> None:
        """Record that this agent ended its workers because it may have been removed."""
        drafts = [self._draft("agent.fenced", {"why": why}, Severity.WARNING)]
        if self._attempt is not None:
            self._ended_ns.setdefault(self._attempt, self._clock.mono_ns())
            self._close(self._last_progress_ns, "this node was cut off from the others")
            drafts += self._end_of_attempt("failed", None)
        self._emit_event(*drafts)

    @locked
    def drained(self, signal_name: str, exits: Sequence[WorkerExit], exit_code: int) -> None:
        """Record that the run was drained because of *signal_name*."""
        make = partial(incident_from_drain, signal_name, exits, exit_code)
        self._end_on_request(exits, f"the run was drained on {signal_name}", make)

    @locked
    def cancelled(
        self,
        signal_name: str,
        exits: Sequence[WorkerExit],
        *,
        seen_mono_ns: int | None = None,
        kernel_lines: Sequence[str] = (),
    ) -> None:
        """Record that a signal to the agent, received at *seen_mono_ns*, ended the run."""
        make = partial(
            incident_from_cancel,
            signal_name,
            exits,
            signal_seen_mono_ns=seen_mono_ns,
            kernel_lines=kernel_lines,
        )
        self._end_on_request(exits, f"the run was cancelled by {signal_name}", make)

    @locked
    def rendezvous_failed(self, reason: str) -> None:
        """Record that the rendezvous of the next attempt failed."""
        attempt = 0 if self._attempt is None else self._attempt + 1
        self._ended_by(incident_from_rendezvous, reason, attempt)

    @locked
    def store_lost(self, reason: str) -> None:
        """Record that the run ends because its control store is lost."""
        self._ended_by(incident_from_lost_store, reason, self._attempt or 0)

    def _ended_by(self, make: Callable[..., Incident], reason: str, attempt: int) -> None:
        self._close(self._clock.mono_ns(), "another failure came first")
        place = {"run_id": self._run_id, "attempt": attempt, "node": self._node}
        incident = make(reason, **place, at_us=self._clock.now_us())
        self._emit_event(of_incident(incident, Severity.ERROR))

    def _end_on_request(
        self, exits: Sequence[WorkerExit], why: str, make: Callable[..., Incident]
    ) -> None:
        now_us, now_ns = self._clock.now_us(), self._clock.mono_ns()
        drafts = self._exits(exits, Severity.INFO)
        if self._attempt is not None:
            drafts += self._end_of_attempt("cancelled", None)
        self._emit_event(*drafts)
        if self._attempt is not None and self._incident.is_about(self._attempt):
            # This attempt has failed; no other one has begun that could be cancelled.
            self._close(now_ns, why)
            return
        incident = make(
            run_id=self._run_id,
            attempt=self._attempt or 0,
            node=self._node,
            rules=self._rules,
            detected_us=now_us,
            detected_mono_ns=now_ns,
        )
        incident = replace(incident, evidence=(*incident.evidence, *self._last_save))
        if incident.culprits:
            self._close(self._last_progress_ns, "another failure came first")
            time = self._recovery_time(self._attempt or 0, now_ns)
            time.date_failure(incident)
            incident = replace(incident, lost_s=time.lost_s())
        else:
            self._close(now_ns, why)
        self._emit_event(of_incident(incident, Severity.WARNING))

    @locked
    def given_up(self, exit_code: int) -> None:
        """Record that no restart follows: the open incident has its full cost."""
        resolution = f"not recovered: the run ended with exit code {exit_code}"
        at_ns = self._clock.mono_ns()
        running_ns = self._marks.get("running")
        if self._incident.waits_for_workers and running_ns is not None:
            # The run continued without this node, which does not follow it any more.
            at_ns, resolution = running_ns, "the run continued without this node"
        self._close(at_ns, resolution)

    def _recovery_time(self, generation: int, detected_ns: int | None = None) -> RecoveryTime:
        """Return the start of the failure of *generation*, which may not have run here."""
        at_ns = detected_ns or self._ended_ns.setdefault(generation, self._clock.mono_ns())
        was_running = generation == self._attempt
        return RecoveryTime(
            progress_ns=min(self._last_progress_ns, at_ns) if was_running else at_ns,
            detected_ns=at_ns,
            has_stepped=self._progress.last_mono_ns is not None or not was_running,
        )

    def _job_steps_again(self, at_ns: int) -> None:
        incident = self._incident.steps_again(at_ns, self._restoring.longest_ns)
        if incident is None:
            return
        self._emit_event(of_incident(incident))
        if self._highest is None:
            self._close(at_ns, "the job makes steps again")

    def _close(self, at_ns: int, resolution: str) -> None:
        """Close the incident whose cost was still running up at *at_ns*."""
        if self._incident.has_stepped:
            # The redo ends with the last step; time after it is not lost to the failure.
            at_ns = min(at_ns, self._last_progress_ns)
        incident = self._incident.close(
            at_ns, resolution, steps_are_seen=self._has_stepped, redoes=self._highest is not None
        )
        if incident is not None:
            self._emit_event(of_incident(incident))

    def _end_of_attempt(self, outcome: str, exit_code: int | None) -> list[EventDraft]:
        """Return the events of the end of the attempt; none where it is recorded already."""
        if not self._is_new("ended"):
            return []
        last_ns = self._progress.last_mono_ns
        rest = self._minute(at_once=True)
        payload = payloads.attempt_ended(
            self._progress,
            end_us=self._clock.now_us(),
            outcome=outcome,
            exit_code=exit_code,
            last_us=None if last_ns is None else self._wall_us(last_ns),
        )
        self._highest = self._progress.highest
        return [*rest, self._draft("attempt.ended", payload)]

    def _minute(self, *, at_once: bool) -> list[EventDraft]:
        minute = self._progress.take_minute(self._clock.mono_ns(), at_once=at_once)
        # Steps are the same on all nodes: one agent's figures represent the run.
        if minute is None or not self._leads:
            return []
        minute_us = self._wall_us(minute.start_mono_ns) // MINUTE_US * MINUTE_US
        return [self._draft("attempt.progress", payloads.minute(minute, minute_us))]

    def _exits(self, exits: Sequence[WorkerExit], severity: Severity) -> list[EventDraft]:
        return [
            self._draft(
                "worker.exited",
                payloads.worker_exited(worker),
                severity if not worker.terminated and worker.exit_code != 0 else Severity.INFO,
            )
            for worker in exits
        ]

    @property
    def _last_progress_ns(self) -> int:
        """Return when this attempt last made a step, else when its workers began."""
        return self._progress.last_mono_ns or self._started_ns

    def _is_new(self, milestone: str) -> bool:
        if milestone in self._sent:
            return False
        self._sent.add(milestone)
        return True

    def _wall_us(self, mono_ns: int) -> int:
        return mono_ns // 1000 + self._wall_offset_us
