"""The run's history as it happens: which events to record when, and what each incident cost.

It hears what the agent did and saw and writes it down; it decides nothing and touches no worker.

Seconds lost to an incident, by phase: ``detect`` from the last step before the failure to the
decision to restart, ``restart`` from there to the first new step, ``redo`` from there until the
job is past the highest step it had ever reached. An attempt without a step is lost as a whole: its
``detect`` begins with its workers, which ends the ``restart`` before it. Phases of one run never
overlap, and `gpuops.report.account` counts the same: a second failure ends the first one's redo.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from gpuops.agent import records
from gpuops.agent.progress import Progress, RankProgress
from gpuops.host.clock import Clock
from gpuops.incident.cancelled import incident_from_cancel
from gpuops.incident.identity import incident_id
from gpuops.incident.lifecycle import closed, mitigated, with_restart
from gpuops.incident.worker_failure import incident_from_exits
from gpuops.model import (
    ActionKind,
    Confidence,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Json,
    Role,
    Severity,
    Side,
    WorkerExit,
)
from gpuops.rules import LogRule
from gpuops.units import US_PER_S
from gpuops.wire import Beat

MINUTE_US = 60 * US_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What an event will hold beside its time, place and run."""

    kind: str
    payload: Json
    attempt: int | None
    severity: Severity = Severity.INFO


class Emit(Protocol):
    """Records events, together where there are several; never raises and never waits."""

    def __call__(self, *news: News) -> None: ...


@dataclass(slots=True)
class _Pending:
    """An incident whose cost is not yet complete, in monotonic nanoseconds."""

    incident: Incident
    decided_ns: int
    stepped_ns: int | None = None


