"""One agent's parts without processes: real link, leader and records, workers that a test plays."""

import logging
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from gpuops.agent.checkpoint.api import CheckpointService
from gpuops.agent.elastic.attempt import Attempt, CurrentAttempt
from gpuops.agent.elastic.exits import RankFiles
from gpuops.agent.elastic.rendezvous import Assignment
from gpuops.agent.elastic.workers import Worker
from gpuops.agent.journal.payloads import NodeFacts
from gpuops.agent.journal.session import DecisionLog, NodeContext, RunSession
from gpuops.agent.launch.identity import RunIdentity
from gpuops.agent.launch.plan import EndpointKind, EndpointPlan, LaunchPlan
from gpuops.agent.launch.services import Services
from gpuops.agent.monitors.preflight import NoPreflight
from gpuops.agent.monitors.progress import StepTracker
from gpuops.agent.monitors.registry import MonitorGroup
from gpuops.control.client import ControlClient
from gpuops.control.join import join
from gpuops.control.leader import Leader
from gpuops.control.memory import MemoryControlStore
from gpuops.control.record import ControlRecord, Member, Roster, RunPhase, pack, unpack
from gpuops.control.step import LeaderPolicy, LeaderTimeouts
from gpuops.control.store import ControlStoreUnreachableError
from gpuops.control.threads import AgentCallbacks, ControlThreads
from gpuops.host.clock import FakeClock
from gpuops.incident.decide import decide
from gpuops.incident.decision import NodeReport, RestartPolicy
from gpuops.model import WorkerExit
from gpuops.wire.ring import STEP_UNKNOWN, WorkerFlag
from support.exits import RULES
from support.recorders import ListRecorder

RUN_ID = "01890000-0000-7000-8000-000000000001"
NODE_FACTS = NodeFacts(boot_id="b", boot_us=None, kernel="6", driver=None, gpuops_version="0")


class FakeRing:
    """A worker's word, as a test writes it."""

    def __init__(self):
        self.flags = WorkerFlag(0)
        self.last_seq = 0
        self.wanted = None

    def request(self, request, stop_step=STEP_UNKNOWN):
        self.wanted = (request, stop_step)
        return True


class FakeWorkers:
    """The workers of one generation; *first* is their first global rank."""

    def __init__(self, n, first=0):
        self.rings = [FakeRing() for _ in range(n)]
        self.codes = {}  # by local rank, of those that ended
        self.log_tails = {}  # by local rank
        self.ended_by_us = []
        self.sent = []
        self.stuck_ranks = ()
        self.exiting_ranks = ()
        self.killed = False
        self.news = {}
        self.story = []  # done one by one, each time that the agent looks at its workers
        self.on_look = lambda: None
        self._first = first

    @property
    def all(self):
        return tuple(
            Worker(
                rank=self._first + i,
                local_rank=i,
                pid=4000 + i,
                ring=ring,
                files=RankFiles(stacks=Path("/nonexistent")),
            )
            for i, ring in enumerate(self.rings)
        )

    @property
    def pids(self):
        return {worker.rank: worker.pid for worker in self.all}

    @property
    def all_ended(self):
        return len(self.codes) == len(self.rings)

    @property
    def has_failed(self):
        return any(code != 0 for code in self.codes.values())

    @property
    def needs_exit_check(self):
        return self.all_ended or self.has_failed

    def of_rank(self, rank):
        return self.all[rank - self._first]

    @property
    def left(self):
        return tuple(rank - self._first for rank in self.stuck_ranks + self.exiting_ranks)

    def beat(self, *local_ranks):
        for local_rank in local_ranks:
            self.rings[local_rank].last_seq += 1

    def beat_counts(self):
        return {worker.rank: worker.ring.last_seq for worker in self.all}

    def beats(self):
        if self.story:
            self.story.pop(0)()
        self.on_look()
        news, self.news = self.news, {}
        return news

    def signal(self, local_rank, number):
        self.sent.append((local_rank, number))
        return True

    def end_all(self, code):
        self.codes |= {i: code for i in range(len(self.rings)) if i not in self.codes}

    def kill(self):
        self.killed = True
        self.end_all(-9)

    def let_others_fail(self, within_s):
        pass

    def end(self, first, grace_s, is_urgent):
        left = [i for i in range(len(self.rings)) if i not in self.codes]
        self.ended_by_us += left
        self.codes |= dict.fromkeys(left, -first)

    def exits(self, node, progress, codes):
        return [
            WorkerExit(
                node=node,
                rank=worker.rank,
                local_rank=worker.local_rank,
                pid=worker.pid,
                exit_code=code if (code := self.codes.get(worker.local_rank, -15)) >= 0 else None,
                signal={-9: "SIGKILL", -15: "SIGTERM"}.get(code),
                terminated=worker.local_rank in self.ended_by_us,
                seen_us=1,
                seen_mono_ns=1,
                beats=worker.ring.last_seq,
                log_tail=self.log_tails.get(worker.local_rank, ()),
            )
            for worker in self.all
        ]


