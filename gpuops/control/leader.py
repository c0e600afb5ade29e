"""What the leader of a run does: it reads what all agents wrote and writes what changes next.

Any agent can lead. The first live one in the order of the last roster does, as long as the control
store answers it at once (see `MembershipView.current_leader`). Two agents that both think they lead
do no harm: every change is one compare-and-set, and the second follows the first.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from gpuops.control.client import ControlClient
from gpuops.control.join import WAIT_NOTICE_S, describe_arrivals
from gpuops.control.membership import (
    N_STANDBYS,
    N_WATCHING,
    LivenessTracker,
    MembershipView,
    form_roster,
)
from gpuops.control.record import (
    ControlRecord,
    RecordError,
    RecordView,
    Roster,
    RunPhase,
    delete_old_generations,
)
from gpuops.control.step import (
    DecisionRecord,
    FileReports,
    FormRoster,
    LeaderPolicy,
    Observation,
    UpdateRecord,
    is_held_back,
    next_change,
)
from gpuops.control.store import VALUE_BYTES_MAX, ControlStoreError, Entry
from gpuops.control.tcp.server_connection import REFUSED_PREFIX
from gpuops.control.transitions import form_again, stop
from gpuops.errors import EXIT_FAIL
from gpuops.host.clock import Clock
from gpuops.incident.decision import REASON_CHARS_MAX, NodeReport, ReportKind
from gpuops.log import log_notice
from gpuops.model import Json
from gpuops.units import NS_PER_S

log = logging.getLogger(__name__)


class LeaderExtension:
    """Called by the leader in its control thread; an error in it affects the extension only."""

    def roster_metadata(
        self,
        record: ControlRecord,  # noqa: ARG002 an interface
        roster: Roster,  # noqa: ARG002
        previous: Roster | None,  # noqa: ARG002
        ready: Mapping[str, Entry],  # noqa: ARG002
    ) -> Json:
        """Return the metadata of *roster*, which is about to be written.

        *ready* has the entries of all ready agents, by agent; *previous* is the roster before.

        Raises:
            ControlStoreError: The store did not take what goes with it; the roster is not written.
        """
        return {}

    def on_heartbeats(
        self, record: ControlRecord, roster: Roster, heartbeats: Mapping[str, Entry]
    ) -> None:
        """Process the newest *heartbeats*, by agent, while the workers of *roster* run or drain."""


class ExtensionRunner:
    """Calls the leader's extensions; a failure there keeps no node out of a roster."""

    def __init__(
        self, membership: MembershipView, extensions: Iterable[LeaderExtension] = ()
    ) -> None:
        self._extensions = tuple(extensions)
        self._membership = membership
        self._has_failed = False

    def pass_heartbeats(self, record: ControlRecord) -> None:
        """Pass the heartbeats of the agents that train to the extensions."""
        membership, roster = self._membership, self._membership.roster
        is_on = record.phase in {RunPhase.RUN, RunPhase.DRAIN}
        if is_on and roster is not None and roster.generation == record.generation:
            for each in self._extensions:
                self._run_safely(partial(each.on_heartbeats, record, roster, membership.heartbeats))

    def with_metadata(self, record: ControlRecord, roster: Roster) -> Roster:
        """Return *roster* with the metadata of all extensions.

        Raises:
            ControlStoreError: An extension could not write what goes with it.
        """
        membership, found = self._membership, dict(roster.metadata)
        for each in self._extensions:
            try:
                found |= each.roster_metadata(
                    record, roster, membership.roster, membership.ready_entries
                )
            except ControlStoreError:
                raise
            except Exception as exc:  # noqa: BLE001 boundary: see `_run_safely`
                self._report_failure(exc)
        return replace(roster, metadata=found)

    def _run_safely(self, call: Callable[[], None]) -> None:
        """Call *call*; its failure must not keep nodes from joining or being replaced."""
        try:
            call()
        except ControlStoreError as exc:
            log.debug("the control store refuses what a leader extension writes: %s", exc)
        except Exception as exc:  # noqa: BLE001 boundary: see above
            self._report_failure(exc)

    def _report_failure(self, exc: Exception) -> None:
        if not self._has_failed:
            log.error("a leader extension failed; membership is not affected", exc_info=exc)
        self._has_failed = True


def _why_unusable(entry: Entry, seen: Observation) -> str | None:
    """Return why the roster that another leader has written must not run; None where it may.

    The record does not say so yet: that leader died in between, or is slow.
    """
    try:
        left = Roster.from_bytes(entry.value)
    except RecordError as exc:
        return f"its roster cannot be read: {exc}"
    ready = {member.agent for member in seen.ready if member.node not in seen.record.excluded}
    gone = [member.node for member in left.members if member.agent not in ready]
    return f"its roster names {', '.join(gone[:4])}, not ready any more" if gone else None


