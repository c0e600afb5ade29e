"""The time that the open incident of a run costs, by phase; all times are monotonic nanoseconds.

The phases follow each other without gap or overlap, so that they add up to the time from the last
progress before the failure to the moment when the job is past its highest step again.

At most one incident is open: the phases of a run do not overlap, so a second failure closes the
first one. Every method returns the snapshot to record, None where nothing changed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from gpuops.incident.decision import NodeReport, RestartDecision, RunAction
from gpuops.incident.incidents.cluster import (
    AUTHORITY_DECIDED,
    actions_of,
    decided_incident,
    remote_incident,
)
from gpuops.incident.lifecycle import close, mitigate
from gpuops.model import Evidence, Incident, IncidentState
from gpuops.units import NS_PER_S
from gpuops.wire.ring import Beat, WorkerPhase

# An agent that takes over the incident of an excluded leader uses higher revisions than it did.
TAKEN_OVER_REV = 100


@dataclass(slots=True, kw_only=True)
class RecoveryTime:
    """When the phases of one failure ended; None: not yet.

    ``progress_ns`` is the last progress before it, the start of the workers where these had not
    ``has_stepped``: their ``init`` ends at ``failed_ns``, None: at the detection. The phase
    ``decide`` ends once the workers are gone as well. ``is_restarting`` False: the run ends, so
    that no time is lost after the decision.
    """

    progress_ns: int
    detected_ns: int
    has_stepped: bool = True
    failed_ns: int | None = None
    decided_ns: int | None = None
    stopped_ns: int | None = None
    started_ns: int | None = None
    stepped_ns: int | None = None
    restore_ns: int = 0
    is_restarting: bool = True

    def date_failure(self, incident: Incident) -> None:
        """Take over when *incident* began."""
        self.failed_ns = self.detected_ns - (incident.detected_us - incident.first_us) * 1000

    def lost_s(self, until_ns: int | None = None) -> dict[str, float]:
        """Return the seconds of each finished phase.

        With *until_ns* also those of the unfinished phase, up to that moment. Repeated steps
        (``redo``) are not included.
        """
        found: dict[str, float] = {}
        cursor_ns = self.progress_ns
        for phase, end_ns in self._ends():
            is_over = end_ns is not None and (until_ns is None or end_ns <= until_ns)
            if not is_over and until_ns is None:
                break
            stop_ns = max(end_ns if is_over and end_ns is not None else until_ns or 0, cursor_ns)
            # The start that failed and the next one are both `init`.
            found[phase] = found.get(phase, 0.0) + (stop_ns - cursor_ns) / NS_PER_S
            cursor_ns = stop_ns
            if not is_over:
                break
        return found

    def _ends(self) -> list[tuple[str, int | None]]:
        decided_ns = self.decided_ns
        if decided_ns is not None and self.stopped_ns is not None:
            decided_ns = max(decided_ns, self.stopped_ns)
        ends = [("detect", self.detected_ns), ("decide", decided_ns)]
        if not self.has_stepped:
            failed_ns = self.detected_ns if self.failed_ns is None else self.failed_ns
            ends.insert(0, ("init", failed_ns))
        if self.is_restarting:
            ends += [("rendezvous", self.started_ns), *self._ends_of_init()]
        return ends

    def _ends_of_init(self) -> list[tuple[str, int | None]]:
        if self.stepped_ns is None or not self.restore_ns:
            return [("init", self.stepped_ns)]
        return [("init", self.stepped_ns - self.restore_ns), ("restore", self.stepped_ns)]


@dataclass(slots=True)
class RestoreTime:
    """How long the ranks of one attempt load their checkpoint, by heartbeats or the keeper."""

    _began: dict[int, int] = field(default_factory=dict)
    _took: dict[int, int] = field(default_factory=dict)
    _keeper_ns: int = 0

    def feed(self, rank: int, beats: Iterable[Beat]) -> None:
        """Take in the next heartbeats of *rank*."""
        for beat in beats:
            began_ns = self._began.pop(rank, None)
            if began_ns is not None:
                self._took[rank] = self._took.get(rank, 0) + beat.mono_ns - began_ns
            if beat.phase is WorkerPhase.RESTORE:
                self._began[rank] = beat.mono_ns

    def record(self, seconds: float) -> None:
        """Record a rank's time as the keeper reports it: its script may not label the phase."""
        self._keeper_ns = max(self._keeper_ns, round(seconds * NS_PER_S))

    @property
    def longest_ns(self) -> int:
        """Return the time of the rank that took longest: the others waited for it."""
        return max(self._keeper_ns, *self._took.values(), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRecord:
    """A decision as this agent received it; ``decided_by`` is a node, None where unknown."""

    decision: RestartDecision
    reports: Sequence[NodeReport] = ()
    by_us: bool = False
    decided_by: str | None = None


@dataclass(slots=True)
class _OpenIncident:
    incident: Incident
    time: RecoveryTime
    is_local: bool = True
    decision: RestartRecord | None = None
    resumed: Evidence | None = None


class RunIncident:
    """The open incident and the cost of all. *wall_us*: this host's monotonic ns to epoch µs."""

    def __init__(self, run_id: str, node: str, wall_us: Callable[[int], int]) -> None:
        self._run_id = run_id
        self._node = node
        self._wall_us = wall_us
        self._open: _OpenIncident | None = None
        self._spent_s: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()

    @property
    def lost_s(self) -> dict[str, float]:
        """Return the seconds lost by now, by phase, over all incidents of the run."""
        open_s = {} if self._open is None else self._open.time.lost_s()
        return dict(self._spent_s + Counter(open_s))

    @property
    def restarts(self) -> dict[str, int]:
        """Return how often the run was restarted, by the class of the failure."""
        return dict(self._restarts)

    def is_about(self, generation: int | None) -> bool:
        """Return whether the open incident is that of *generation*."""
        return self._open is not None and self._open.incident.attempt == generation

    def open(self, incident: Incident, time: RecoveryTime) -> Incident:
        """Open *incident*; the previous one has been closed."""
        assert self._open is None
        self._open = _OpenIncident(replace(incident, lost_s=time.lost_s()), time)
        return self._open.incident

    def stopped(self, at_ns: int) -> None:
        """Record that the workers of the failed generation are gone."""
        if self._open is not None:
            self._open.time.stopped_ns = at_ns

    def decided(self, record: RestartRecord, at_ns: int, evidence: Sequence[Evidence]) -> Incident:
        """Record the decision on the open incident."""
        current = self._open
        assert current is not None
        decision = record.decision
        current.decision = record
        current.time.decided_ns = at_ns
        current.time.is_restarting = decision.action is RunAction.RESTART
        if current.time.is_restarting:
            self._restarts[decision.failure.failure_class.value] += 1
        snapshot = replace(
            current.incident,
            actions=actions_of(decision),
            evidence=(*current.incident.evidence, *evidence),
            rev=current.incident.rev + 1,
        )
        if record.by_us:
            snapshot = decided_incident(
                decision,
                record.reports,
                run_id=self._run_id,
                node=self._node,
                detected_us=current.incident.detected_us,
                own_incident=current.incident if current.is_local else None,
                evidence=evidence,
            )
        current.incident = replace(snapshot, lost_s=current.time.lost_s())
        return current.incident

    def open_remote(self, decision: RestartDecision, time: RecoveryTime) -> None:
        """Open the incident of a failure that did not occur on this node."""
        detected_us = self._wall_us(time.detected_ns)
        incident = remote_incident(decision, run_id=self._run_id, detected_us=detected_us)
        self.open(replace(incident, actions=()), time)
        assert self._open is not None
        self._open.is_local = False

    def started(self, at_ns: int, *, leads: bool) -> None:
        """Record that this node's new workers run; *leads*: it has the run's first rank."""
        current = self._open
        if current is None or current.time.started_ns is not None:
            return
        current.time.started_ns = at_ns
        if leads and _is_orphaned(current.decision):
            rev = current.incident.rev + TAKEN_OVER_REV
            current.incident = replace(current.incident, authority=AUTHORITY_DECIDED, rev=rev)

    def resumed(self, evidence: Evidence, restore_ns: int) -> Incident | None:
        """Record which state the job resumes from, and how long its ranks here took to load it.

        The next snapshot contains it; one is due at once where the job has made a step already. A
        later report, with more ranks, replaces an earlier one.
        """
        current = self._open
        if current is None:
            return None
        rest = tuple(item for item in current.incident.evidence if item is not current.resumed)
        current.resumed = evidence
        current.incident = replace(
            current.incident, evidence=(*rest, evidence), rev=current.incident.rev + 1
        )
        if current.time.stepped_ns is None:
            return None
        current.time.restore_ns = max(current.time.restore_ns, restore_ns)
        current.incident = replace(current.incident, lost_s=current.time.lost_s())
        return current.incident

    def steps_again(self, at_ns: int, restore_ns: int) -> Incident | None:
        """Record the first step after the failure."""
        current = self._open
        if current is None or current.time.stepped_ns is not None:
            return None
        current.time.stepped_ns, current.time.restore_ns = at_ns, restore_ns
        current.incident = mitigate(
            current.incident, at_us=self._wall_us(at_ns), lost_s=current.time.lost_s()
        )
        return current.incident

    def close(
        self, at_ns: int, resolution: str, *, steps_are_seen: bool, redoes: bool
    ) -> Incident | None:
        """Close the open incident, which cost time until *at_ns*; *redoes*: steps are numbered."""
        current, self._open = self._open, None
        if current is None:
            return None
        if current.time.started_ns is not None and not steps_are_seen:
            # The job never reported a step: it may make progress that is not observable.
            at_ns = min(at_ns, current.time.started_ns)
        lost_s = current.time.lost_s(at_ns)
        if current.time.stepped_ns is not None and redoes:
            lost_s["redo"] = max(0.0, (at_ns - current.time.stepped_ns) / NS_PER_S)
        self._spent_s.update(lost_s)
        if current.incident.state is IncidentState.CLOSED:
            return None
        return close(
            current.incident, at_us=self._wall_us(at_ns), lost_s=lost_s, resolution=resolution
        )

    @property
    def waits_for_workers(self) -> bool:
        """Return whether a restart was decided and no worker has been started yet."""
        time = None if self._open is None else self._open.time
        return time is not None and time.is_restarting and time.started_ns is None

    @property
    def has_stepped(self) -> bool:
        """Return whether the job has made a step since the failure."""
        return self._open is not None and self._open.time.stepped_ns is not None


def _is_orphaned(record: RestartRecord | None) -> bool:
    """Return whether the deciding node excluded itself, so that it no longer follows the run."""
    return record is not None and not record.by_us and record.decided_by in record.decision.exclude