class CutBoard:
    """A board that can be cut off."""

    def __init__(self, board):
        self._store = board
        self.is_cut = False

    def __getattr__(self, name):
        if self.is_cut:
            raise ControlStoreUnreachableError("cut")
        return getattr(self._store, name)


class Cancellation:
    """What was asked of the agent: nothing, until a test says otherwise."""

    received = drain = None
    is_urgent = False

    def check(self):
        if self.received is not None:
            raise KeyboardInterrupt


class Sent:
    """A flush that found nothing to do."""

    remaining = 0
    note = None


class Agent:
    """One agent of one run: time passes, and its control thread turns, while it waits."""

    def __init__(self, folder, n_workers=2, terms=None, board=None, clock=None, number=1, **plan):
        self.clock = clock or FakeClock()
        self.shared = board or MemoryControlStore(self.clock)
        self.store = CutBoard(self.shared.new_handle())
        self.node = f"n{number}"
        self.me = Member(
            agent=str(UUID(int=number)),
            node=self.node,
            address="127.0.0.1",
            n_workers=n_workers,
            node_rank_hint=number,
        )
        fresh = ControlRecord(
            run_id=RUN_ID, folder="run", generation=0, phase=RunPhase.RENDEZVOUS, since_s=0.0
        )
        view = join(self.store, self.me, fresh, self.clock, self.clock.advance)
        self.control = ControlClient(self.store, self.me, view, self.clock, fence_timeout_s=10.0)
        self.restart_policy = terms or RestartPolicy(restarts_max=3)
        self.leader = Leader(
            self.control,
            self.clock,
            LeaderPolicy(
                restart=self.restart_policy,
                timeouts=LeaderTimeouts(),
                decide=lambda *a: (decide(*a), None),
            ),
            on_decision=lambda decided: self.decisions.propose(decided),  # noqa: PLW0108 made below
        )
        self.threads = ControlThreads(self.control, AgentCallbacks(), self.leader, self.clock)
        self.recorder = ListRecorder()
        self.said, self.states = [], []
        self.cancellation = Cancellation()
        self.current = CurrentAttempt(self.clock.mono_ns())
        self.plan = LaunchPlan(
            restart_policy=self.restart_policy,
            endpoint=EndpointPlan(kind=EndpointKind.PRIVATE, run_key="job"),
            **plan,
        )
        self.session = self._session(folder / self.node)
        self.decisions = DecisionLog(self.session.journal)
        self.workers = FakeWorkers(n_workers, first=(number - 1) * n_workers)
        self.workers.on_look = self.run_once
        self.monitors = []
        self.job_xids = lambda _since_ns: None
        self.step_tracker = StepTracker()
        self.checkpoints = CheckpointService()
        self.while_waiting = []  # done one by one, each time that the agent waits

    def _session(self, folder):
        folder.mkdir(parents=True)
        around = NodeContext(
            node=self.node,
            clock=self.clock,
            root=folder,
            run_parent=folder,
            rules=RULES,
            node_facts=NODE_FACTS,
            run_facts=lambda _path: None,
            make_recorder=lambda _journal: self.recorder,
            flush=lambda _deadline_s: Sent(),
        )
        return RunSession(around, RunIdentity(RUN_ID, "run"), leads=False)

    @property
    def parts(self):
        return Services(
            clock=self.clock,
            node=self.node,
            plan=self.plan,
            control=self.control,
            leader=self.leader,
            decisions=self.decisions,
            session=self.session,
            logs=None,
            cancellation=self.cancellation,
            current=self.current,
            preflight=NoPreflight(),
            say=self.said.append,
            agent_pid=1,
            slurm_job_id=None,
            slurm_restart_count=0,
            failure_grace_s=3.0,
            cancel_grace_s=20.0,
            drain_grace_s=lambda _name: 25.0,
            monitors=MonitorGroup(self.monitors, self.control, self.clock, self.session.safely),
            job_xids=self.job_xids,
            step_tracker=self.step_tracker,
            checkpoints=self.checkpoints,
        )

    def waiting(self, record):
        """Let time pass; see `WaitHooks`."""
        if self.while_waiting:
            self.while_waiting.pop(0)()
        self.run_once()

    def write_state(self, phase):
        self.states.append(phase)

    def run_once(self, seconds=0.25):
        self.clock.advance(seconds)
        try:
            self.threads.run_once(hold_s=0.0)
        except ControlStoreUnreachableError:
            logging.getLogger(__name__).debug("cut")

    def take_seats(self, *others):
        """Form generation 0 of this agent and *others*; return the seat here."""
        agents = [self, *others]
        for agent in agents:
            key = agent.control.keys.ready(0, agent.me.agent)
            agent.store.put(key, pack(agent.me.to_json()))
        for _ in range(400):
            if all(agent.control.record.phase is RunPhase.RUN for agent in agents):
                break
            for agent in agents:
                agent.run_once()
        return self.assignment()

    def assignment(self):
        record = self.control.record
        roster = Roster.from_bytes(
            self.store.get(self.control.keys.roster(record.generation)).value
        )
        return Assignment(record, roster, roster.group_rank(self.me.agent))

    def payloads(self, kind):
        return self.told(kind)[kind]

    def told(self, *kinds):
        """Return the payloads of what was recorded, by kind; the record ends with it."""
        self.session.close("completed", 0, "")
        events = self.recorder.events
        return {kind: [event.payload for event in events if event.kind == kind] for kind in kinds}

    def attempt(self, assignment):
        """Return an attempt of this agent's workers, as its agent would begin it."""
        self.current.attempt = Attempt(
            assignment=assignment, workers=self.workers, folder=Path("/nonexistent")
        )
        return self.current.attempt


