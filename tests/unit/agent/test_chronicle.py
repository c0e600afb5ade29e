"""Which events a run leaves, and what its incidents cost, without torch or processes."""

from dataclasses import replace

import pytest
from support.decisions import cluster, decision, failure, rank_end, report, stopped
from support.exits import RULES

from gpuops.agent.checkpoint.api import FinalFlush
from gpuops.agent.journal.payloads import COLLECTIVES_MAX, AttemptFacts
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.checkpoint.types import StateId
from gpuops.detect.recorder_dump import RankDump
from gpuops.host.clock import FakeClock
from gpuops.incident.cause import judge_exits
from gpuops.incident.decision import ReportKind, RunAction
from gpuops.model import ActionKind, Confidence, Evidence, FailureClass, Incident, Role, WorkerExit
from gpuops.wire.ring import STEP_UNKNOWN, Beat, StepSource, WorkerPhase

KNOWN = StepSource.OPTIMIZER_STATE
FACTS = AttemptFacts(
    start_us=0,
    world_size=2,
    n_nodes=1,
    group_rank=0,
    torch_run_id="t",
    log_dir="/logs",
    slurm_job_id=None,
    slurm_restart_count=0,
)


class World:
    """A chronicle, the clock that drives it and the events that it recorded."""

    def __init__(self, clock=None, node="n1", rank=0):
        self.clock = clock or FakeClock()
        self.node = node
        self.group_rank = rank
        self.events = []
        self.batches = []
        self.ordinal = 0
        self.journal = RunJournal(self.emit, self.clock, run_id="run-1", node=node, rules=())
        self.seq = 0

    def emit(self, *news):
        self.events += [(item.kind, item.attempt, item.payload) for item in news]
        self.batches.append([item.kind for item in news])

    def start(self, ordinal):
        self.seq, self.ordinal = 0, ordinal
        facts = replace(FACTS, start_us=self.clock.now_us(), group_rank=self.group_rank)
        self.journal.attempt_started(ordinal, facts)

    def step(self, number, seconds=1.0):
        self.clock.advance(seconds)
        self.beat(WorkerPhase.STEPPING, number)

    def beat(self, phase, number=STEP_UNKNOWN):
        self.seq += 1
        known = StepSource.UNKNOWN if number == STEP_UNKNOWN else StepSource.OPTIMIZER_STATE
        beat = Beat(self.seq, number, self.clock.mono_ns(), phase, known, self.seq)
        self.journal.beats({0: [beat], 1: [beat]})

    def killed(self):
        killed = WorkerExit(
            node=self.node,
            rank=1,
            local_rank=1,
            pid=11,
            exit_code=None,
            signal="SIGKILL",
            terminated=False,
            seen_us=self.clock.now_us(),
            seen_mono_ns=self.clock.mono_ns(),
        )
        peer = replace(killed, rank=0, local_rank=0, pid=10, signal="SIGTERM", terminated=True)
        self.clock.advance(0.25)
        return [peer, killed]

    def report_failure(self, **changes):
        """File what happened here: noticed a quarter of a second after the kill."""
        exits = self.killed()
        self.journal.attempt_failed(
            judge_exits(exits, RULES), report=report(self.node, generation=self.ordinal, **changes)
        )

    def fail(self, verdict=RunAction.RESTART, **changes):
        """Fail, and decide at once over this node alone."""
        self.report_failure()
        self.decide(verdict, **changes)

    def decide(self, verdict=RunAction.RESTART, reports=None, by_us=True, **changes):
        told = (report(self.node, generation=self.ordinal),) if reports is None else reports
        cause = next(iter(told), None)
        made = decision(cause, verdict, self.ordinal, **changes)
        self.journal.decided(made, told, cluster("n1", "n2"), by_us=by_us)

    def of(self, kind):
        return [payload for name, _attempt, payload in self.events if name == kind]

    def incidents(self):
        newest = {}
        for incident in self.of("incident.recorded"):
            newest[incident["id"]] = incident
        return list(newest.values())


@pytest.fixture
def world():
    return World()


def test_the_cost_of_a_failure_by_phase(world):
    world.start(0)
    for number in (1, 2, 3):
        world.step(number)
    world.clock.advance(0.5)
    world.fail()
    world.clock.advance(2.0)
    world.start(1)
    for number in (1, 2, 3, 4):
        world.step(number, seconds=0.5)
    world.journal.attempt_completed()

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert incident["attempt"] == 0
    assert incident["actions"] == ["restart"]
    assert incident["lost_seconds_by_phase"] == {
        "detect": 0.75,
        "decide": 0.0,
        "rendezvous": 2.0,
        "init": 0.5,
        "redo": 1.5,
    }
    assert world.of("attempt.caught_up")[0]["step"] == 4
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["failed", "completed"]
    states = [p["state"] for p in world.of("incident.recorded")]
    assert states == ["open", "open", "mitigated", "closed"]


