"""The events of a run that do not affect the lost time: restarts, checkpoints, suspects."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from gpuops.agent.journal import payloads
from gpuops.agent.journal.open_incidents import RestoreTime, RunIncident
from gpuops.host.clock import Clock
from gpuops.incident.decision import NodeReport
from gpuops.incident.incidents.damaged_state import incident_from_damage
from gpuops.incident.incidents.replicas import ReplicaMismatch, incident_from_replicas
from gpuops.incident.lifecycle import about_suspect, close, with_action
from gpuops.model import ActionKind, Entity, EntityKind, Evidence, Incident, Json, Role, Severity
from gpuops.units import NS_PER_S

_Self = TypeVar("_Self", bound="EventJournal")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """An event without its time, node and run."""

    kind: str
    payload: Json
    attempt: int | None
    severity: Severity = Severity.INFO


class Emit(Protocol):
    """Records events, several of them atomically; never raises and never waits."""

    def __call__(self, *drafts: EventDraft) -> None: ...


def locked(
    method: Callable[Concatenate[_Self, _Args], _Result],
) -> Callable[Concatenate[_Self, _Args], _Result]:
    """Return *method* with the lock held: the main thread and the control thread call in."""

    @wraps(method)
    def call(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class EventJournal:
    """Records the events of a run on *node*, in the current attempt."""

    _incident: RunIncident
    _restoring: RestoreTime

    def __init__(self, emit: Emit, clock: Clock, *, run_id: str, node: str) -> None:
        self.lock = threading.RLock()
        self._emit_event = emit
        self._clock = clock
        self._run_id = run_id
        self._node = node
        self._attempt: int | None = None
        self._suspicion: Incident | None = None
        self._last_save: tuple[Evidence, ...] = ()
        self._differing: dict[str, Incident] = {}  # by the ranks that must be equal

    @locked
    def node_seen(self, facts: payloads.NodeFacts) -> None:
        """Record this node and its boot."""
        self._emit("node.seen", asdict(facts))

    @locked
    def run_started(self, facts: payloads.RunFacts) -> None:
        """Record the run's beginning."""
        self._emit("run.started", {**asdict(facts), "command": list(facts.command)})

    @locked
    def suspected(self, report: NodeReport, incident: Incident) -> None:
        """Record that *report* suspects this node, without ending the generation."""
        self._suspicion = incident
        payload = {"doubted": report.node, "reason": report.how, "report": report.to_json()}
        self._emit_event(
            self._draft("node.doubted", payload, Severity.WARNING),
            of_incident(incident, Severity.WARNING),
        )

    @locked
    def noted(self, incident: Incident) -> None:
        """Record an *incident* that has no consequence for a node."""
        self._emit_event(of_incident(incident, Severity.WARNING))

    @locked
    def excluded(self, reason: str, at_us: int) -> None:
        """Record that this node is excluded from the run since *at_us*."""
        drafts = [exclusion(self._node, reason, self._attempt)]
        if self._suspicion is not None and self._suspicion.about == about_suspect(self._node):
            incident = with_action(self._suspicion, ActionKind.EXCLUDE_NODE)
            why = f"{self._node} was excluded from the run"
            drafts.append(of_incident(close(incident, at_us=at_us, lost_s={}, resolution=why)))
        self._emit_event(*drafts)

    @locked
    def gate_failed(self, report: NodeReport, incident: Incident) -> None:
        """Record that this node did not pass its health check and does not join."""
        self._emit_event(reported(report), of_incident(incident, Severity.ERROR))

    @locked
    def rejoined(self, away_s: float) -> None:
        """Record that this agent is part of the run again, after *away_s*."""
        self._emit("agent.rejoined", {"away_s": away_s})

    @locked
    def store_unreachable(self, why: str) -> None:
        """Record that the control store does not answer."""
        self._emit("board.lost", {"why": why}, severity=Severity.WARNING)

    @locked
    def store_back(self, silent_s: float) -> None:
        """Record that the control store answers again, after *silent_s*."""
        self._emit("board.back", {"silent_s": silent_s})

    @locked
    def drain_requested(self, signal_name: str, grace_s: float | None = None) -> None:
        """Record the request to stop the run after its current step."""
        payload = {"signal": signal_name, "grace_s": grace_s}
        self._emit("drain.requested", payload, severity=Severity.WARNING)

    @locked
    def run_ended(self, outcome: str, exit_code: int, reason: str) -> None:
        """Record the run's end."""
        severity = Severity.INFO if outcome == "completed" else Severity.ERROR
        payload = {"outcome": outcome, "exit_code": exit_code, "reason": reason}
        self._emit("run.ended", payload, severity=severity)

    @locked
    def tool_failed(self, what: str, error: BaseException, traceback: str) -> None:
        """Record a failure of gpuops, for which neither node nor job is to blame."""
        payload = {
            "what": what,
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback,
        }
        self._emit("tool.failed", payload, severity=Severity.WARNING)

    @locked
    def tool_failed_again(self, what: str, times: int) -> None:
        """Record how often that failed again, with whatever error."""
        error = f"failed {times} more times"
        payload = {"what": what, "error": error, "traceback": None, "times": times}
        self._emit("tool.failed", payload, severity=Severity.WARNING)

    @locked
    def checkpoint(self, kind: str, payload: Json, severity: Severity = Severity.INFO) -> None:
        """Record one event of the kind ``checkpoint.*``."""
        self._emit(kind, payload, severity=severity)

    @locked
    def resumed(self, text: str, longest_s: float) -> None:
        """Record which state the ranks here resume from; the slowest load took *longest_s*."""
        self._restoring.record(longest_s)
        evidence = Evidence(role=Role.RECOVERY, text=text, entity=self._here)
        incident = self._incident.resumed(evidence, round(longest_s * NS_PER_S))
        if incident is not None:
            self._emit_event(of_incident(incident))

    @locked
    def saved_last(self, payload: Json, text: str) -> None:
        """Record the result of the last save before an end, as evidence of its incident too."""
        severity = Severity.INFO if payload["fitted"] else Severity.WARNING
        self._emit("checkpoint.flushed", payload, severity=severity)
        self._last_save = (Evidence(role=Role.RECOVERY, text=text, entity=self._here),)

    @locked
    def state_damaged(self, why: str, *, step: int, epoch: int) -> None:
        """Record that a saved state is damaged on disk; *why* names the file."""
        incident = incident_from_damage(
            why,
            step=step,
            epoch=epoch,
            run_id=self._run_id,
            node=self._node,
            at_us=self._clock.now_us(),
        )
        self._emit_event(of_incident(incident, Severity.ERROR))

    @locked
    def replicas_differ(self, found: ReplicaMismatch) -> None:
        """Record that replicas differ; `replicas_alike` closes the incident."""
        incident = incident_from_replicas(
            found, run_id=self._run_id, node=self._node, at_us=self._clock.now_us()
        )
        self._differing[found.ranks] = incident
        self._emit_event(of_incident(incident, Severity.ERROR))

    @locked
    def replicas_alike(self, ranks: str, step: int) -> None:
        """Record that *ranks* are equal again since *step*."""
        incident = self._differing.pop(ranks, None)
        if incident is not None:
            why = f"ranks {ranks} are equal again at step {step}"
            at_us = self._clock.now_us()
            self._emit_event(of_incident(close(incident, at_us=at_us, lost_s={}, resolution=why)))

    @property
    def _here(self) -> Entity:
        return Entity(EntityKind.NODE, self._node)

    def _emit(self, kind: str, payload: Json, *, severity: Severity = Severity.INFO) -> None:
        self._emit_event(self._draft(kind, payload, severity))

    def _draft(self, kind: str, payload: Json, severity: Severity = Severity.INFO) -> EventDraft:
        return EventDraft(kind=kind, payload=payload, attempt=self._attempt, severity=severity)


def reported(report: NodeReport) -> EventDraft:
    """Return the event of *report*."""
    return EventDraft(kind="agent.report", payload=report.to_json(), attempt=report.generation)


def exclusion(node: str, reason: str, generation: int | None) -> EventDraft:
    """Return the event of the exclusion of *node*."""
    payload = {"excluded": node, "reason": reason}
    return EventDraft(
        kind="node.excluded", payload=payload, attempt=generation, severity=Severity.WARNING
    )


def of_incident(incident: Incident, severity: Severity = Severity.INFO) -> EventDraft:
    """Return the event of a snapshot of *incident*."""
    return EventDraft(
        kind="incident.recorded",
        payload=incident.to_json(),
        attempt=incident.attempt,
        severity=severity,
    )