class Chronicle:
    """The events of one run, as one agent sees it."""

    def __init__(
        self, emit: Emit, clock: Clock, *, run_id: str, node: str, rules: Sequence[LogRule]
    ) -> None:
        self._emit_event = emit
        self._clock = clock
        self._run_id = run_id
        self._node = node
        self._rules = rules
        self._wall_offset_us = clock.now_us() - clock.mono_ns() // 1000
        self._attempt: int | None = None
        self._started_ns = clock.mono_ns()
        self._has_stepped = False
        self._leads = False
        self._progress = Progress()
        self._sent: set[str] = set()
        self._highest: int | None = None
        self._pending: _Pending | None = None

    def node_seen(self, facts: records.NodeFacts) -> None:
        """Record this node and its boot."""
        self._emit("node.seen", asdict(facts))

    def run_started(self, facts: records.RunFacts) -> None:
        """Record the run's beginning."""
        self._emit("run.started", records.run_started(facts))

    def attempt_started(self, ordinal: int, facts: records.AttemptFacts) -> None:
        """Begin the attempt *ordinal*."""
        self._attempt = ordinal
        self._leads = facts.group_rank == 0
        self._started_ns = (facts.start_us - self._wall_offset_us) * 1000
        self._progress = Progress(highest_before=self._highest)
        self._sent.clear()
        self._emit("attempt.started", asdict(facts))

    def beats(self, by_rank: Mapping[int, Sequence[Beat]]) -> None:
        """Take in what the rings brought and record the milestones in it."""
        for rank, beats in by_rank.items():
            self._progress.feed(rank, beats)
        first, caught_up = self._progress.first, self._progress.caught_up
        if first is not None and self._is_new("first_step"):
            self._has_stepped = True
            at_us = self._wall_us(first.mono_ns)
            self._emit("attempt.first_step", records.first_step(first, at_us))
            self._job_steps_again(first.mono_ns)
        if caught_up is not None and self._is_new("caught_up"):
            at_us = self._wall_us(caught_up.mono_ns)
            self._emit("attempt.caught_up", {"redo_done_us": at_us, "step": caught_up.step})
            self._close_pending(caught_up.mono_ns, "the job is past the step where it had failed")
        if minute := self._minute(at_once=False):
            self._emit_event(*minute)

    def rank_progress(self, rank: int) -> RankProgress:
        """Return how far *rank* came in this attempt."""
        return self._progress.ranks.get(rank, RankProgress())

    def attempt_failed(
        self, exits: Sequence[WorkerExit], *, restarts: bool, kernel_lines: Sequence[str] = ()
    ) -> Incident:
        """Record the attempt's failure; *restarts* says whether the agent will try again."""
        assert self._attempt is not None
        now_us, now_ns = self._clock.now_us(), self._clock.mono_ns()
        self._close_pending(self._last_progress_ns, "another failure came first")
        news = self._exits(exits, Severity.ERROR)
        incident = incident_from_exits(
            exits,
            run_id=self._run_id,
            attempt=self._attempt,
            node=self._node,
            rules=self._rules,
            detected_us=now_us,
            detected_mono_ns=now_ns,
            kernel_lines=kernel_lines,
        )
        news += self._end_of_attempt("failed", now_us, _first_code(exits))
        incident = replace(incident, lost_s=self._detect_s(now_ns))
        if restarts:
            incident = with_restart(incident)
        news.append(self._news("incident.recorded", incident.to_json(), Severity.ERROR))
        self._emit_event(*news)
        self._pending = _Pending(incident, now_ns)
        return incident

    def rendezvous_failed(self, reason: str) -> None:
        """Record that the agents did not come together, for the attempt that was to begin."""
        title = "the agents of the run did not come together"
        self._not_begun(FailureClass.RENDEZVOUS, title, reason)

    def start_failed(self, reason: str) -> None:
        """Record that this node could not start its workers, for the attempt that was to begin."""
        title = "the workers could not be started"
        self._not_begun(FailureClass.UNRESOLVED, title, reason)

    def _not_begun(self, failure_class: FailureClass, title: str, reason: str) -> None:
        attempt = 0 if self._attempt is None else self._attempt + 1
        now_us, now_ns = self._clock.now_us(), self._clock.mono_ns()
        self._close_pending(now_ns, "another failure came first")
        incident = Incident(
            id=incident_id(self._run_id, attempt),
            failure_class=failure_class,
            side=Side.AMBIGUOUS,
            confidence=Confidence.CONFIRMED,
            state=IncidentState.OPEN,
            title=title,
            first_us=now_us,
            detected_us=now_us,
            run_id=self._run_id,
            attempt=attempt,
            evidence=(Evidence(role=Role.ROOT, text=reason),),
        )
        self._emit("incident.recorded", incident.to_json(), severity=Severity.ERROR)
        self._pending = _Pending(incident, now_ns)

    def attempt_completed(self) -> None:
        """Record that every rank finished with exit code 0."""
        self._emit_event(*self._end_of_attempt("completed", self._clock.now_us(), 0))
        self._close_pending(self._clock.mono_ns(), "the job finished")

    def attempt_interrupted(self) -> None:
        """Record that the workers are restarted because nodes came or went elsewhere."""
        if self._attempt is not None:
            self._emit_event(*self._end_of_attempt("failed", self._clock.now_us(), None))

    def cancelled(
        self,
        signal_name: str,
        exits: Sequence[WorkerExit],
        *,
        seen_mono_ns: int | None = None,
        kernel_lines: Sequence[str] = (),
    ) -> None:
        """Record that a signal to the agent, seen at *seen_mono_ns*, ended the run."""
        now_us, now_ns = self._clock.now_us(), self._clock.mono_ns()
        news = self._exits(exits, Severity.INFO)
        if self._attempt is not None and self._is_new("ended"):
            news += self._end_of_attempt("cancelled", now_us, None)
        self._emit_event(*news)
        why = f"the run was cancelled by {signal_name}"
        if self._pending is not None and self._pending.incident.attempt == self._attempt:
            # This attempt had failed; no other has begun that could be cancelled.
            self._close_pending(now_ns, why)
            return
        incident = incident_from_cancel(
            signal_name,
            exits,
            run_id=self._run_id,
            attempt=self._attempt or 0,
            node=self._node,
            rules=self._rules,
            detected_us=now_us,
            detected_mono_ns=now_ns,
            signal_seen_mono_ns=seen_mono_ns,
            kernel_lines=kernel_lines,
        )
        if incident.culprits:
            self._close_pending(self._last_progress_ns, "another failure came first")
            incident = replace(incident, lost_s=self._detect_s(now_ns))
        else:
            self._close_pending(now_ns, why)
        self._emit("incident.recorded", incident.to_json(), severity=Severity.WARNING)

    def given_up(self, exit_code: int) -> None:
        """Record that nothing will be tried any more: what is still open has its whole cost."""
        resolution = f"not recovered: the run ended with exit code {exit_code}"
        self._close_pending(self._clock.mono_ns(), resolution)

    def run_ended(self, outcome: str, exit_code: int, reason: str) -> None:
        """Record the run's end."""
        severity = Severity.INFO if outcome == "completed" else Severity.ERROR
        payload = {"outcome": outcome, "exit_code": exit_code, "reason": reason}
        self._emit("run.ended", payload, severity=severity)

    def tool_failed(self, what: str, error: BaseException, traceback: str) -> None:
        """Record a failure of our own, which is nobody else's."""
        payload = {
            "what": what,
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback,
        }
        self._emit("tool.failed", payload, severity=Severity.WARNING)

    def tool_failed_again(self, what: str, times: int) -> None:
        """Record how often that happened again, whatever the error was."""
        error = f"failed {times} more times"
        payload = {"what": what, "error": error, "traceback": None, "times": times}
        self._emit("tool.failed", payload, severity=Severity.WARNING)

    def _job_steps_again(self, at_ns: int) -> None:
        pending = self._pending
        if pending is None:
            return
        pending.stepped_ns = at_ns
        lost = {"restart": max(0.0, (at_ns - pending.decided_ns) / 1e9)}
        pending.incident = mitigated(pending.incident, at_us=self._wall_us(at_ns), lost_s=lost)
        self._emit("incident.recorded", pending.incident.to_json())
        if self._highest is None:
            self._close_pending(at_ns, "the job makes steps again")

    def _close_pending(self, at_ns: int, resolution: str) -> None:
        """Close the incident whose cost was still running up at *at_ns*."""
        pending, self._pending = self._pending, None
        if pending is None or pending.incident.state is IncidentState.CLOSED:
            return
        lost: dict[str, float] = {}
        was_restarted = ActionKind.RESTART in pending.incident.actions
        if was_restarted and pending.stepped_ns is None:
            if not self._has_stepped and self._started_ns > pending.decided_ns:
                # No step of this job was ever seen: it may make progress that we cannot see.
                at_ns = min(at_ns, self._started_ns)
            lost["restart"] = max(0.0, (at_ns - pending.decided_ns) / 1e9)
        elif pending.stepped_ns is not None and self._highest is not None:
            lost["redo"] = max(0.0, (at_ns - pending.stepped_ns) / 1e9)
        incident = closed(
            pending.incident, at_us=self._wall_us(at_ns), lost_s=lost, resolution=resolution
        )
        self._emit("incident.recorded", incident.to_json())

    def _end_of_attempt(self, outcome: str, end_us: int, exit_code: int | None) -> list[News]:
        self._is_new("ended")
        last_ns = self._progress.last_mono_ns
        rest = self._minute(at_once=True)
        payload = records.attempt_ended(
            self._progress,
            end_us=end_us,
            outcome=outcome,
            exit_code=exit_code,
            last_us=None if last_ns is None else self._wall_us(last_ns),
        )
        self._highest = self._progress.highest
        return [*rest, self._news("attempt.ended", payload)]

    def _minute(self, *, at_once: bool) -> list[News]:
        minute = self._progress.take_minute(self._clock.mono_ns(), at_once=at_once)
        # Steps are the same on all nodes: one agent's figures stand for the run.
        if minute is None or not self._leads:
            return []
        minute_us = self._wall_us(minute.start_mono_ns) // MINUTE_US * MINUTE_US
        return [self._news("attempt.progress", records.minute(minute, minute_us))]

    def _exits(self, exits: Sequence[WorkerExit], severity: Severity) -> list[News]:
        return [
            self._news(
                "worker.exited",
                records.worker_exited(worker),
                severity if not worker.terminated and worker.exit_code != 0 else Severity.INFO,
            )
            for worker in exits
        ]

    @property
    def _last_progress_ns(self) -> int:
        """Return when this attempt last made a step, else when its workers began."""
        return self._progress.last_mono_ns or self._started_ns

    def _detect_s(self, now_ns: int) -> dict[str, float]:
        return {"detect": max(0.0, (now_ns - self._last_progress_ns) / 1e9)}

    def _is_new(self, milestone: str) -> bool:
        if milestone in self._sent:
            return False
        self._sent.add(milestone)
        return True

    def _wall_us(self, mono_ns: int) -> int:
        return mono_ns // 1000 + self._wall_offset_us

    def _emit(self, kind: str, payload: Json, *, severity: Severity = Severity.INFO) -> None:
        self._emit_event(self._news(kind, payload, severity))

    def _news(self, kind: str, payload: Json, severity: Severity = Severity.INFO) -> News:
        return News(kind=kind, payload=payload, attempt=self._attempt, severity=severity)


def _first_code(exits: Sequence[WorkerExit]) -> int | None:
    """Return the code of the first failure that was not teardown, as a shell would show it."""
    failed = [w for w in exits if not w.terminated and w.exit_code != 0]
    first = min(failed, key=lambda w: w.error_mono_ns or w.seen_mono_ns, default=None)
    return None if first is None else first.exit_code