class Node:
    """An agent with a seat and a generation to watch."""

    def __init__(self, folder, **options):
        self.agent = Agent(folder, **options)
        self.reaped = 0
        self.left = []

    def watch(self, *others):
        from gpuops.agent.elastic.attempt_loop import AttemptRunner, TorchHooks

        seat = self.agent.take_seats(*others)
        torch = TorchHooks(
            interval_s=0.0, reap=self.reap, leave=self.left.append, checks_d_state=False
        )
        return AttemptRunner(
            self.agent.parts,
            self.agent.attempt(seat),
            torch,
            waiting=self.agent.waiting,
            write_state=self.agent.write_state,
        )

    def reap(self):
        from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

        self.reaped += 1
        codes = self.agent.workers.codes
        if self.agent.workers.has_failed:
            failures = {i: SimpleNamespace(exitcode=code) for i, code in codes.items() if code}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        done = self.agent.workers.all_ended
        return RunResult(state=WorkerState.SUCCEEDED if done else WorkerState.HEALTHY)

    def then(self, *story):
        self.agent.workers.story = list(story)
        return self

    def codes(self, **codes):
        return lambda: self.agent.workers.codes.update({int(k[1:]): v for k, v in codes.items()})

    def file_report(self, agent=None, generation=0):
        key = self.agent.control.keys.report(generation, (agent or self.agent).me.agent)
        return NodeReport.from_json(unpack(self.agent.shared.get(key).value))


def over(watching):
    from gpuops.agent.elastic.rendezvous import RunOverError

    with pytest.raises(RunOverError) as raised:
        watching.run()
    return raised.value.record