REFRESH_S = 0.5
# Agents further back in the succession refresh less often: a list of all heartbeats costs, and two
# leaders would have to die before their turn. With one heartbeat more it stays below `BLIND_S`.
STANDBY_REFRESH_S = 1.5
WATCHING_REFRESH_S = 2.0  # of those after them; more than `OBSERVED_GAP_S_MAX` would not count
# For how long a passing phase may last before agents beyond the standbys check.
STUCK_S = 20.0


class Leader:
    """The duties of the leader, as one agent sees them.

    *on_decision* gets each decision of this agent before it is written, in the control thread: the
    write may still lose against another leader's. *extensions* add to rosters and follow the
    heartbeats.
    """

    def __init__(
        self,
        client: ControlClient,
        clock: Clock,
        policy: LeaderPolicy,
        *,
        on_decision: Callable[[DecisionRecord], None],
        extensions: Iterable[LeaderExtension] = (),
    ) -> None:
        self._client = client
        self._clock = clock
        self._policy = policy
        self._on_decision = on_decision
        liveness = LivenessTracker(policy.timeouts.suspect_s, policy.timeouts.dead_s)
        self._membership = MembershipView(client.store, client.keys, liveness)
        self._extensions = ExtensionRunner(self._membership, extensions)
        self._phase_since: tuple[int, RunPhase, int] | None = None
        self._workers_ended_ns = 0  # when the last generation's workers were to end
        self._enough_since_ns: int | None = None
        self._waiting_nodes: tuple[frozenset[str], int] | None = None
        self._last_checkpoint_step: int | None = None
        self._shown: set[int | str] = set()  # generations and refusals that the user knows of
        self._refusals_due_ns = 0
        self.is_leader = False

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
        # Else it would have its place by order of arrival, perhaps far back, until it refreshes.
        self._membership.add_roster(self._client.roster)
        if not self._is_refresh_due(record, now_ns):
            return
        self._membership.refresh(record, now_ns)
        self.is_leader = self._membership.current_leader(now_ns) == self._client.me.agent
        if not self.is_leader:
            return
        self._coordinate(view, now_ns)
        self._show_who_is_missing(record, now_ns)
        self._extensions.pass_heartbeats(record)

    def _is_refresh_due(self, record: ControlRecord, now_ns: int) -> bool:
        """Say whether this agent has to read all heartbeats now.

        Standbys do at each heartbeat in a passing phase, less often while workers run. The leader
        does at each: when what its extensions process changes, heartbeats come more often.
        """
        position = self._position() or 0
        if position >= N_WATCHING:
            return self._is_stuck(record, now_ns)
        if position >= N_STANDBYS:
            refresh_s = WATCHING_REFRESH_S
        elif record.phase is not RunPhase.RUN or self.is_leader:
            return True
        else:
            refresh_s = REFRESH_S if position <= 1 else STANDBY_REFRESH_S
        return not self._membership.refreshed_within(refresh_s, now_ns)

    def _coordinate(self, view: RecordView, now_ns: int) -> None:
        """Write what changes next."""
        filed: frozenset[str] = frozenset()
        while True:
            seen = self._observe(view, now_ns, filed)
            change = next_change(seen, self._policy, self._client.me.node)
            if not isinstance(change, FileReports):
                break
            for agent, report in change.reports.items():
                self._client.file_report_for(agent, report)
            filed |= change.reports.keys()
        if isinstance(change, FormRoster):
            self._write_roster(seen, change)
        elif isinstance(change, UpdateRecord):
            if change.decided is not None:
                # Before the record changes: another thread records the decision as soon as it has.
                self._on_decision(change.decided)
            self._client.update_record(change.update)

    def _show_who_is_missing(self, record: ControlRecord, now_ns: int) -> None:
        """Tell the user, once, which nodes have come so far, and which agents were refused."""
        if record.phase is RunPhase.RENDEZVOUS and self._phase_s(now_ns) >= WAIT_NOTICE_S:
            nodes = self._membership.live_nodes(record, now_ns)
            left_s = max(self._policy.timeouts.join_timeout_s - self._phase_s(now_ns), 0.0)
            if len(nodes) < self._policy.restart.nodes_max:
                text = describe_arrivals(nodes, self._policy.n_nodes_min, left_s)
                self._show(record.generation, text)
        if now_ns >= self._refusals_due_ns:
            self._refusals_due_ns = now_ns + round(WAIT_NOTICE_S * NS_PER_S)
            for entry in self._client.store.list(REFUSED_PREFIX).values():
                text = entry.value.decode(errors="replace")[:REASON_CHARS_MAX]
                self._show(text, text)

    def _show(self, what: int | str, text: str) -> None:
        if what not in self._shown:
            self._shown.add(what)
            log_notice(text)

    def _write_roster(self, seen: Observation, change: FormRoster) -> None:
        keys, store, record = self._client.keys, self._client.store, seen.record
        body = self._extensions.with_metadata(record, change.roster).to_bytes()
        if len(body) > VALUE_BYTES_MAX:
            # Without its metadata the run would start from scratch, and nobody would know.
            why = (
                f"the roster of generation {record.generation} has {len(change.roster.members)} "
                f"nodes and {len(body)} bytes; a control store takes {VALUE_BYTES_MAX}"
            )
            by = self._client.me.node
            self._client.update_record(
                partial(stop, seen=record, exit_code=EXIT_FAIL, reason=why, by=by)
            )
            return
        done, entry = store.compare_and_set(keys.roster(record.generation), body, version=0)
        reason = None if done else _why_unusable(entry, seen)
        if reason is not None:
            log.warning("generation %d is formed again: %s", record.generation, reason)
            by = self._client.me.node
            if self._client.update_record(partial(form_again, seen=record, reason=reason, by=by)):
                store.delete(keys.generation(record.generation))  # which never ran
        elif self._client.update_record(change.update):
            delete_old_generations(store, keys, record.generation)

    def _observe(self, view: RecordView, now_ns: int, filed: frozenset[str]) -> Observation:
        membership, record = self._membership, view.record
        roster = membership.roster
        agents = [member.agent for member in roster.members] if roster is not None else []
        ended_s = (now_ns - self._workers_ended_ns) / NS_PER_S
        is_over = (
            record.phase is RunPhase.RENDEZVOUS and ended_s >= self._policy.timeouts.workers_end_s
        )
        seen = Observation(
            record=record,
            roster=roster,
            live=membership.live_nodes(record, now_ns),
            liveness={agent: membership.liveness_of(agent, now_ns) for agent in agents},
            silence_s={agent: membership.silence_s(agent, now_ns) for agent in agents},
            now_s=view.store_now_s(now_ns),
            phase_s=self._phase_s(now_ns),
            workers_ended_s=ended_s,
            reports={} if roster is None or is_over else self._read_reports(roster.generation),
            filed=filed,
            checkpoint_step=membership.checkpoint_step,
            closed=membership.closed_agents(agents, now_ns)
            if record.phase in {RunPhase.RUN, RunPhase.COLLECT}
            else frozenset(),
            settled=membership.read_settled(record.generation)
            if record.phase is RunPhase.DRAIN
            else frozenset(),
        )
        if record.phase is RunPhase.RENDEZVOUS:
            return self._observe_ready(seen, now_ns)
        return self._observe_waiting(seen, now_ns) if record.phase is RunPhase.RUN else seen

    def _read_reports(self, generation: int, *, of_gates: bool = False) -> dict[str, NodeReport]:
        """Return the reports on *generation*, or those of nodes whose check kept them out of it."""
        found = self._membership.read_reports(generation)
        is_gate = {agent: r.kind is ReportKind.GATE_FAILED for agent, r in found.items()}
        return {agent: r for agent, r in found.items() if is_gate[agent] == of_gates}

    def _observe_ready(self, seen: Observation, now_ns: int) -> Observation:
        generation, excluded = seen.record.generation, seen.record.excluded
        ready = tuple(self._membership.read_ready(generation, now_ns))
        # A node is excluded once its report is filed.
        failed = self._read_reports(generation, of_gates=True) if excluded else {}
        # A node that was readmitted is checked again.
        gates = tuple(report for report in failed.values() if report.node in excluded)
        seen = replace(seen, ready=ready, failed_gates=gates)
        if is_held_back(seen, self._policy.timeouts):
            return seen
        candidate = form_roster(generation, ready, seen.roster, self._policy.restart, excluded)
        if candidate is None:
            self._enough_since_ns = None
            return seen
        if self._enough_since_ns is None:
            self._enough_since_ns = now_ns
        enough_s = (now_ns - self._enough_since_ns) / NS_PER_S
        return replace(seen, candidate=candidate, enough_s=enough_s)

    def _observe_waiting(self, seen: Observation, now_ns: int) -> Observation:
        if not seen.waiting:
            self._waiting_nodes = None
            return seen
        if self._waiting_nodes is None or self._waiting_nodes[0] != seen.waiting:
            self._waiting_nodes = (seen.waiting, now_ns)
        has_saved = seen.checkpoint_step != self._last_checkpoint_step
        self._last_checkpoint_step = seen.checkpoint_step
        waiting_s = (now_ns - self._waiting_nodes[1]) / NS_PER_S
        return replace(seen, waiting_s=waiting_s, has_saved=has_saved)

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
        """Say whether the agents before this one in the succession seem not to act.

        A passing phase shows it by how long it has lasted. While workers run, this agent refreshes
        once in `STUCK_S` to see whether one of the standbys lives.
        """
        if record.phase is not RunPhase.RUN:
            return self._phase_s(now_ns) >= STUCK_S
        return not self._membership.refreshed_within(STUCK_S, now_ns)

    def _position(self) -> int | None:
        return self._membership.position(self._client.me.agent)
