"""What one agent does for all of a run: notice the dead, gather reports, decide, give out seats.

Any agent can; the first live one in the order of the last roster does, as long as the board answers
it at once (see `MembershipView.current_leader`). Two that both think it is theirs do no harm: every
step is one compare-and-swap, and whoever comes second follows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuops.control import step
from gpuops.control.client import ControlClient
from gpuops.control.extension import ExtensionRunner
from gpuops.control.keys import delete_old_generations
from gpuops.control.membership import (
    N_STANDBYS,
    Liveness,
    LivenessTracker,
    MembershipView,
    form_roster,
    trainable_count,
)
from gpuops.control.record import ControlRecord, Member, RecordView, Roster, RunPhase
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_REQUEUE
from gpuops.host.clock import Clock
from gpuops.incident.budget import GROWTH_SETTLE_S, check_growth
from gpuops.incident.decision import (
    ClusterState,
    NodeReport,
    OnExhausted,
    PastFailure,
    ReportKind,
    RestartDecision,
    RestartPolicy,
)
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

REFRESH_S = 0.5
# Those further back in line: a list of all heartbeats costs, and two would have to die before their
# turn. With a beat more it stays below `BLIND_S`, beyond which a look sees no more.
STANDBY_REFRESH_S = 1.5
# For how long the record may stand still in a phase that passes before others than deputies look.
STUCK_S = 20.0
FIRST_CALL_TIMEOUT_S = 30.0  # torchrun's last call: nodes of one job start at different times

# The decision and a note on how it came about; None while somebody is still being asked.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A decision of ours that became the record, with all that it rests on."""

    decision: RestartDecision
    reports: tuple[NodeReport, ...]
    cluster: ClusterState
    history: tuple[PastFailure, ...]
    note: str | None


