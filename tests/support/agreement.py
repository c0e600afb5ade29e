"""Agents without processes: the whole agreement on a fake clock, in one thread.

Each has a real `ControlClient` and `Leader` over one `MemoryControlStore`; only what `gpuops.agent`
does with workers is played. A link that is cut answers nothing, a frozen agent does nothing at all.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.leader import Leader
from gpuops.control.membership import request_drain
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import ControlRecord, Member, RunPhase, pack
from gpuops.control.step import LeaderPolicy, LeaderTimeouts
from gpuops.control.store import (
    CLOSED_DEAD_S,
    ControlStoreError,
    ControlStoreUnreachableError,
)
from gpuops.control.threads import AgentCallbacks, ControlThreads
from gpuops.errors import EXIT_NODE_UNHEALTHY, EXIT_REQUEUE
from gpuops.host.clock import FakeClock
from gpuops.incident.decide import decide
from gpuops.incident.decision import (
    NodeReport,
    PastFailure,
    ReportKind,
    RestartDecision,
    RestartPolicy,
    RunAction,
)
from gpuops.model import FailureClass, Side


def restart(reports, cluster, _history, now_s):
    """Restart whatever happened; the policy has tests of its own."""
    cause = min(reports, key=lambda report: report.arrival, default=None)
    failure = PastFailure(
        generation=cluster.generation,
        at_s=now_s,
        failure_class=FailureClass.UNRESOLVED,
        side=Side.AMBIGUOUS,
        is_counted=True,
    )
    made = RestartDecision(
        action=RunAction.RESTART, rule="test", reason="test", failure=failure, cause=cause
    )
    return made, None


def by_the_table(reports, cluster, history, now_s):
    """Decide as a run without a plug-in does."""
    return decide(reports, cluster, history, now_s), None


class CutBoard:
    """A board that can be cut off from one agent, and that loses calls and answers on request.

    *lose* is asked before each call: "call" (it never arrives), "answer" (it is done, and nobody
    hears of it), or None.
    """

    def __init__(self, board):
        self._store = board
        self.is_cut = False
        self.lose = lambda _name: None
        self.closed_s = 0.0

    def disconnected_s(self):
        return self.closed_s

    def __getattr__(self, name):
        act = getattr(self._store, name)

        def call(*args, **kwargs):
            lost = "call" if self.is_cut else self.lose(name)
            if lost == "call":
                raise ControlStoreUnreachableError("cut")
            answer = act(*args, **kwargs)
            if lost == "answer":
                raise ControlStoreUnreachableError("the answer was lost")
            return answer

        return call


class Player:
    """One agent: what it would do with workers, without any."""

    def __init__(self, world, number, order=None):
        self.world = world
        self.node = f"n{number}"
        self.store = CutBoard(world.new_handle())
        self.me = Member(
            agent=str(UUID(int=world.next_agent())),
            node=self.node,
            address=self.node,
            n_workers=world.n_workers,
            node_rank_hint=order,
            master_port=1000 + number,
        )
        fresh = ControlRecord(
            run_id=self.me.agent, folder="run", generation=0, phase=RunPhase.RENDEZVOUS, since_s=0.0
        )
        view = join(self.store, self.me, fresh, world.clock, world.pass_time)
        self.link = ControlClient(self.store, self.me, view, world.clock, fence_timeout_s=10.0)
        self.decided = []
        self.leader = Leader(
            self.link,
            world.clock,
            LeaderPolicy(
                restart=world.policy,
                timeouts=world.timing,
                decide=world.decide,
                spares=world.spares,
            ),
            on_decision=self.decided.append,
            extensions=[each for each in [world.extension(self)] if each],
        )
        callbacks = AgentCallbacks(
            on_fence=lambda _s: self._killed(),
            running_generation=lambda: self.running,
            heartbeat_payload=self.heartbeat_payload,
        )
        self.threads = ControlThreads(self.link, callbacks, self.leader, world.clock)
        self.running = None  # the generation whose workers live here
        self.rank = None
        self.left = self.seated = -1
        self.ready_entries = -1
        self.is_frozen = False
        self.is_dead = False
        self.is_stuck = False  # its main thread does nothing, its control thread beats
        self.fails = None  # a report to make of the generation that runs
        self.blames = False  # with evidence against its node
        self.is_sick = False  # it fails its check before it joins
        self.closed_ns = None  # since when it has no connection
        self.ends_in_s = 0.0  # what its workers take to end when they are asked to
        self.drains = False
        self.saves_s = 0.0  # what its last state takes to persist in a drain
        self.settled_ns = None  # when it has
        self.unsaid = None  # a trigger, if any, and a report that are not on the board yet
        self.ending = None  # what to report, and when the workers are gone
        self.done = False
        self.exit_code = None

    def is_answered_late(self, seconds):
        """Let each of its heartbeats take *seconds*; nobody else acts meanwhile."""

        def wait(name):
            self.world.clock.advance(seconds if name == "heartbeat" else 0.0)

        self.store.lose = wait

    def _killed(self):
        """Hear that the workers here were killed, whatever the main thread does."""
        if not self.link.is_fenced and self.running is not None:
            self.left = self.running
            self.unsaid = (None, self._report(ReportKind.STOPPED, self.running))
        self.stop()

    def stop(self):
        self.running = self.ending = None

    def is_killed(self):
        """Die as a process does, whose connection is closed."""
        self.is_dead, self.running = True, None
        self._is_closed()

    def is_closed(self):
        """Lose the connection as both sides see it, and find no way to another."""
        self.store.is_cut = True
        self.closed_ns = self._is_closed()

    def _is_closed(self):
        now_ns, key = self.world.clock.mono_ns(), self.link.keys.heartbeat(self.me.agent)
        at_ns, version = now_ns + round(CLOSED_DEAD_S * 1e9), self.world.store.get(key).version
        self.world.removals.append((at_ns, key, version))
        return now_ns

    def act(self):
        """Take one turn of the control thread, one of the fence, one of the main thread."""
        if self.is_dead or self.is_frozen or self.exit_code is not None:
            return
        if self.closed_ns is not None:
            self.store.closed_s = (self.world.clock.mono_ns() - self.closed_ns) / 1e9
        with suppress(ControlStoreError):
            self.threads.run_once(hold_s=0.0)
            self.closed_ns, self.store.closed_s = None, 0.0
        self.threads.check_fence()
        self.threads.check_overdue_workers()
        if self.is_stuck:
            return
        with suppress(ControlStoreError):
            self._main()

    def _main(self):
        record = self.link.record
        if self.link.reset_error is not None:
            self.stop()
            self.exit_code = EXIT_REQUEUE
        elif self.link.is_fenced:
            self._after_fence()
        elif self.ending is not None:
            self._end_if_gone()
        elif self.unsaid is not None:
            self._say()
        elif record.phase is RunPhase.STOP:
            self.stop()
            self.exit_code = record.exit_code
        elif self.node in record.excluded and self.running is None:
            for key in (self.link.keys.heartbeat, self.link.keys.agent):
                self.store.delete(key(self.me.agent))
            self.exit_code = EXIT_NODE_UNHEALTHY
        elif self.running is not None:
            self._supervise(record)
        else:
            self._without_workers(record)

    def _after_fence(self):
        self.left = max(self.left, self.seated)
        if not self.link.clear_fence():
            return
        if self.left >= 0:
            self.unsaid = (ReportKind.NODE_LOST, self._report(ReportKind.NODE_LOST, self.left))
            self._say()

    def _say(self):
        """Put on the board what could not be put there yet."""
        trigger, report = self.unsaid
        if trigger is not None:
            self._collect(report.generation, trigger)
        self.link.file_report(report)
        self.unsaid = None

    def _without_workers(self, record):
        if record.generation > self.left:
            self._take_a_seat(record)
        elif record.phase is RunPhase.DRAIN:
            self._settle(record)

    def _settle(self, record):
        now_ns = self.world.clock.mono_ns()
        if self.settled_ns is None:
            self.settled_ns = now_ns + round(self.saves_s * 1e9)
        if now_ns >= self.settled_ns:
            self.link.mark_settled(record.generation)

    def _supervise(self, record):
        if record.generation > self.running or record.phase in {
            RunPhase.COLLECT,
            RunPhase.RENDEZVOUS,
        }:
            self._end(ReportKind.DONE if self.done else ReportKind.STOPPED)
        elif record.phase is RunPhase.DRAIN:
            self._end(ReportKind.STOPPED)
        elif self.drains:
            request_drain(self.link, "SIGTERM", None)
        elif self.fails is not None:
            kind, self.fails = self.fails, None
            self._end(kind, trigger=kind)
        elif self.done:
            self.link.file_report(self._report(ReportKind.DONE, self.running))

    def _end(self, kind, trigger=None):
        ends_in_s = 0.0 if self.done else self.ends_in_s  # those that are done are gone
        gone_ns = self.world.clock.mono_ns() + round(ends_in_s * 1e9)
        self.ending = (self._report(kind, self.running), gone_ns, trigger)
        self.ends_in_s = 0.0
        if trigger is not None:
            with suppress(ControlStoreError):
                self._collect(self.running, trigger)
        self._end_if_gone()

    def _end_if_gone(self):
        report, gone_ns, trigger = self.ending
        if self.world.clock.mono_ns() < gone_ns:
            return
        self.left, self.running, self.ending = self.running, None, None
        self.unsaid = (trigger, report)
        self._say()

    def _take_a_seat(self, record):
        if record.phase is RunPhase.RENDEZVOUS and self.ready_entries < record.generation:
            if self.is_sick:
                self._fail_gate(record)
            elif self.node not in record.excluded:
                key = self.link.keys.ready(record.generation, self.me.agent)
                self.link.store.put(key, pack({**self.me.to_json(), **self.join_payload()}))
                self.ready_entries = record.generation
        elif record.phase is not RunPhase.RENDEZVOUS:
            roster = self.link.read_roster(record.generation)
            self.rank = roster.group_rank(self.me.agent)
            if self.rank is not None and record.phase is RunPhase.RUN:
                self.before_save(roster)
                self.running = self.seated = record.generation
            elif self.rank is not None:
                self.link.file_report(self._report(ReportKind.STOPPED, record.generation))
                self.left = record.generation

    def _fail_gate(self, record):
        self.link.file_report(
            NodeReport(
                kind=ReportKind.GATE_FAILED,
                node=self.node,
                generation=record.generation,
                failure_class=FailureClass.GPU_ROW_REMAP,
                how="a row waits to be remapped",
                blames_node=True,
            )
        )
        sick = {self.node: "sick"}
        self.link.update_record(lambda now: replace(now, excluded={**now.excluded, **sick}))

    def heartbeat_payload(self):
        """Return what goes with each heartbeat."""
        return {}

    def join_payload(self):
        """Return what goes with the wish for a seat."""
        return {}

    def before_save(self, roster):
        """Hear that workers start here, with the seats of *roster*."""

    def _report(self, kind, generation):
        blames, self.blames = self.blames, False
        return NodeReport(kind=kind, node=self.node, generation=generation, blames_node=blames)

    def _collect(self, generation, kind):
        def change(now):
            if (now.generation, now.phase) != (generation, RunPhase.RUN):
                return None
            return replace(now, phase=RunPhase.COLLECT, trigger=kind, decided_by=self.node)

        self.link.update_record(change)


class World:
    """Everybody and the clock. *decide* stands for the policy."""

    turn_s = 0.25

    def __init__(
        self,
        terms: RestartPolicy,
        n_players: int,
        decide: Callable = restart,
        n_workers=2,
        spares=0,
        new_handle=None,
        **t,
    ):
        self.clock = FakeClock()
        self.new_handle = new_handle or MemoryControlStore(self.clock).new_handle
        self.store = self.new_handle()
        self.policy = terms
        self.timing = LeaderTimeouts(**t)
        self.decide = decide
        self.n_workers = n_workers
        self.spares = spares
        self._agents = 0
        self.after_each = []
        self.removals = []  # of keys, and when
        self.players = []
        for number in range(n_players):
            self.players.append(self.player(number, order=number))

    def player(self, number, order=None):
        """Return another agent."""
        return Player(self, number, order=order)

    def extension(self, _player):
        """Return what a player's leader has beside its duties."""
        return

    def next_agent(self):
        self._agents += 1
        return self._agents

    def pass_time(self, seconds):
        for _ in range(round(seconds / self.turn_s)):
            self.run_once()

    def run_once(self, seconds=None):
        """Let everybody act once, *seconds* later."""
        self.clock.advance(seconds or self.turn_s)
        for at_ns, key, version in self.removals:
            if at_ns <= self.clock.mono_ns() and self.store.get(key).version == version:
                self.store.delete(key)
        self.removals = [each for each in self.removals if each[0] > self.clock.mono_ns()]
        for player in list(self.players):
            player.act()
        for check in self.after_each:
            check(self)

    def run_until(self, condition, limit_s=60.0):
        """Turn until *condition*; return the seconds it took."""
        began = self.clock.mono_ns()
        while not condition(self):
            assert (self.clock.mono_ns() - began) / 1e9 < limit_s, self.describe()
            self.run_once()
        return (self.clock.mono_ns() - began) / 1e9

    def running(self):
        """Return the generations of which workers train somewhere: not frozen, not done."""
        awake = [p for p in self.players if not p.is_dead and not p.is_frozen]
        return {p.running for p in awake if p.running is not None and not p.done}

    def all_run(self, generation, n_nodes):
        """Say whether *generation* runs on *n_nodes*, and nothing else anywhere."""
        ranks = [p.rank for p in self.players if p.running == generation and not p.is_dead]
        return len(ranks) == n_nodes and sorted(ranks) == list(range(n_nodes))

    def describe(self):
        return [
            (p.node, p.running, p.rank, p.is_frozen, p.is_dead, p.store.is_cut, p.exit_code)
            for p in self.players
        ], self.store.get("control").value[:600]
