"""What the open incident of a run costs, by phase; all times are monotonic nanoseconds.

The phases follow each other without gap or overlap, so that they add up to the time from the last
progress before the failure to the moment when the job is past its highest step again.

At most one is open: the phases of a run do not overlap, so a second failure ends the first one's
account. Every method returns the snapshot that is to be recorded, None where nothing changed.
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

# Who goes on with the account of a decider that is out of the run outbids its snapshots.
TAKEN_OVER_REV = 100


@dataclass(slots=True, kw_only=True)
class RecoveryTime:
    """When the phases of one failure ended; None: not yet.

    ``progress_ns`` is the last progress before it. A decision counts once the workers are gone as
    well. ``goes_on`` False: nothing is tried any more, so that nothing is lost after the decision.
    """

    progress_ns: int
    detected_ns: int
    decided_ns: int | None = None
    stopped_ns: int | None = None
    started_ns: int | None = None
    stepped_ns: int | None = None
    restore_ns: int = 0
    goes_on: bool = True

    def lost_s(self, until_ns: int | None = None) -> dict[str, float]:
        """Return the seconds of each phase that is over.

        With *until_ns* also those of the phase that is not: up to that moment, the last one there
        is. What is made again (``redo``) is not in it.
        """
        found: dict[str, float] = {}
        cursor_ns = self.progress_ns
        for phase, end_ns in self._ends():
            is_over = end_ns is not None and (until_ns is None or end_ns <= until_ns)
            if not is_over and until_ns is None:
                break
            stop_ns = max(end_ns if is_over and end_ns is not None else until_ns or 0, cursor_ns)
            found[phase] = (stop_ns - cursor_ns) / NS_PER_S
            cursor_ns = stop_ns
            if not is_over:
                break
        return self._with_restore(found)

    def _ends(self) -> list[tuple[str, int | None]]:
        decided_ns = self.decided_ns
        if decided_ns is not None and self.stopped_ns is not None:
            decided_ns = max(decided_ns, self.stopped_ns)
        ends = [("detect", self.detected_ns), ("decide", decided_ns)]
        if self.goes_on:
            ends += [("rendezvous", self.started_ns), ("init", self.stepped_ns)]
        return ends

    def _with_restore(self, found: dict[str, float]) -> dict[str, float]:
        restore_s = min(self.restore_ns / NS_PER_S, found.get("init", 0.0))
        if restore_s > 0:
            found = {**found, "init": found["init"] - restore_s, "restore": restore_s}
        return found


@dataclass(slots=True)
class RestoreTime:
    """How long the ranks of one attempt read their checkpoint, as beats or the keeper tell."""

    _began: dict[int, int] = field(default_factory=dict)
    _took: dict[int, int] = field(default_factory=dict)
    _told_ns: int = 0

    def feed(self, rank: int, beats: Iterable[Beat]) -> None:
        """Take the next beats of *rank* in."""
        for beat in beats:
            began_ns = self._began.pop(rank, None)
            if began_ns is not None:
                self._took[rank] = self._took.get(rank, 0) + beat.mono_ns - began_ns
            if beat.phase is WorkerPhase.RESTORE:
                self._began[rank] = beat.mono_ns

    def told(self, seconds: float) -> None:
        """Take it from the keeper that a rank took so long: its script may not say so in beats."""
        self._told_ns = max(self._told_ns, round(seconds * NS_PER_S))

    @property
    def longest_ns(self) -> int:
        """Return the time of the rank that took longest: the others waited for it."""
        return max(self._told_ns, *self._took.values(), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRecord:
    """A decision as it reached this agent; ``decided_by`` is a node, None where it is not known."""

    decision: RestartDecision
    reports: Sequence[NodeReport] = ()
    by_us: bool = False
    decided_by: str | None = None


@dataclass(slots=True)
class _Case:
    incident: Incident
    toll: RecoveryTime
    is_seen_here: bool = True
    ruling: RestartRecord | None = None
    resumed: Evidence | None = None


class RunIncident:
    """The open incident and what all have cost. *wall_us*: this host's monotonic ns to epoch µs."""

    def __init__(self, run_id: str, node: str, wall_us: Callable[[int], int]) -> None:
        self._run_id = run_id
        self._node = node
        self._wall_us = wall_us
        self._case: _Case | None = None
        self._spent_s: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()

    @property
    def lost_s(self) -> dict[str, float]:
        """Return the seconds lost by now, by phase, over all incidents of the run."""
        open_s = {} if self._case is None else self._case.toll.lost_s()
        return dict(self._spent_s + Counter(open_s))

    @property
    def restarts(self) -> dict[str, int]:
        """Return how often the run was restarted, by the class of the failure."""
        return dict(self._restarts)

    def is_about(self, generation: int | None) -> bool:
        """Say whether the open incident is that of *generation*."""
        return self._case is not None and self._case.incident.attempt == generation

    def open(self, incident: Incident, toll: RecoveryTime) -> Incident:
        """Begin the account of *incident*; the one before has been closed."""
        assert self._case is None
        self._case = _Case(replace(incident, lost_s=toll.lost_s()), toll)
        return self._case.incident

    def stopped(self, at_ns: int) -> None:
        """Note that the workers of the failed generation are gone."""
        if self._case is not None:
            self._case.toll.stopped_ns = at_ns

    def decided(self, ruling: RestartRecord, at_ns: int, evidence: Sequence[Evidence]) -> Incident:
        """Note what was decided on the open incident."""
        case = self._case
        assert case is not None
        decision = ruling.decision
        case.ruling = ruling
        case.toll.decided_ns = at_ns
        case.toll.goes_on = decision.action is RunAction.RESTART
        if case.toll.goes_on:
            self._restarts[decision.failure.failure_class.value] += 1
        told = replace(
            case.incident,
            actions=actions_of(decision),
            evidence=(*case.incident.evidence, *evidence),
            rev=case.incident.rev + 1,
        )
        if ruling.by_us:
            told = decided_incident(
                decision,
                ruling.reports,
                run_id=self._run_id,
                node=self._node,
                detected_us=case.incident.detected_us,
                own_incident=case.incident if case.is_seen_here else None,
                evidence=evidence,
            )
        case.incident = replace(told, lost_s=case.toll.lost_s())
        return case.incident

    def heard(self, decision: RestartDecision, toll: RecoveryTime) -> None:
        """Begin the account of an incident that this node saw nothing of."""
        detected_us = self._wall_us(toll.detected_ns)
        incident = remote_incident(decision, run_id=self._run_id, detected_us=detected_us)
        self.open(replace(incident, actions=()), toll)
        assert self._case is not None
        self._case.is_seen_here = False

    def started(self, at_ns: int, *, leads: bool) -> None:
        """Note that this node's new workers run; *leads*: it has the run's first rank."""
        case = self._case
        if case is None or case.toll.started_ns is not None:
            return
        case.toll.started_ns = at_ns
        if leads and _is_orphaned(case.ruling):
            rev = case.incident.rev + TAKEN_OVER_REV
            case.incident = replace(case.incident, authority=AUTHORITY_DECIDED, rev=rev)

    def resumed(self, evidence: Evidence, restore_ns: int) -> Incident | None:
        """Note from which state the job goes on, and how long its ranks here took to load it.

        The next snapshot says so; one is due at once where the job had stepped already. What is
        told again, by more ranks, takes the place of what was told.
        """
        case = self._case
        if case is None:
            return None
        rest = tuple(item for item in case.incident.evidence if item is not case.resumed)
        case.resumed = evidence
        case.incident = replace(
            case.incident, evidence=(*rest, evidence), rev=case.incident.rev + 1
        )
        if case.toll.stepped_ns is None:
            return None
        case.toll.restore_ns = max(case.toll.restore_ns, restore_ns)
        case.incident = replace(case.incident, lost_s=case.toll.lost_s())
        return case.incident

    def steps_again(self, at_ns: int, restore_ns: int) -> Incident | None:
        """Note the first step after the failure."""
        case = self._case
        if case is None or case.toll.stepped_ns is not None:
            return None
        case.toll.stepped_ns, case.toll.restore_ns = at_ns, restore_ns
        case.incident = mitigate(
            case.incident, at_us=self._wall_us(at_ns), lost_s=case.toll.lost_s()
        )
        return case.incident

    def close(
        self, at_ns: int, resolution: str, *, steps_are_seen: bool, redoes: bool
    ) -> Incident | None:
        """Close the open incident, whose cost ran until *at_ns*; *redoes*: steps have numbers."""
        case, self._case = self._case, None
        if case is None:
            return None
        if case.toll.started_ns is not None and not steps_are_seen:
            # No step of this job was ever seen: it may make progress that we cannot see.
            at_ns = min(at_ns, case.toll.started_ns)
        lost_s = case.toll.lost_s(at_ns)
        if case.toll.stepped_ns is not None and redoes:
            lost_s["redo"] = max(0.0, (at_ns - case.toll.stepped_ns) / NS_PER_S)
        self._spent_s.update(lost_s)
        if case.incident.state is IncidentState.CLOSED:
            return None
        return close(
            case.incident, at_us=self._wall_us(at_ns), lost_s=lost_s, resolution=resolution
        )

    @property
    def waits_for_workers(self) -> bool:
        """Say whether the job is to go on and no worker has been started yet."""
        toll = None if self._case is None else self._case.toll
        return toll is not None and toll.goes_on and toll.started_ns is None

    @property
    def has_stepped(self) -> bool:
        """Say whether the job has made a step since the failure."""
        return self._case is not None and self._case.toll.stepped_ns is not None


def _is_orphaned(ruling: RestartRecord | None) -> bool:
    """Say whether the deciding node excluded itself, and so sees no more of the run."""
    return ruling is not None and not ruling.by_us and ruling.decided_by in ruling.decision.exclude