def test_a_failure_is_recorded_at_once(world):
    world.start(0)
    world.step(1)
    world.report_failure()

    assert world.batches[-1] == [
        "worker.exited",
        "worker.exited",
        "agent.report",
        "attempt.progress",
        "attempt.ended",
        "incident.recorded",
    ]


def test_a_second_failure_ends_the_redo_of_the_first(world):
    world.start(0)
    world.step(1)
    world.step(2)
    world.fail()
    world.start(1)
    world.step(1)
    world.fail()
    world.start(2)
    for number in (1, 2, 3):
        world.step(number)
    world.journal.attempt_completed()

    first, second = world.incidents()
    assert first["state"] == second["state"] == "closed"
    assert "another failure" in first["resolution"]
    assert first["lost_seconds_by_phase"]["redo"] == 0.0
    assert second["lost_seconds_by_phase"]["redo"] == 2.0


def test_an_attempt_that_failed_before_its_first_step_is_lost_from_its_start(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.clock.advance(3.0)
    world.start(1)
    world.clock.advance(1.0)
    world.fail(RunAction.FAIL)

    first, second = world.incidents()
    assert first["lost_seconds_by_phase"] == {
        "detect": 0.25,
        "decide": 0.0,
        "rendezvous": 3.0,
        "init": 0.0,
    }
    assert second["lost_seconds_by_phase"] == {"init": 1.0, "detect": 0.25, "decide": 0.0}
    assert second["state"] == "open"
    assert second["actions"] == []
    assert world.of("attempt.first_step")[0]["step"] == 1
    assert len(world.of("attempt.first_step")) == 1


def test_a_failure_that_ends_the_run_is_closed_with_what_it_cost(world):
    world.start(0)
    world.step(1)
    world.fail(RunAction.FAIL)
    world.clock.advance(5.0)
    world.journal.given_up(1)
    world.journal.run_ended("failed", 1, "the budget is spent")

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert incident["resolution"] == "not recovered: the run ended with exit code 1"
    assert incident["lost_seconds_by_phase"] == {"detect": 0.25, "decide": 0.0}


def test_agents_that_do_not_meet_again_leave_nothing_open(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.clock.advance(60.0)
    world.journal.given_up(85)

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert incident["resolution"].startswith("not recovered")
    assert incident["lost_seconds_by_phase"]["rendezvous"] == 60.0


def test_progress_is_told_by_whole_minutes(world):
    world.start(0)
    for number in range(1, 131):
        world.step(number)
    world.journal.attempt_completed()

    minutes = [p["minute_us"] for p in world.of("attempt.progress")]
    assert len(minutes) == len(set(minutes)) == 3
    assert all(minute % 60_000_000 == 0 for minute in minutes)


def test_of_several_agents_the_first_alone_tells_the_progress(world):
    world.journal.attempt_started(0, replace(FACTS, group_rank=1))
    world.step(1)
    world.journal.attempt_completed()

    assert world.of("attempt.progress") == []


def test_without_step_numbers_there_is_no_redo(world):
    world.start(0)
    world.step(STEP_UNKNOWN)
    world.fail()
    world.start(1)
    world.step(STEP_UNKNOWN)

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert set(incident["lost_seconds_by_phase"]) == {"detect", "decide", "rendezvous", "init"}
    assert world.of("attempt.caught_up") == []


def test_cancelled_with_nothing_open_there_is_one_closed_incident(world):
    world.start(0)
    world.step(1)
    world.journal.cancelled("SIGTERM", [])

    (incident,) = world.incidents()
    assert (incident["failure_class"], incident["state"]) == ("scheduler.cancelled", "closed")
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["cancelled"]


def test_cancelled_during_a_recovery_both_the_failure_and_the_cancellation_are_on_record(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.start(1)
    world.journal.cancelled("SIGINT", [])

    first, second = world.incidents()
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert first["state"] == second["state"] == "closed"
    assert "cancelled by SIGINT" in first["resolution"]
    assert second["failure_class"] == "scheduler.cancelled"
    assert second["title"].startswith("cancelled by SIGINT")
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["failed", "cancelled"]


def test_cancelled_before_the_next_attempt_the_failure_alone_is_on_record(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.journal.cancelled("SIGINT", [])

    (incident,) = world.incidents()
    assert incident["failure_class"] == "host_mem.sigkill_probable"
    assert "cancelled by SIGINT" in incident["resolution"]


def test_a_failure_that_a_cancellation_cut_short_is_on_record_with_its_cost(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.start(1)
    world.step(1)
    world.clock.advance(0.5)
    world.journal.cancelled("SIGINT", world.killed())

    first, second = world.incidents()
    assert "another failure" in first["resolution"]
    assert second["failure_class"] == "host_mem.sigkill_probable"
    assert (second["state"], second["attempt"]) == ("closed", 1)
    assert second["lost_seconds_by_phase"] == {"detect": 0.75}
    assert "SIGINT" in second["resolution"]


def test_where_no_step_was_ever_seen_a_restart_ends_with_the_new_workers(world):
    world.start(0)
    world.fail()
    world.clock.advance(2.0)
    world.start(1)
    world.clock.advance(60.0)
    world.journal.attempt_completed()

    (incident,) = world.incidents()
    assert incident["lost_seconds_by_phase"] == {
        "detect": 0.25,
        "decide": 0.0,
        "rendezvous": 2.0,
        "init": 0.0,
    }


def test_an_attempt_ends_once(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.journal.cancelled("SIGTERM", [])

    assert [p["outcome"] for p in world.of("attempt.ended")] == ["failed"]


def test_a_signal_that_came_after_a_failure_does_not_hide_it(world):
    world.start(0)
    world.step(1)
    exits = world.killed()
    world.journal.cancelled("SIGINT", exits, seen_mono_ns=world.clock.mono_ns())

    (incident,) = world.incidents()
    assert incident["failure_class"] == "host_mem.sigkill_probable"
    assert incident["state"] == "closed"


def test_a_signal_that_came_first_is_what_ended_the_run(world):
    world.start(0)
    world.step(1)
    seen_ns = world.clock.mono_ns()
    world.clock.advance(0.1)
    world.journal.cancelled("SIGINT", world.killed(), seen_mono_ns=seen_ns)

    (incident,) = world.incidents()
    assert incident["failure_class"] == "scheduler.cancelled"


def test_a_run_cancelled_before_its_first_attempt_has_its_incident(world):
    world.journal.cancelled("SIGINT", [])

    (incident,) = world.incidents()
    assert (incident["failure_class"], incident["state"]) == ("scheduler.cancelled", "closed")
    assert world.of("attempt.ended") == []


def test_each_phase_of_a_recovery_has_its_seconds(world):
    world.start(0)
    world.step(1)
    world.step(2)
    world.clock.advance(0.5)
    world.journal.phase_seen("gather", 0, "n1: a worker failed")
    world.clock.advance(2.0)
    world.journal.mark("stopped")
    world.report_failure()
    world.clock.advance(0.75)
    world.decide()
    world.clock.advance(4.0)
    world.journal.mark("gated")
    world.clock.advance(1.0)
    world.journal.phase_seen("run", 1, "")
    world.journal.mark("seated")
    world.start(1)
    world.clock.advance(1.0)
    world.beat(WorkerPhase.RESTORE)
    world.clock.advance(3.0)
    world.beat(WorkerPhase.RESUMED)
    world.step(2, seconds=1.5)
    world.step(3, seconds=1.0)

    (incident,) = world.incidents()
    assert incident["lost_seconds_by_phase"] == {
        "detect": 0.5,
        "decide": 3.0,
        "rendezvous": 5.0,
        "init": 2.5,
        "restore": 3.0,
        "redo": 1.0,
    }
    started = world.of("attempt.started")[1]
    assert started["seated_us"] - started["gated_us"] == 1_000_000
    assert world.journal.badput_s == incident["lost_seconds_by_phase"]
    assert world.journal.restarts == {"host_mem.sigkill_probable": 1}


def test_workers_that_outlive_the_decision_count_as_deciding(world):
    world.start(0)
    world.step(1)
    world.journal.phase_seen("gather", 0, "n2: a worker failed")
    world.clock.advance(1.0)
    world.decide(reports=(report("n2"),), by_us=False)
    world.clock.advance(9.0)
    world.journal.mark("stopped")
    world.journal.attempt_interrupted(stopped("n1"))
    world.clock.advance(2.0)
    world.start(1)
    world.step(1)

    (incident,) = world.incidents()
    assert incident["lost_seconds_by_phase"]["decide"] == 10.0
    assert incident["lost_seconds_by_phase"]["rendezvous"] == 2.0


def test_the_one_who_decides_tells_the_incident_for_the_run(world):
    healthy = World(world.clock, node="n2", rank=1)
    for each in (world, healthy):
        each.start(0)
        each.journal.beats({0: [Beat(1, 5, each.clock.mono_ns(), WorkerPhase.STEPPING, KNOWN, 1)]})
    stack = Evidence(role=Role.CONFIRMATION, text="stack of rank 0", lines=("main.py:3",))
    healthy.journal.attempt_interrupted(stopped("n2"), [stack])
    world.report_failure()
    reports = (report("n1", arrival=3), stopped("n2", arrival=4))
    made = decision(reports[0], exclude={"n1": "its GPU is sick"}, failure=failure(0))
    healthy.journal.decided(made, reports, cluster("n2", "n1"), by_us=True, note="site: agreed")
    world.journal.decided(made, (), None, by_us=False)

    told = Incident.from_json(healthy.of("incident.recorded")[-1])
    seen = Incident.from_json(world.of("incident.recorded")[-1])
    assert told.id == seen.id
    assert (told.authority, seen.authority) == (3, 2)
    assert told.title == "rank 1 on n1 was ended by SIGKILL"
    assert told.actions == (ActionKind.EXCLUDE_NODE, ActionKind.RESTART) == seen.actions
    assert [str(culprit) for culprit in told.culprits] == ["rank 1", "node n1"]
    assert [item.role for item in told.evidence] == [Role.ROOT, Role.NOISE, Role.CONFIRMATION]
    assert told.evidence[2] == stack
    (made,) = healthy.of("decision.made")
    assert [(r["node"], r["kind"]) for r in made["reports"]] == [
        ("n1", "workers_failed"),
        ("n2", "stopped"),
    ]
    assert made["cluster"]["members"] == ["n2", "n1"]
    assert made["note"] == "site: agreed"
    assert made["budget"] == {"used": 1, "max": 3, "window_s": None}
    assert healthy.of("node.excluded") == [{"excluded": "n1", "reason": "its GPU is sick"}]
    assert world.of("decision.made") == world.of("node.excluded") == []


def test_a_decider_keeps_what_its_own_node_saw_where_the_cause_is_there(world):
    world.start(0)
    world.step(1)
    world.report_failure()
    own = Incident.from_json(world.of("incident.recorded")[-1])
    world.decide(reports=(report("n1"), stopped("n2")))

    told = Incident.from_json(world.of("incident.recorded")[-1])
    assert told.title == own.title
    assert told.evidence[: len(own.evidence)] == own.evidence
    assert told.evidence[-1].text == "nothing failed on n2; stopped with the others"
    assert told.rev == own.rev + 1


def test_who_saw_nothing_of_a_failure_keeps_a_weak_account_of_it(world):
    world.start(0)
    world.step(1)
    world.journal.attempt_interrupted(stopped("n1"))
    lost = report("n3", ReportKind.NODE_LOST, how="no heartbeat for 15 s", ends=(), culprits=())
    world.decide(reports=(lost,), by_us=False)
    world.start(1)
    world.step(1)
    world.step(2)

    (incident,) = world.incidents()
    assert (incident["authority"], incident["state"]) == (1, "closed")
    assert incident["title"] == "node n3 was lost: no heartbeat for 15 s"
    assert incident["culprits"] == [{"kind": "node", "id": "n3"}]
    assert incident["actions"] == ["restart"]


def test_the_first_rank_speaks_for_a_decider_that_left_itself_out(world):
    world.start(0)
    world.step(1)
    world.journal.attempt_interrupted(stopped("n1"))
    sick = report("n0", ReportKind.GPU_FAULT, how="Xid 79", ends=(), blames_node=True)
    made = decision(sick, exclude={"n0": "Xid 79"})
    world.journal.decided(made, (), None, by_us=False, decided_by="n0")
    world.start(1)
    world.step(1)

    (incident,) = world.incidents()
    assert incident["authority"] == 3
    assert incident["rev"] > 100
    assert incident["state"] == "mitigated"


def test_a_hang_is_told_as_the_report_has_it(world):
    world.start(0)
    world.step(1)
    hang = report(
        "n1",
        ReportKind.HANG,
        failure_class=FailureClass.COLLECTIVE_TIMEOUT,
        confidence=Confidence.PROBABLE,
        how="rank 1 is 3 steps behind",
        ends=(),
    )
    exits = [replace(worker, terminated=True, signal="SIGTERM") for worker in world.killed()]
    stack = Evidence(role=Role.CONFIRMATION, text="stack of rank 1", lines=("train.py:7",))
    incident = world.journal.attempt_failed(
        judge_exits(exits, RULES), report=hang, evidence=[stack]
    )

    assert incident.title == "workers on n1 made no progress: rank 1 is 3 steps behind"
    assert incident.authority == 2
    assert stack in incident.evidence


def test_workers_that_could_not_be_started_are_a_failure_of_their_generation(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.clock.advance(2.0)
    refused = report("n1", ReportKind.START_FAILED, 1, how="no such program", ends=(), culprits=())
    world.journal.attempt_failed(judge_exits([], RULES), report=refused)
    world.journal.decided(decision(refused, generation=1), (refused,), cluster("n1"), by_us=True)
    world.clock.advance(1.0)
    world.start(2)
    world.step(2)

    first, second = world.incidents()
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert first["lost_seconds_by_phase"]["rendezvous"] == 2.0
    assert second["title"] == "the workers could not be started on n1: no such program"
    assert second["lost_seconds_by_phase"]["rendezvous"] == 1.0
    assert len(world.of("attempt.ended")) == 1


def test_a_node_that_the_run_went_on_without_stops_counting(world):
    world.start(0)
    world.step(1)
    world.fail(exclude={"n1": "sick"})
    world.clock.advance(3.0)
    world.journal.phase_seen("run", 1, "")
    world.clock.advance(3600.0)
    world.journal.given_up(86)

    (incident,) = world.incidents()
    assert incident["lost_seconds_by_phase"]["rendezvous"] == 3.0
    assert incident["resolution"] == "the run continued without this node"


def test_agents_that_regroup_without_a_failure_leave_no_incident(world):
    world.start(0)
    world.step(1)
    world.journal.phase_seen("form", 1, "3 nodes are there, 2 had seats")
    world.journal.attempt_interrupted(stopped("n1"))
    world.start(1)
    world.step(2)

    assert world.incidents() == []
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["regrouped"]


def test_a_phase_is_told_once(world):
    for _ in range(3):
        world.journal.phase_seen("run", 0, "")
    world.journal.phase_seen("gather", 0, "n2: a worker failed")

    assert world.of("run.phase") == [
        {"phase": "run", "generation": 0, "reason": ""},
        {"phase": "gather", "generation": 0, "reason": "n2: a worker failed"},
    ]


def test_a_drained_run_asks_to_be_queued_again_and_blames_nobody(world):
    world.start(0)
    world.step(1)
    world.journal.drain_requested("SIGUSR1", 120.0)
    world.journal.drained("SIGUSR1", world.killed()[:1], 85)

    (incident,) = world.incidents()
    assert (incident["failure_class"], incident["state"]) == ("scheduler.preempted", "closed")
    assert incident["title"] == "drained on SIGUSR1: the workers stopped after a step"
    assert incident["actions"] == ["requeue"]
    assert world.of("drain.requested") == [{"signal": "SIGUSR1", "grace_s": 120.0}]
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["cancelled"]


def test_a_run_drained_before_it_had_workers_says_so(world):
    world.journal.drained("SIGTERM", [], 85)

    (incident,) = world.incidents()
    assert (incident["attempt"], incident["title"]) == (0, "drained on SIGTERM: no worker ran")
    assert world.of("attempt.ended") == []


def test_agents_that_did_not_come_together_are_the_next_attempts_incident(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.journal.rendezvous_failed("1 of at least 2 nodes came within 600 s: n1")
    world.journal.given_up(1)

    failed, unmet = world.incidents()
    assert (failed["state"], unmet["state"]) == ("closed", "closed")
    assert (unmet["attempt"], unmet["failure_class"]) == (1, "launcher.rendezvous")


def test_a_fenced_agent_ends_its_attempt_and_what_still_ran_up(world):
    world.start(0)
    world.step(1)
    world.step(2)
    world.fail()
    world.start(1)
    world.step(1)
    world.journal.fenced("no round trip to the board for 10.0 s")
    world.journal.rejoined(31.0)
    world.journal.store_unreachable("connection refused")
    world.journal.store_back(31.0)
    world.start(3)
    world.step(1)

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert "cut off" in incident["resolution"]
    kinds = [kind for kind, _, _ in world.events]
    assert {"agent.fenced", "agent.rejoined", "board.lost", "board.back"} <= set(kinds)
    assert len(world.of("attempt.ended")) == 2


def test_of_very_many_reports_those_that_failed_are_kept(world):
    world.start(0)
    quiet = [stopped(f"n{n}", arrival=n) for n in range(500)]
    told = (report("n777", arrival=600), *quiet)
    world.decide(reports=told)

    (made,) = world.of("decision.made")
    assert made["reports_total"] == 501
    assert len(made["reports"]) == 64
    assert made["reports"][-1]["node"] == "n777"
    told = Incident.from_json(world.of("incident.recorded")[-1])
    assert "and 492 more" in told.evidence[-1].text


def test_the_collectives_of_the_first_ranks_stand_in_the_record_of_a_decision(world):
    world.start(0)
    ends = [
        rank_end(rank, collectives=RankDump(rank=rank, calls=(), members={})) for rank in (0, 1)
    ]
    told = [report(f"n{n}", ends=tuple(ends), arrival=n) for n in range(COLLECTIVES_MAX)]
    world.decide(reports=told)

    (made,) = world.of("decision.made")
    known = [end.get("collectives") for body in made["reports"] for end in body["ends"]]
    empty = {"calls": [], "members": {}}
    assert known == [empty] * COLLECTIVES_MAX + [None] * COLLECTIVES_MAX


def test_a_run_that_loses_its_board_has_an_incident_of_it():
    world = World()
    world.start(0)
    world.step(1)
    world.journal.store_lost("no answer for 60 s")

    incidents = [payload for kind, _, payload in world.events if kind == "incident.recorded"]
    assert [i["failure_class"] for i in incidents] == ["launcher.store_lost"]
    assert incidents[0]["attempt"] == 0


RESUMED = "resumed from step 3: ranks 0-1 from memory; 25 MB in all in 0.50 s"


def failed_and_restarted(world):
    world.start(0)
    for number in (1, 2, 3, 4):
        world.step(number)
    world.fail()
    world.start(1)


def test_the_incident_says_from_which_state_the_job_went_on(world):
    failed_and_restarted(world)
    world.journal.resumed(RESUMED, 0.5)
    world.step(4)
    world.step(5)

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert [item["text"] for item in incident["evidence"]].count(RESUMED) == 1
    lost = incident["lost_seconds_by_phase"]
    assert (lost["restore"], lost["init"]) == (0.5, 0.5)


def test_a_restore_that_is_told_late_still_counts_and_ranks_that_follow_replace_it(world):
    failed_and_restarted(world)
    world.journal.resumed("rank 0", 0.25)
    world.step(3)
    world.journal.resumed(RESUMED, 0.5)
    world.step(4)
    world.step(5)

    (incident,) = world.incidents()
    texts = [item["text"] for item in incident["evidence"]]
    assert (texts.count(RESUMED), texts.count("rank 0")) == (1, 0)
    assert incident["lost_seconds_by_phase"]["restore"] == 0.5
    revs = [payload["rev"] for payload in world.of("incident.recorded")]
    assert revs == sorted(set(revs))


def test_a_script_that_says_it_restores_is_believed_and_the_keeper_as_well(world):
    failed_and_restarted(world)
    world.beat(WorkerPhase.RESTORE)
    world.clock.advance(2.0)
    world.beat(WorkerPhase.RESUMED)
    world.journal.resumed(RESUMED, 0.5)
    world.step(4)
    world.step(5)

    assert world.incidents()[0]["lost_seconds_by_phase"]["restore"] == 2.0


def test_a_first_start_from_a_state_is_no_incident(world):
    world.start(0)
    world.journal.resumed(RESUMED, 0.5)
    world.step(4)

    assert world.of("incident.recorded") == []


@pytest.mark.parametrize("how", ["drained", "cancelled"])
def test_the_end_that_was_asked_for_says_what_became_of_the_last_save(world, how):
    world.start(0)
    world.step(1)
    step = StateId(0, 1)
    save = FinalFlush(
        state=step, newest=step, fitted=True, seconds=2.0, within_s=20.0, directory="/ckpt"
    )
    world.journal.saved_last(save.to_json(), save.to_text())
    if how == "drained":
        world.journal.drained("SIGTERM", [], 85)
    else:
        world.journal.cancelled("SIGINT", [])

    (incident,) = world.incidents()
    assert incident["evidence"][-1]["text"] == save.to_text()
    assert world.of("checkpoint.flushed")[0]["directory"] == "/ckpt"
