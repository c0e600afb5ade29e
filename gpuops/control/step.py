"""What changes next in a run: pure functions; the leader reads, calls `next_change` and writes.

`next_change` says from one `Observation` what the leader writes now; what becomes of the control
record is in `gpuops.control.transitions`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpuops.control.membership import Liveness, trainable_count
from gpuops.control.record import ControlRecord, Member, Roster, RunPhase
from gpuops.control.transitions import collect, decide, grow, run, stop
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_REQUEUE
from gpuops.incident.budget import GROWTH_SETTLE_S, check_growth
from gpuops.incident.decision import (
    ClusterState,
    NodeReport,
    OnExhausted,
    PastFailure,
    ReportKind,
    RestartDecision,
    RestartPolicy,
    RunAction,
)
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side

_ALL_DONE = "every rank exited with code 0"
FIRST_CALL_TIMEOUT_S = 30.0  # torchrun's last call: nodes of one job start at different times

# The decision and a note on how it was made; None while a decision service is still being asked.
Decide = Callable[
    [Sequence[NodeReport], ClusterState, Sequence[PastFailure], float],
    tuple[RestartDecision, str | None] | None,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderTimeouts:
    """How long the leader waits, in seconds; see `gpuops.agent.launch.plan.LaunchPlan`."""

    suspect_s: float = 6.0
    dead_s: float = 15.0
    end_s: float = 15.0  # for a live agent to end its workers and report; then it kills them
    last_call_s: float = 5.0
    first_call_s: float = FIRST_CALL_TIMEOUT_S
    join_timeout_s: float = 600.0
    grow_after_s: float | None = 300.0

    @property
    def workers_end_s(self) -> float:
        """Return after how long no worker of an ended generation lives, on any node.

        An agent that is cut off or frozen has ended its workers by the time it counts as dead; one
        whose main thread hangs, `end_s` after it learned that the generation is over.
        """
        return self.dead_s + self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderPolicy:
    """What the leader acts by; ``spares`` agents are expected beyond ``restart.nodes_max``."""

    restart: RestartPolicy
    timeouts: LeaderTimeouts
    decide: Decide
    spares: int = 0

    @property
    def n_agents(self) -> int:
        """Return how many agents are expected."""
        return self.restart.nodes_max + self.spares

    @property
    def n_nodes_min(self) -> int:
        """Return how many nodes the run needs at least to start."""
        must_be_full = self.restart.on_exhausted is OnExhausted.REQUEUE
        return self.restart.nodes_max if must_be_full else self.restart.nodes_min


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the leader reads and measures at one moment. Times are in seconds.

    Attributes:
        record: The control record.
        roster: The newest roster; None before the first.
        reports: The reports on the roster's generation, by agent, in order of arrival.
        filed: Those for whom the leader has filed a report since it began to lead.
        ready: The agents that would train in the record's generation, as they came; none is dead.
        candidate: The roster that could be formed of them now; None where they are too few.
        failed_gates: The reports of nodes that failed their check before that generation.
        live: The nodes whose agents are not dead, but for the excluded ones.
        liveness: What the leader thinks of each agent of the roster.
        silence_s: For how long each has sent no heartbeat; infinite where its heartbeat is gone.
        closed: Those whose connection was closed, so that the store removed their heartbeat.
        settled: In a drain, those that have persisted their last state, or have given it up.
        phase_s: For how long the record has been in its phase.
        workers_ended_s: How long ago the last generation's workers were asked to end.
        enough_s: For how long there has been a candidate.
        waiting_s: For how long the nodes that wait for a place have been the same.
        checkpoint_step: The newest checkpoint that any agent has reported.
        has_saved: Whether there is a newer one than when the leader last looked.
        now_s: The control store's time.
    """

    record: ControlRecord
    roster: Roster | None
    live: tuple[str, ...]
    liveness: Mapping[str, Liveness]
    silence_s: Mapping[str, float]
    now_s: float
    phase_s: float
    workers_ended_s: float
    reports: Mapping[str, NodeReport]
    filed: frozenset[str] = frozenset()
    ready: tuple[Member, ...] = ()
    candidate: Roster | None = None
    failed_gates: tuple[NodeReport, ...] = ()
    enough_s: float = 0.0
    waiting_s: float = 0.0
    checkpoint_step: int | None = None
    has_saved: bool = False
    closed: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()

    @property
    def trains(self) -> Roster | None:
        """Return the roster of the record's own generation; None where it is of an earlier one."""
        is_own = self.roster is not None and self.roster.generation == self.record.generation
        return self.roster if is_own else None

    @property
    def missing(self) -> tuple[Member, ...]:
        """Return the members of the roster that have not reported."""
        members = self.roster.members if self.roster is not None else ()
        done = self.reports.keys() | self.filed
        return tuple(member for member in members if member.agent not in done)

    @property
    def waiting(self) -> frozenset[str]:
        """Return the live nodes that have no place in the roster."""
        members = self.roster.members if self.roster is not None else ()
        return frozenset(self.live) - {member.node for member in members}

    @property
    def n_known(self) -> int:
        """Return how many nodes have come, also those that are excluded."""
        return len({*self.live, *self.record.excluded})

    def cluster(self, policy: RestartPolicy) -> ClusterState:
        """Return what a decision is made on; nodes that failed their check are not excluded yet."""
        failed = [report.node for report in self.failed_gates]
        came = tuple(dict.fromkeys((*failed, *self.live)))
        members = None if self.roster is None else tuple(m.node for m in self.roster.members)
        return ClusterState(
            policy=policy,
            generation=self.record.generation,
            members=came[: policy.nodes_max] if members is None else members,
            live=self.live,
            excluded={n: why for n, why in self.record.excluded.items() if n not in failed},
            # Failed checks lead to no next generation, only to one without those nodes.
            suspected={} if failed else self.record.suspected,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision and all that it rests on."""

    decision: RestartDecision
    reports: tuple[NodeReport, ...]
    cluster: ClusterState
    history: tuple[PastFailure, ...]
    note: str | None


@dataclass(frozen=True, slots=True)
class FileReports:
    """Report for agents that are dead, then decide again."""

    reports: Mapping[str, NodeReport]


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """Change the record; *decided* is the decision that the change writes, if it writes one."""

    update: Callable[[ControlRecord], ControlRecord | None]
    decided: DecisionRecord | None = None


@dataclass(frozen=True, slots=True)
class FormRoster:
    """Write the roster, then change the record."""

    roster: Roster
    update: Callable[[ControlRecord], ControlRecord | None]


Change = FileReports | UpdateRecord | FormRoster


def next_change(seen: Observation, policy: LeaderPolicy, by: str) -> Change | None:
    """Return what the leader *by* writes now; None where it waits."""
    phase = seen.record.phase
    if phase is RunPhase.RUN:
        return _while_running(seen, policy, by)
    if phase is RunPhase.COLLECT:
        return _while_collecting(seen, policy, by)
    if phase is RunPhase.RENDEZVOUS:
        return _while_forming(seen, policy, by)
    return _while_draining(seen, by) if phase is RunPhase.DRAIN else None


def _while_running(seen: Observation, policy: LeaderPolicy, by: str) -> Change | None:
    roster = seen.trains
    if roster is None:
        return None
    finished = {a for a, report in seen.reports.items() if report.kind is ReportKind.DONE}
    unfinished = [member for member in roster.members if member.agent not in finished]
    if not unfinished:
        return _stopping(seen, EXIT_OK, _ALL_DONE, by)
    lost = [m for m in unfinished if seen.liveness[m.agent] is Liveness.DEAD]
    if not lost:
        # Nodes that join now would have the whole job begin again.
        return None if finished else _growing(seen, policy, by)
    unreported = {m.agent for m in seen.missing}.intersection(m.agent for m in lost)
    if unreported:
        return FileReports(_lost_reports(seen, [m for m in lost if m.agent in unreported]))
    names = ", ".join(member.node for member in lost[:4])
    return UpdateRecord(
        partial(
            collect,
            seen=seen.record,
            trigger=ReportKind.NODE_LOST,
            reason=f"no heartbeat of {names}",
            by=by,
        )
    )


def _lost_reports(seen: Observation, members: Sequence[Member]) -> dict[str, NodeReport]:
    return {member.agent: _lost_report(seen, member) for member in members}


def _lost_report(seen: Observation, member: Member) -> NodeReport:
    silence_s = seen.silence_s[member.agent]
    how = f"its agent sent no heartbeat for {silence_s:.0f} s"
    if member.agent in seen.closed:
        how = "its agent's connection to the control store was closed, and no new one came"
    elif silence_s == math.inf:
        how = "its agent left the run"
    return NodeReport(
        kind=ReportKind.NODE_LOST,
        node=member.node,
        generation=seen.record.generation,
        failure_class=FailureClass.NODE_LOST,
        side=Side.INFRA,
        confidence=Confidence.PROBABLE,
        how=how,
        culprits=(Entity(EntityKind.NODE, member.node),),
    )


def _growing(seen: Observation, policy: LeaderPolicy, by: str) -> Change | None:
    """Restart with more nodes where some wait and there is room; see `check_growth`.

    The least is lost right after a checkpoint. A job that reports none has no known good moment: it
    grows once nodes have waited for ``grow_after_s``.
    """
    after_s = policy.timeouts.grow_after_s
    if after_s is None or not seen.waiting:
        return None
    has_waited = seen.checkpoint_step is None and seen.waiting_s >= after_s
    growth = check_growth(
        seen.cluster(policy.restart),
        grown_at_s=seen.record.grown_at_s,
        now_s=seen.now_s,
        waiting_since_s=seen.now_s - seen.waiting_s,
        at_checkpoint=seen.has_saved or has_waited,
        settle_s=min(GROWTH_SETTLE_S, after_s),
    )
    if growth.n_nodes == 0:
        return None
    return UpdateRecord(partial(grow, seen=seen.record, reason=growth.why, by=by, now_s=seen.now_s))


def _while_collecting(seen: Observation, policy: LeaderPolicy, by: str) -> Change | None:
    if seen.trains is None:
        return None
    dead = [m for m in seen.missing if seen.liveness[m.agent] is Liveness.DEAD]
    if dead:
        return FileReports(_lost_reports(seen, dead))
    # One that is cut off has stopped its workers by the time it counts as dead.
    if any(
        seen.liveness[m.agent] is Liveness.SUSPECT or seen.phase_s < policy.timeouts.end_s
        for m in seen.missing
    ):
        return None
    if _may_return(seen, policy):
        return None
    reports = tuple(sorted(seen.reports.values(), key=lambda report: report.arrival))
    decided = _decided(seen, policy, reports)
    return None if decided is None else _deciding(seen, decided, by)


def _may_return(seen: Observation, policy: LeaderPolicy) -> bool:
    """Say whether a killed agent is worth waiting for: the run would end without its node.

    Under srun its parent starts it again within seconds.
    """
    has_time = seen.closed and seen.phase_s < policy.timeouts.dead_s
    return bool(has_time) and trainable_count(len(seen.live), policy.restart) == 0


def _decided(
    seen: Observation, policy: LeaderPolicy, reports: tuple[NodeReport, ...]
) -> DecisionRecord | None:
    cluster = seen.cluster(policy.restart)
    outcome = policy.decide(reports, cluster, seen.record.history, seen.now_s)
    if outcome is None:
        return None
    return DecisionRecord(
        decision=outcome[0],
        reports=reports,
        cluster=cluster,
        history=seen.record.history,
        note=outcome[1],
    )


def _deciding(seen: Observation, decided: DecisionRecord, by: str) -> UpdateRecord:
    change = partial(decide, seen=seen.record, decision=decided.decision, by=by, now_s=seen.now_s)
    return UpdateRecord(change, decided)


def is_held_back(seen: Observation, timeouts: LeaderTimeouts) -> bool:
    """Say whether no roster may be formed yet: in the back-off, or with workers still alive.

    A control store whose clock jumps back does not make the back-off longer. No two generations
    train at once: a member's report says that its workers are gone, and so does its being ready.
    """
    record = seen.record
    backoff_s = record.decision.backoff_s if record.decision is not None else 0.0
    if seen.phase_s < backoff_s and seen.now_s < record.not_before_s:
        return True
    if seen.workers_ended_s >= timeouts.workers_end_s:
        return False
    ready = {member.agent for member in seen.ready}
    return any(
        m.agent not in ready and seen.liveness[m.agent] is not Liveness.DEAD for m in seen.missing
    )


def _while_forming(seen: Observation, policy: LeaderPolicy, by: str) -> Change | None:
    is_held = is_held_back(seen, policy.timeouts)
    roster = None if is_held else seen.candidate
    forms = roster is not None and _is_complete(seen, roster, policy)
    reason = None
    if seen.failed_gates and (forms or _must_decide_failed_gates(seen, policy)):
        decided = _decided(seen, policy, seen.failed_gates)
        if decided is None:
            return None
        if decided.decision.action is not RunAction.RESTART:
            return _deciding(seen, decided, by)
        reason = decided.decision.reason
    if is_held:
        return None
    if roster is None:
        return _stop_if_too_late(seen, policy, by)
    run_it = partial(run, seen=seen.record, by=by, reason=reason)
    return FormRoster(roster, run_it) if forms else None


def _must_decide_failed_gates(seen: Observation, policy: LeaderPolicy) -> bool:
    """Say whether the run is over for want of the nodes that failed their check.

    Before the first start, nodes that have not come may still take their place (they pull their
    image), until the join timeout. Where even with them the run is too small, they get a last call:
    one that comes later finds nobody. As long as no healthy node has come, nobody waits.
    """
    n_live, timeouts = len(seen.live), policy.timeouts
    if policy.n_agents == 1 or trainable_count(n_live, policy.restart):
        return False
    n_coming = policy.n_agents - seen.n_known if seen.roster is None else 0
    if n_coming <= 0 or seen.phase_s >= timeouts.join_timeout_s:
        return True
    if trainable_count(n_live + n_coming, policy.restart):
        return False
    return n_live > 0 and seen.phase_s >= timeouts.last_call_s


def _is_complete(seen: Observation, candidate: Roster, policy: LeaderPolicy) -> bool:
    """Say whether no other node is worth waiting for."""
    ready = {member.node for member in seen.ready}
    coming = [node for node in seen.live if node not in ready]
    has_all = len(candidate.members) == trainable_count(policy.restart.nodes_max, policy.restart)
    if seen.record.generation == 0 and seen.roster is None:
        # A node that has not started is not known: only the full number needs no last call.
        has_all = has_all or (not coming and seen.n_known >= policy.n_agents)
        return has_all or seen.enough_s >= policy.timeouts.first_call_s
    if not coming:
        return True
    # A survivor that is not ready yet would lose its place; a late spare loses nothing.
    old = {member.node for member in seen.roster.members} if seen.roster else set()
    if has_all and not old.intersection(coming):
        return True
    return seen.enough_s >= policy.timeouts.last_call_s


def _stop_if_too_late(seen: Observation, policy: LeaderPolicy, by: str) -> Change | None:
    limit_s = policy.timeouts.join_timeout_s
    if seen.phase_s < limit_s:
        return None
    came = f"{len(seen.live)} of at least {policy.n_nodes_min} nodes came within {limit_s:g} s"
    code = EXIT_FAIL if seen.roster is None else EXIT_REQUEUE
    return _stopping(seen, code, f"{came}: {', '.join(seen.live)}", by)


def _while_draining(seen: Observation, by: str) -> Change | None:
    members = () if seen.trains is None else seen.trains.members
    living = {m.agent for m in members if seen.liveness[m.agent] is not Liveness.DEAD}
    if living.intersection(member.agent for member in seen.missing):
        return None
    # The nodes agree on their last state in this phase. Without one of them there is none to come.
    if len(living) == len(members) and not living <= seen.settled:
        return None
    reports = [seen.reports.get(member.agent) for member in members]
    if members and all(found is not None and found.kind is ReportKind.DONE for found in reports):
        return _stopping(seen, EXIT_OK, _ALL_DONE, by)
    return _stopping(seen, EXIT_REQUEUE, seen.record.reason, by)


def _stopping(seen: Observation, exit_code: int, reason: str, by: str) -> UpdateRecord:
    return UpdateRecord(partial(stop, seen=seen.record, exit_code=exit_code, reason=reason, by=by))
