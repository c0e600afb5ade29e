"""What one agent does for all of a run: notice the dead, gather reports, decide, give out seats.

Any agent can; the first live one in the order of the last roster does, as long as the board answers
it at once (see `Sight.first`). Two that both think it is theirs do no harm: every step is one
compare-and-swap, and whoever comes second follows.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuops.control.link import Link
from gpuops.control.liveness import Life, Liveness
from gpuops.control.membership import form, seats
from gpuops.control.past import forget_before
from gpuops.control.record import ControlRecord, Member, Phase, Roster
from gpuops.control.sight import DEPUTIES, Sight
from gpuops.control.view import View
from gpuops.control.witness import Aside
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_REQUEUE
from gpuops.host.clock import Clock
from gpuops.incident.budget import GROW_SNOOZE_S, history_after, may_grow
from gpuops.incident.decision import (
    HISTORY_MAX,
    Cluster,
    Decision,
    NodeReport,
    OnExhausted,
    PastFailure,
    ReportKind,
    Terms,
    Verdict,
)
from gpuops.incident.repeats import left_out
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Side
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)

LOOK_S = 0.5
# Those further back in line: a list of all heartbeats costs, and two would have to die before their
# turn. With a beat more it stays below `BLIND_S`, beyond which a look sees no more.
LOOK_BEHIND_S = 1.5
# For how long the record may stand still in a phase that passes before others than deputies look.
STUCK_S = 20.0
FIRST_CALL_S = 30.0  # torchrun's last call: nodes of one job start at different times

# The decision and a note on how it came about; None while somebody is still being asked.
Decide = Callable[
    [Sequence[NodeReport], Cluster, Sequence[PastFailure], float],
    tuple[Decision, str | None] | None,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long the leader waits, in seconds; see `gpuops.agent.plan.Plan`."""

    suspect_s: float = 6.0
    dead_s: float = 15.0
    end_s: float = 15.0  # for a live agent to end its workers and report; then it kills them
    last_call_s: float = 5.0
    first_call_s: float = FIRST_CALL_S
    join_timeout_s: float = 600.0
    grow_after_s: float | None = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision of ours that became the record, with all that it rests on."""

    decision: Decision
    reports: tuple[NodeReport, ...]
    cluster: Cluster
    history: tuple[PastFailure, ...]
    note: str | None


class Leader:
    """The common duties, as one agent sees them.

    ``decided`` is the last decision that was this agent's; written by the control thread.
    ``aside`` has what the agents agree on beside.
    """

    def __init__(
        self, link: Link, clock: Clock, terms: Terms, timing: Timing, decide: Decide
    ) -> None:
        self._link = link
        self._clock = clock
        self._terms = terms
        self._timing = timing
        self._decide = decide
        life = Liveness(timing.suspect_s, timing.dead_s)
        self._sight = Sight(link.board, link.keys, life)
        self._since: tuple[int, Phase, int] | None = None
        self._left_ns = 0  # when the last generation's workers were to end
        self._feasible_ns: int | None = None
        self._waiting: tuple[frozenset[str], int] | None = None
        self._saved_before: int | None = None
        self.is_leader = False
        self.decided: Decided | None = None
        self.aside = Aside(self._sight)

    @property
    def is_near(self) -> bool:
        """Say whether this agent leads, or may soon have to."""
        place = self._place()
        return place is not None and place < DEPUTIES

    @property
    def roster(self) -> Roster | None:
        """Return the newest roster that was read."""
        return self._sight.roster

    @property
    def dead(self) -> tuple[str, ...]:
        """Return the agents that were dead when this one last looked; none where it never did."""
        return self._sight.dead

    def tick(self, view: View) -> None:
        """Do what is to be done now, if it is this agent's turn.

        Raises:
            BoardError: See `Board`.
        """
        now_ns = self._clock.mono_ns()
        record = view.record
        self._note_phase(record, now_ns)
        if record.phase is Phase.STOP:
            self.is_leader = False
            return
        # A deputy looks at every beat while something is happening, else now and then.
        is_steady = record.phase is Phase.RUN
        look_s = LOOK_S if (self._place() or 0) <= 1 else LOOK_BEHIND_S
        if is_steady and self._sight.looked_within_s(look_s, now_ns):
            return
        if self._place() is not None and not self.is_near and not self._is_stuck(record, now_ns):
            return
        self._sight.look(record, now_ns)
        self.is_leader = self._sight.first(now_ns) == self._link.me.agent
        if not self.is_leader:
            return
        self._lead(record, view, now_ns)
        self.aside.look(record)

    def _lead(self, record: ControlRecord, view: View, now_ns: int) -> None:
        if record.phase is Phase.RUN:
            self._while_running(record, now_ns)
        elif record.phase is Phase.GATHER:
            self._while_gathering(record, view, now_ns)
        elif record.phase is Phase.FORM:
            self._while_forming(record, view, now_ns)
        elif record.phase is Phase.DRAIN:
            self._while_draining(record, now_ns)

    def _note_phase(self, record: ControlRecord, now_ns: int) -> None:
        key = (record.generation, record.phase)
        if self._since is None or self._since[1] is Phase.RUN:
            self._left_ns = now_ns
        if self._since is None or self._since[:2] != key:
            self._since = (*key, now_ns)
            self._feasible_ns = None

    def _phase_s(self, now_ns: int) -> float:
        assert self._since is not None
        return (now_ns - self._since[2]) / NS_PER_S

    def _is_stuck(self, record: ControlRecord, now_ns: int) -> bool:
        """Say whether those in line before us do not seem to act.

        In a phase that passes, by how long it has lasted; while workers run, nobody's turn is
        missed as long as one of the first in line lives: look once in a while.
        """
        if record.phase is not Phase.RUN:
            return self._phase_s(now_ns) >= STUCK_S
        return not self._sight.looked_within_s(STUCK_S, now_ns)

    def _place(self) -> int | None:
        return self._sight.place(self._link.me.agent)

    def _while_running(self, record: ControlRecord, now_ns: int) -> None:
        roster = self._sight.roster
        if roster is None or roster.generation != record.generation:
            return
        reports = self._sight.reports(record.generation)
        done = {a for a, report in reports.items() if report.kind is ReportKind.DONE}
        left = [member for member in roster.members if member.agent not in done]
        if not left:
            self._stop(record, EXIT_OK, "every rank exited with code 0")
            return
        lost = [m for m in left if self._sight.life(m.agent, now_ns) is Life.DEAD]
        if lost:
            for member in lost:
                self._link.report_for(member.agent, self._lost(member, record.generation, now_ns))
            names = ", ".join(member.node for member in lost[:4])
            self._gather(record, ReportKind.NODE_LOST, f"no heartbeat of {names}")
            return
        if not done:  # nodes that come now would have the whole of it begin again
            self._consider_growth(record, roster, now_ns)

    def _lost(self, member: Member, generation: int, now_ns: int) -> NodeReport:
        silent_s = self._sight.silent_s(member.agent, now_ns)
        since = f"for {silent_s:.0f} s" if silent_s < 1e6 else "since we look"
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

    def _gather(self, record: ControlRecord, trigger: ReportKind, reason: str) -> None:
        def change(now: ControlRecord) -> ControlRecord | None:
            if (now.generation, now.phase) != (record.generation, Phase.RUN):
                return None
            me = self._link.me.node
            return replace(now, phase=Phase.GATHER, trigger=trigger, reason=reason, decided_by=me)

        self._link.propose(change)

    def _stop(self, record: ControlRecord, code: int, reason: str) -> None:
        def change(now: ControlRecord) -> ControlRecord | None:
            if (now.generation, now.phase) != (record.generation, record.phase):
                return None
            me = self._link.me.node
            return replace(now, phase=Phase.STOP, exit_code=code, reason=reason, decided_by=me)

        self._link.propose(change)

    def _missing(
        self, members: Sequence[Member], reports: Mapping[str, NodeReport]
    ) -> list[Member]:
        return [member for member in members if member.agent not in reports]

    def _while_gathering(self, record: ControlRecord, view: View, now_ns: int) -> None:
        roster = self._sight.roster
        if roster is None or roster.generation != record.generation:
            return
        reports = self._sight.reports(record.generation)
        missing = self._missing(roster.members, reports)
        phase_s = self._phase_s(now_ns)
        for member in missing:
            life = self._sight.life(member.agent, now_ns)
            if life is Life.DEAD:
                self._link.report_for(member.agent, self._lost(member, record.generation, now_ns))
            elif life is Life.SUSPECT or phase_s < self._timing.end_s:
                # One that is cut off has stopped its workers by the time it counts as dead.
                return
        if missing:
            reports = self._sight.reports(record.generation)
        cluster = self._cluster(record, roster, now_ns)
        gathered = tuple(sorted(reports.values(), key=lambda report: report.arrival))
        now_s = view.now_s(now_ns)
        made = self._decide(gathered, cluster, record.history, now_s)
        if made is None:
            return
        decision, note = made
        before, self.decided = (
            self.decided,
            Decided(
                decision=decision,
                reports=gathered,
                cluster=cluster,
                history=record.history,
                note=note,
            ),
        )
        # Before the record changes: the main thread looks here as soon as it has.
        if not self._link.propose(lambda now: self._follow(now, record, decision, now_s)):
            self.decided = before

    def _follow(
        self, now: ControlRecord, record: ControlRecord, decision: Decision, now_s: float
    ) -> ControlRecord | None:
        """Return what *decision* makes of the record *now*, None if somebody else was faster."""
        if (now.generation, now.phase) != (record.generation, Phase.GATHER):
            return None
        changed = replace(
            now,
            decision=decision,
            reason=decision.reason,
            decided_by=self._link.me.node,
            excluded={**now.excluded, **decision.exclude},
            excluded_checkpoint=left_out(now.excluded_checkpoint, decision),
            history=history_after(decision, now.history),
        )
        if decision.verdict is Verdict.RESTART:
            return replace(
                changed,
                phase=Phase.FORM,
                generation=now.generation + 1,
                not_before_s=now_s + decision.backoff_s,
                trigger=None,
            )
        code = EXIT_FAIL if decision.exit_code is None else decision.exit_code
        return replace(changed, phase=Phase.STOP, exit_code=code)

    def _while_forming(self, record: ControlRecord, view: View, now_ns: int) -> None:
        keys, board = self._link.keys, self._link.board
        there = self._sight.ready(record.generation, now_ns)
        if self._holds_back(record, view, now_ns) or self._may_still_train(there, now_ns):
            return
        roster = form(record.generation, there, self._sight.roster, self._terms, record.excluded)
        if roster is None:
            self._feasible_ns = None
            self._give_up_forming(record, now_ns)
            return
        if self._feasible_ns is None:
            self._feasible_ns = now_ns
        if not self._is_complete(record, there, roster, now_ns):
            return
        roster = self.aside.noted(record, roster)
        done, entry = board.swap(keys.roster(record.generation), roster.to_bytes(), version=0)
        if not done:
            log.debug("generation %d was formed by another agent", record.generation)
            Roster.from_bytes(entry.value)

        def change(now: ControlRecord) -> ControlRecord | None:
            if (now.generation, now.phase) != (record.generation, Phase.FORM):
                return None
            return replace(now, phase=Phase.RUN, decided_by=self._link.me.node)

        if self._link.propose(change):
            forget_before(board, keys, record.generation)

    def _holds_back(self, record: ControlRecord, view: View, now_ns: int) -> bool:
        """Say whether the back-off lasts; a board whose clock jumps back makes it no longer."""
        backoff_s = record.decision.backoff_s if record.decision is not None else 0.0
        return self._phase_s(now_ns) < backoff_s and view.now_s(now_ns) < record.not_before_s

    def _may_still_train(self, there: Sequence[Member], now_ns: int) -> bool:
        """Say whether workers of the last generation may live: no two generations train at once.

        A member's report says that its own are gone, and so does its being *there*. One that is cut
        off or frozen has ended them by the time it counts as dead, one whose main thread hangs
        `Timing.end_s` after it heard of their end; it hears of that before it would count as dead.
        """
        before, at_most_s = self._sight.roster, self._timing.dead_s + self._timing.end_s
        if before is None or (now_ns - self._left_ns) / NS_PER_S >= at_most_s:
            return False
        gone = {member.agent for member in there}
        left = [m for m in before.members if m.agent not in gone]
        if not left:
            return False
        missing = self._missing(left, self._sight.reports(before.generation))
        return any(self._sight.life(m.agent, now_ns) is not Life.DEAD for m in missing)

    def _is_complete(
        self, record: ControlRecord, there: Sequence[Member], roster: Roster, now_ns: int
    ) -> bool:
        """Say whether nobody is worth waiting for any more."""
        assert self._feasible_ns is not None
        ready = {member.node for member in there}
        coming = [n for n in self._sight.live_nodes(record, now_ns) if n not in ready]
        has_all = len(roster.members) == seats(self._terms.nodes_max, self._terms)
        waited_s = (now_ns - self._feasible_ns) / NS_PER_S
        if record.generation == 0 and self._sight.roster is None:
            # Whoever has not started yet is not known: only the full number needs no last call.
            return has_all or waited_s >= self._timing.first_call_s
        if not coming:
            return True
        # A survivor that is not ready yet would lose its place; a late spare loses nothing.
        old = {m.node for m in self._sight.roster.members} if self._sight.roster else set()
        if has_all and not old.intersection(coming):
            return True
        return waited_s >= self._timing.last_call_s

    def _give_up_forming(self, record: ControlRecord, now_ns: int) -> None:
        live = self._sight.live_nodes(record, now_ns)
        limit_s = self._timing.join_timeout_s
        if self._phase_s(now_ns) < limit_s:
            return
        must_be_full = self._terms.on_exhausted is OnExhausted.REQUEUE
        least = self._terms.nodes_max if must_be_full else self._terms.nodes_min
        reason = (
            f"{len(live)} of at least {least} nodes came within {limit_s:g} s: {', '.join(live)}"
        )
        code = EXIT_FAIL if self._sight.roster is None else EXIT_REQUEUE
        self._stop(record, code, reason)

    def _consider_growth(self, record: ControlRecord, roster: Roster, now_ns: int) -> None:
        """Restart with more nodes where some wait and seats are empty; see `may_grow`.

        The least is lost right after a checkpoint. Of a job that tells of none, nobody knows a good
        moment: it grows once nodes have waited for ``grow_after_s``.
        """
        after_s = self._timing.grow_after_s
        cluster = self._cluster(record, roster, now_ns)
        waiting = frozenset(cluster.live) - {member.node for member in roster.members}
        if after_s is None or not waiting:
            self._waiting = None
            return
        if self._waiting is None or self._waiting[0] != waiting:
            self._waiting = (waiting, now_ns)
        has_saved, self._saved_before = self._sight.saved != self._saved_before, self._sight.saved
        waited_s = (now_ns - self._waiting[1]) / NS_PER_S
        now_s = self._link.now_s
        growth = may_grow(
            cluster,
            grown_s=record.grown_s,
            now_s=now_s,
            waiting_since_s=now_s - waited_s,
            at_checkpoint=has_saved or (self._sight.saved is None and waited_s >= after_s),
            snooze_s=min(GROW_SNOOZE_S, after_s),
        )
        if growth.nodes == 0:
            return

        def change(now: ControlRecord) -> ControlRecord | None:
            if (now.generation, now.phase) != (record.generation, Phase.RUN):
                return None
            return replace(
                now,
                phase=Phase.FORM,
                generation=now.generation + 1,
                reason=growth.why,
                decided_by=self._link.me.node,
                grown_s=(*now.grown_s, now_s)[-HISTORY_MAX:],
                decision=None,
                not_before_s=0.0,
            )

        self._link.propose(change)

    def _cluster(self, record: ControlRecord, roster: Roster, now_ns: int) -> Cluster:
        return Cluster(
            terms=self._terms,
            generation=record.generation,
            members=tuple(member.node for member in roster.members),
            live=self._sight.live_nodes(record, now_ns),
            excluded=record.excluded,
            doubted=record.doubted,
        )

    def _while_draining(self, record: ControlRecord, now_ns: int) -> None:
        roster = self._sight.roster
        if roster is None or roster.generation != record.generation:
            self._stop(record, EXIT_REQUEUE, record.reason)
            return
        missing = self._missing(roster.members, self._sight.reports(record.generation))
        if all(self._sight.life(member.agent, now_ns) is Life.DEAD for member in missing):
            self._stop(record, EXIT_REQUEUE, record.reason)
