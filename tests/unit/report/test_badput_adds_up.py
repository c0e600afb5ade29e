"""Whatever happens to a run: what was useful and what was lost add up to the wall time."""

import pytest
from hypothesis import Phase as Search
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.decisions import cluster, decision, report, stopped
from support.draws import draws
from support.exits import NODE, RULES, RUN, S, killed
from support.history import record_run, run_row
from support.recorders import ListRecorder

from gpuops.agent.journal.payloads import AttemptFacts
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.host.clock import FakeClock
from gpuops.incident.cause import judge_exits
from gpuops.incident.decision import ReportKind, RunAction
from gpuops.report.time_breakdown import LOST_PHASES, TimePhase, break_down_run
from gpuops.store.engine import memory_store
from gpuops.store.events import new_event
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import SpoolLine
from gpuops.wire.ring import Beat, StepSource
from gpuops.wire.ring import WorkerPhase as Beating

MS = 1e-3
SPAN = st.integers(0, 5_000_000).map(lambda us: us / 1e6)
ENDS = ["killed", "elsewhere", "elsewhere, late", "not started", "regrouped"]
LAST = ["completed", "stop", "given up", "cancelled", "drained"]


class Story:
    """A run told by one agent while a fake clock goes on by what hypothesis draws."""

    def __init__(self, draw):
        self.draw = draw
        self.clock = FakeClock()
        self.events = ListRecorder()
        self.journal = RunJournal(self.emit, self.clock, run_id=RUN, node=NODE, rules=())
        self.generation = 0
        self.highest = 0
        record_run(self.events, run_row(outcome=None, ended_us=None), [], [], self.clock)

    def emit(self, *news):
        for item in news:
            self.events.record(
                new_event(
                    item.kind,
                    node=NODE,
                    clock=self.clock,
                    run_id=RUN,
                    attempt=item.attempt,
                    payload=item.payload,
                )
            )

    def wait(self):
        self.clock.advance(self.draw(SPAN))

    def train(self):
        """Run one generation: it may read a checkpoint, and make steps from wherever it likes."""
        self.wait()
        self.journal.mark("gated")
        self.journal.phase_seen("run", self.generation, "")
        facts = AttemptFacts(
            start_us=self.clock.now_us(),
            world_size=1,
            n_nodes=1,
            group_rank=0,
            torch_run_id="t",
            log_dir="/logs",
            slurm_job_id=None,
            slurm_restart_count=0,
        )
        self.wait()
        self.journal.attempt_started(self.generation, facts)
        self.seq = 0
        if self.draw(st.booleans()):
            for phase in (Beating.RESTORE, Beating.RESUMED):
                self.wait()
                self.beat(phase, -1)
        first = self.draw(st.integers(1, self.highest + 1))
        for step in range(first, first + self.draw(st.integers(0, 4))):
            self.wait()
            self.beat(Beating.STEPPING, step)
            self.highest = max(self.highest, step)
        self.wait()

    def beat(self, phase, step):
        self.seq += 1
        beat = Beat(
            self.seq, step, self.clock.mono_ns(), phase, StepSource.OPTIMIZER_STATE, self.seq
        )
        self.journal.beats({0: [beat]})

    def end(self, how, verdict=RunAction.RESTART):
        """End the generation as *how* says and decide on it."""
        event(how)
        if how == "regrouped":
            self.journal.phase_seen("form", self.generation + 1, "nodes came")
            self.wait()
            self.journal.attempt_interrupted(stopped(NODE, self.generation))
            return
        failed_s = self.clock.mono_ns() / S
        self.wait()
        self.journal.phase_seen("gather", self.generation, "a worker failed")
        self.wait()
        if how == "killed":
            self.journal.mark("stopped")
            told = report(NODE, generation=self.generation)
            at_s = self.draw(st.sampled_from([failed_s, self.clock.mono_ns() / S]))
            self.journal.attempt_failed(judge_exits([killed(0, at_s=at_s)], RULES), report=told)
            self.wait()
            self.decide(told, verdict, by_us=True)
        else:
            told = report("n9", generation=self.generation)
            if how == "elsewhere, late":
                self.decide(told, verdict, by_us=False)
                self.wait()
            self.journal.mark("stopped")
            self.journal.attempt_interrupted(stopped(NODE, self.generation))
            if how != "elsewhere, late":
                self.wait()
                self.decide(told, verdict, by_us=False)

    def decide(self, cause, verdict, *, by_us):
        made = decision(cause, verdict, self.generation)
        self.journal.decided(made, (cause,), cluster(NODE), by_us=by_us)

    def not_started(self):
        """Fail to start the workers of the next generation."""
        event("not started")
        self.wait()
        told = report(NODE, ReportKind.START_FAILED, self.generation, ends=(), culprits=())
        self.journal.attempt_failed(judge_exits([], RULES), report=told)
        self.wait()
        self.decide(told, RunAction.RESTART, by_us=True)

    def last(self, how):
        """End the run as *how* says."""
        event(how)
        outcome = "cancelled" if how in ("cancelled", "drained") else "failed"
        if how == "completed":
            self.journal.attempt_completed()
            outcome = how
        elif how == "cancelled":
            self.journal.cancelled("SIGINT", [])
        elif how == "drained":
            self.journal.drained("SIGTERM", [], 85)
        else:
            verdict = RunAction.STOP if how == "stop" else RunAction.RESTART
            self.end("killed", verdict)
            self.wait()
            self.journal.given_up(93 if how == "stop" else 85)
        self.wait()
        self.journal.run_ended(outcome, 0, "over")

    def account(self):
        with memory_store() as store, store.begin() as connection:
            lines = [
                SpoolLine("n041.0", "b", n, e) for n, e in enumerate(self.events.events, start=1)
            ]
            ingest(connection, [EventEnvelope(line, "c", 0) for line in lines], 0)
            run = run_queries.find_run(connection, RUN)
            incidents = run_queries.incidents(connection, run_id=RUN)
            return break_down_run(run, run_queries.attempts(connection, RUN), incidents)