class Leader:
    """The common duties, as one agent sees them.

    ``last_decision`` is the last decision that was this agent's; written by the control thread.
    ``extension`` has what the agents agree on beside.
    """

    def __init__(
        self,
        client: ControlClient,
        clock: Clock,
        policy: RestartPolicy,
        timeouts: LeaderTimeouts,
        decide: Decide,
    ) -> None:
        self._client = client
        self._clock = clock
        self._policy = policy
        self._timeouts = timeouts
        self._decide = decide
        liveness = LivenessTracker(timeouts.suspect_s, timeouts.dead_s)
        self._membership = MembershipView(client.store, client.keys, liveness)
        self._phase_since: tuple[int, RunPhase, int] | None = None
        self._workers_ended_ns = 0  # when the last generation's workers were to end
        self._enough_since_ns: int | None = None
        self._waiting_nodes: tuple[frozenset[str], int] | None = None
        self._last_checkpoint_step: int | None = None
        self.is_leader = False
        self.last_decision: DecisionRecord | None = None
        self.extension = ExtensionRunner(self._membership)

    @property
    def is_candidate(self) -> bool:
        """Say whether this agent leads, or may soon have to."""
        position = self._position()
        return position is not None and position < N_STANDBYS

    @property
    def roster(self) -> Roster | None:
        """Return the newest roster that was read."""
        return self._membership.roster

    @property
    def dead_agents(self) -> tuple[str, ...]:
        """Return the agents that were dead when this one last looked; none where it never did."""
        return self._membership.dead_agents

    def tick(self, view: RecordView) -> None:
        """Do what is to be done now, if it is this agent's turn.

        Raises:
            ControlStoreError: See `ControlStore`.
        """
        now_ns = self._clock.mono_ns()
        record = view.record
        self._track_phase(record, now_ns)
        if record.phase is RunPhase.STOP:
            self.is_leader = False
            return
        # A deputy looks at every beat while something is happening, else now and then.
        is_steady = record.phase is RunPhase.RUN
        refresh_s = REFRESH_S if (self._position() or 0) <= 1 else STANDBY_REFRESH_S
        if is_steady and self._membership.refreshed_within(refresh_s, now_ns):
            return
        if (
            self._position() is not None
            and not self.is_candidate
            and not self._is_stuck(record, now_ns)
        ):
            return
        self._membership.refresh(record, now_ns)
        self.is_leader = self._membership.current_leader(now_ns) == self._client.me.agent
        if not self.is_leader:
            return
        self._coordinate(record, view, now_ns)
        self.extension.pass_heartbeats(record)

    def _coordinate(self, record: ControlRecord, view: RecordView, now_ns: int) -> None:
        if record.phase is RunPhase.RUN:
            self._on_run(record, now_ns)
        elif record.phase is RunPhase.COLLECT:
            self._on_collect(record, view, now_ns)
        elif record.phase is RunPhase.RENDEZVOUS:
            self._on_rendezvous(record, view, now_ns)
        elif record.phase is RunPhase.DRAIN:
            self._on_drain(record, now_ns)

    def _track_phase(self, record: ControlRecord, now_ns: int) -> None:
        key = (record.generation, record.phase)
        if self._phase_since is None or self._phase_since[1] is RunPhase.RUN:
            self._workers_ended_ns = now_ns
        if self._phase_since is None or self._phase_since[:2] != key:
            self._phase_since = (*key, now_ns)
            self._enough_since_ns = None

    def _phase_s(self, now_ns: int) -> float:
        assert self._phase_since is not None
        return (now_ns - self._phase_since[2]) / NS_PER_S

    def _is_stuck(self, record: ControlRecord, now_ns: int) -> bool:
        """Say whether those in line before us do not seem to act.

        In a phase that passes, by how long it has lasted; while workers run, nobody's turn is
        missed as long as one of the first in line lives: look once in a while.
        """
        if record.phase is not RunPhase.RUN:
            return self._phase_s(now_ns) >= STUCK_S
        return not self._membership.refreshed_within(STUCK_S, now_ns)

    def _position(self) -> int | None:
        return self._membership.position(self._client.me.agent)

    def _on_run(self, record: ControlRecord, now_ns: int) -> None:
        roster = self._membership.roster
        if roster is None or roster.generation != record.generation:
            return
        reports = self._membership.read_reports(record.generation)
        finished = {a for a, report in reports.items() if report.kind is ReportKind.DONE}
        unfinished = [member for member in roster.members if member.agent not in finished]
        if not unfinished:
            self._stop(record, EXIT_OK, "every rank exited with code 0")
            return
        lost = [
            m for m in unfinished if self._membership.liveness_of(m.agent, now_ns) is Liveness.DEAD
        ]
        if lost:
            for member in lost:
                self._client.file_report_for(
                    member.agent, self._lost_report(member, record.generation, now_ns)
                )
            names = ", ".join(member.node for member in lost[:4])
            self._collect(record, ReportKind.NODE_LOST, f"no heartbeat of {names}")
            return
        if not finished:  # nodes that come now would have the whole of it begin again
            self._grow_if_useful(record, roster, now_ns)

    def _lost_report(self, member: Member, generation: int, now_ns: int) -> NodeReport:
        silence_s = self._membership.silence_s(member.agent, now_ns)
        since = f"for {silence_s:.0f} s" if silence_s < 1e6 else "since we look"
        return NodeReport(
            kind=ReportKind.NODE_LOST,
            node=member.node,
            generation=generation,
            failure_class=FailureClass.NODE_LOST,
            side=Side.INFRA,
            confidence=Confidence.PROBABLE,
            how=f"its agent has not been heard of {since}",
            culprits=(Entity(EntityKind.NODE, member.node),),
        )

    def _collect(self, record: ControlRecord, trigger: ReportKind, reason: str) -> None:
        by = self._client.me.node
        self._client.update_record(
            lambda now: step.collect(now, record, trigger=trigger, reason=reason, by=by)
        )

    def _stop(self, record: ControlRecord, exit_code: int, reason: str) -> None:
        by = self._client.me.node
        self._client.update_record(
            lambda now: step.stop(now, record, exit_code=exit_code, reason=reason, by=by)
        )

    def _missing(
        self, members: Sequence[Member], reports: Mapping[str, NodeReport]
    ) -> list[Member]:
        return [member for member in members if member.agent not in reports]

    def _on_collect(self, record: ControlRecord, view: RecordView, now_ns: int) -> None:
        roster = self._membership.roster
        if roster is None or roster.generation != record.generation:
            return
        reports = self._membership.read_reports(record.generation)
        missing = self._missing(roster.members, reports)
        phase_s = self._phase_s(now_ns)
        for member in missing:
            liveness = self._membership.liveness_of(member.agent, now_ns)
            if liveness is Liveness.DEAD:
                self._client.file_report_for(
                    member.agent, self._lost_report(member, record.generation, now_ns)
                )
            elif liveness is Liveness.SUSPECT or phase_s < self._timeouts.end_s:
                # One that is cut off has stopped its workers by the time it counts as dead.
                return
        if missing:
            reports = self._membership.read_reports(record.generation)
        cluster = self._cluster(record, roster, now_ns)
        collected = tuple(sorted(reports.values(), key=lambda report: report.arrival))
        now_s = view.store_now_s(now_ns)
        outcome = self._decide(collected, cluster, record.history, now_s)
        if outcome is None:
            return
        decision, note = outcome
        previous, self.last_decision = (
            self.last_decision,
            DecisionRecord(
                decision=decision,
                reports=collected,
                cluster=cluster,
                history=record.history,
                note=note,
            ),
        )
        # Before the record changes: the main thread looks here as soon as it has.
        if not self._client.update_record(
            lambda now: step.decide(now, record, decision, by=self._client.me.node, now_s=now_s)
        ):
            self.last_decision = previous

    def _on_rendezvous(self, record: ControlRecord, view: RecordView, now_ns: int) -> None:
        keys, store = self._client.keys, self._client.store
        ready = self._membership.read_ready(record.generation, now_ns)
        if self._in_backoff(record, view, now_ns) or self._may_have_workers(ready, now_ns):
            return
        roster = form_roster(
            record.generation, ready, self._membership.roster, self._policy, record.excluded
        )
        if roster is None:
            self._enough_since_ns = None
            self._fail_if_too_late(record, now_ns)
            return
        if self._enough_since_ns is None:
            self._enough_since_ns = now_ns
        if not self._can_form(record, ready, roster, now_ns):
            return
        roster = self.extension.with_metadata(record, roster)
        done, entry = store.compare_and_set(
            keys.roster(record.generation), roster.to_bytes(), version=0
        )
        if not done:
            log.debug("generation %d was formed by another agent", record.generation)
            Roster.from_bytes(entry.value)

        by = self._client.me.node
        if self._client.update_record(lambda now: step.run(now, record, by=by)):
            delete_old_generations(store, keys, record.generation)

    def _in_backoff(self, record: ControlRecord, view: RecordView, now_ns: int) -> bool:
        """Say whether the back-off lasts; a board whose clock jumps back makes it no longer."""
        backoff_s = record.decision.backoff_s if record.decision is not None else 0.0
        return self._phase_s(now_ns) < backoff_s and view.store_now_s(now_ns) < record.not_before_s

    def _may_have_workers(self, ready: Sequence[Member], now_ns: int) -> bool:
        """Say whether workers of the last generation may live: no two generations train at once.

        A member's report says that its own are gone, and so does its being *ready*. One that is cut
        off or frozen has ended them by the time it counts as dead, one whose main thread hangs
        `Timing.end_s` after it heard of their end; it hears of that before it would count as dead.
        """
        previous, at_most_s = self._membership.roster, self._timeouts.dead_s + self._timeouts.end_s
        if previous is None or (now_ns - self._workers_ended_ns) / NS_PER_S >= at_most_s:
            return False
        ended = {member.agent for member in ready}
        remaining = [m for m in previous.members if m.agent not in ended]
        if not remaining:
            return False
        missing = self._missing(remaining, self._membership.read_reports(previous.generation))
        return any(
            self._membership.liveness_of(m.agent, now_ns) is not Liveness.DEAD for m in missing
        )

    def _can_form(
        self, record: ControlRecord, members: Sequence[Member], roster: Roster, now_ns: int
    ) -> bool:
        """Say whether nobody is worth waiting for any more."""
        assert self._enough_since_ns is not None
        ready = {member.node for member in members}
        coming = [n for n in self._membership.live_nodes(record, now_ns) if n not in ready]
        has_all = len(roster.members) == trainable_count(self._policy.nodes_max, self._policy)
        waited_s = (now_ns - self._enough_since_ns) / NS_PER_S
        if record.generation == 0 and self._membership.roster is None:
            # Whoever has not started yet is not known: only the full number needs no last call.
            return has_all or waited_s >= self._timeouts.first_call_s
        if not coming:
            return True
        # A survivor that is not ready yet would lose its place; a late spare loses nothing.
        old = (
            {m.node for m in self._membership.roster.members} if self._membership.roster else set()
        )
        if has_all and not old.intersection(coming):
            return True
        return waited_s >= self._timeouts.last_call_s

    def _fail_if_too_late(self, record: ControlRecord, now_ns: int) -> None:
        live = self._membership.live_nodes(record, now_ns)
        limit_s = self._timeouts.join_timeout_s
        if self._phase_s(now_ns) < limit_s:
            return
        must_be_full = self._policy.on_exhausted is OnExhausted.REQUEUE
        least = self._policy.nodes_max if must_be_full else self._policy.nodes_min
        reason = (
            f"{len(live)} of at least {least} nodes came within {limit_s:g} s: {', '.join(live)}"
        )
        code = EXIT_FAIL if self._membership.roster is None else EXIT_REQUEUE
        self._stop(record, code, reason)

    def _grow_if_useful(self, record: ControlRecord, roster: Roster, now_ns: int) -> None:
        """Restart with more nodes where some wait and seats are empty; see `may_grow`.

        The least is lost right after a checkpoint. Of a job that tells of none, nobody knows a good
        moment: it grows once nodes have waited for ``grow_after_s``.
        """
        after_s = self._timeouts.grow_after_s
        cluster = self._cluster(record, roster, now_ns)
        waiting = frozenset(cluster.live) - {member.node for member in roster.members}
        if after_s is None or not waiting:
            self._waiting_nodes = None
            return
        if self._waiting_nodes is None or self._waiting_nodes[0] != waiting:
            self._waiting_nodes = (waiting, now_ns)
        has_saved, self._last_checkpoint_step = (
            self._membership.checkpoint_step != self._last_checkpoint_step,
            self._membership.checkpoint_step,
        )
        waited_s = (now_ns - self._waiting_nodes[1]) / NS_PER_S
        now_s = self._client.store_now_s
        growth = check_growth(
            cluster,
            grown_at_s=record.grown_at_s,
            now_s=now_s,
            waiting_since_s=now_s - waited_s,
            at_checkpoint=has_saved
            or (self._membership.checkpoint_step is None and waited_s >= after_s),
            settle_s=min(GROWTH_SETTLE_S, after_s),
        )
        if growth.n_nodes == 0:
            return

        by = self._client.me.node
        self._client.update_record(
            lambda now: step.grow(now, record, reason=growth.why, by=by, now_s=now_s)
        )

    def _cluster(self, record: ControlRecord, roster: Roster, now_ns: int) -> ClusterState:
        return ClusterState(
            policy=self._policy,
            generation=record.generation,
            members=tuple(member.node for member in roster.members),
            live=self._membership.live_nodes(record, now_ns),
            excluded=record.excluded,
            suspected=record.suspected,
        )

    def _on_drain(self, record: ControlRecord, now_ns: int) -> None:
        roster = self._membership.roster
        if roster is None or roster.generation != record.generation:
            self._stop(record, EXIT_REQUEUE, record.reason)
            return
        missing = self._missing(roster.members, self._membership.read_reports(record.generation))
        if all(
            self._membership.liveness_of(member.agent, now_ns) is Liveness.DEAD
            for member in missing
        ):
            self._stop(record, EXIT_REQUEUE, record.reason)