# A story has many draws: making a failing one smaller takes minutes and says little more.
@pytest.mark.timeout(400)
@settings(max_examples=draws(100), phases=(Search.explicit, Search.reuse, Search.generate))
@given(st.data())
def test_useful_time_and_badput_add_up_to_the_wall_time(data):
    story = Story(data.draw)
    failures = regrouped = 0
    for how in data.draw(st.lists(st.sampled_from(ENDS), max_size=5)):
        if how == "not started":
            story.not_started()
        else:
            story.train()
            story.end(how)
        failures += how != "regrouped"
        regrouped += how == "regrouped"
        story.generation += 1
    story.train()
    how = data.draw(st.sampled_from(LAST))
    story.last(how)
    found = story.account()

    first_init_s = found.seconds[TimePhase.INIT] - found.lost[TimePhase.INIT]
    if (first := found.attempts[0].row).start_us is not None:
        launched_us = first.first_step_us or first.start_us
        assert first_init_s == pytest.approx((launched_us - found.start_us) / 1e6, abs=MS)
    useful_s = found.seconds[TimePhase.PRODUCTIVE] + first_init_s + found.seconds[TimePhase.OTHER]
    unknown_s = found.seconds[TimePhase.UNKNOWN]
    assert useful_s + unknown_s + found.lost_s == pytest.approx(found.wall_s, abs=MS)
    assert len(found.incidents) >= failures
    assert all(incident.state == "closed" for incident in found.incidents)
    if regrouped:  # what it costs to take nodes in is nobody's failure
        return
    charged = {
        phase: sum(i.lost_s.get(phase.value, 0.0) for i in found.incidents) for phase in LOST_PHASES
    }
    assert {p.value: s for p, s in charged.items()} == pytest.approx(
        {p.value: s for p, s in found.lost.items()}, abs=MS
    )
    assert sum(story.journal.badput_s.values()) == pytest.approx(found.lost_s, abs=MS)
