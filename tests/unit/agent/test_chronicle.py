"""Which events a run leaves, and what its incidents cost, without torch or processes."""

from dataclasses import replace

import pytest

from gpuops.agent.chronicle import Chronicle
from gpuops.agent.records import AttemptFacts
from gpuops.host.clock import FakeClock
from gpuops.model import WorkerExit
from gpuops.wire import STEP_UNKNOWN, Beat, Phase, StepSource

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

    def __init__(self):
        self.clock = FakeClock()
        self.events = []
        self.batches = []
        self.chronicle = Chronicle(self.emit, self.clock, run_id="run-1", node="n1", rules=())
        self.seq = 0

    def emit(self, *news):
        self.events += [(item.kind, item.attempt, item.payload) for item in news]
        self.batches.append([item.kind for item in news])

    def start(self, ordinal):
        self.seq = 0
        self.chronicle.attempt_started(ordinal, replace(FACTS, start_us=self.clock.now_us()))

    def step(self, number, seconds=1.0):
        self.clock.advance(seconds)
        self.seq += 1
        known = StepSource.UNKNOWN if number == STEP_UNKNOWN else StepSource.OPTIMIZER_STATE
        beat = Beat(self.seq, number, self.clock.mono_ns(), Phase.STEPPING, known, self.seq)
        self.chronicle.beats({0: [beat], 1: [beat]})

    def killed(self):
        killed = WorkerExit(
            node="n1",
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

    def fail(self, *, restarts=True):
        self.chronicle.attempt_failed(self.killed(), restarts=restarts)

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
    world.chronicle.attempt_completed()

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert incident["attempt"] == 0
    assert incident["actions"] == ["restart"]
    assert incident["lost_seconds_by_phase"] == {"detect": 0.75, "restart": 2.5, "redo": 1.5}
    assert world.of("attempt.caught_up")[0]["step"] == 4
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["failed", "completed"]
    states = [p["state"] for p in world.of("incident.recorded")]
    assert states == ["open", "mitigated", "closed"]


def test_a_failure_is_recorded_at_once(world):
    world.start(0)
    world.step(1)
    world.fail()

    assert world.batches[-1] == [
        "worker.exited",
        "worker.exited",
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
    world.chronicle.attempt_completed()

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
    world.fail(restarts=False)

    first, second = world.incidents()
    assert first["lost_seconds_by_phase"] == {"detect": 0.25, "restart": 3.0}
    assert second["lost_seconds_by_phase"] == {"detect": 1.25}
    assert second["state"] == "open"
    assert second["actions"] == []
    assert world.of("attempt.first_step")[0]["step"] == 1
    assert len(world.of("attempt.first_step")) == 1


def test_a_failure_that_ends_the_run_is_closed_with_what_it_cost(world):
    world.start(0)
    world.step(1)
    world.fail(restarts=False)
    world.clock.advance(5.0)
    world.chronicle.given_up(1)
    world.chronicle.run_ended("failed", 1, "the budget is spent")

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert incident["resolution"] == "not recovered: the run ended with exit code 1"
    assert incident["lost_seconds_by_phase"] == {"detect": 0.25}


def test_agents_that_do_not_meet_again_leave_nothing_open(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.chronicle.rendezvous_failed("no answer")
    world.chronicle.given_up(1)

    first, second = world.incidents()
    assert first["state"] == second["state"] == "closed"
    assert second["failure_class"] == "launcher.rendezvous"
    assert second["resolution"].startswith("not recovered")


def test_progress_is_told_by_whole_minutes(world):
    world.start(0)
    for number in range(1, 131):
        world.step(number)
    world.chronicle.attempt_completed()

    minutes = [p["minute_us"] for p in world.of("attempt.progress")]
    assert len(minutes) == len(set(minutes)) == 3
    assert all(minute % 60_000_000 == 0 for minute in minutes)


def test_of_several_agents_the_first_alone_tells_the_progress(world):
    world.chronicle.attempt_started(0, replace(FACTS, group_rank=1))
    world.step(1)
    world.chronicle.attempt_completed()

    assert world.of("attempt.progress") == []


def test_without_step_numbers_there_is_no_redo(world):
    world.start(0)
    world.step(STEP_UNKNOWN)
    world.fail()
    world.start(1)
    world.step(STEP_UNKNOWN)

    (incident,) = world.incidents()
    assert incident["state"] == "closed"
    assert set(incident["lost_seconds_by_phase"]) == {"detect", "restart"}
    assert world.of("attempt.caught_up") == []


def test_cancelled_with_nothing_open_there_is_one_closed_incident(world):
    world.start(0)
    world.step(1)
    world.chronicle.cancelled("SIGTERM", [])

    (incident,) = world.incidents()
    assert (incident["failure_class"], incident["state"]) == ("scheduler.cancelled", "closed")
    assert [p["outcome"] for p in world.of("attempt.ended")] == ["cancelled"]


def test_cancelled_during_a_recovery_both_the_failure_and_the_cancellation_are_on_record(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.start(1)
    world.chronicle.cancelled("SIGINT", [])

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
    world.chronicle.cancelled("SIGINT", [])

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
    world.chronicle.cancelled("SIGINT", world.killed())

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
    world.chronicle.attempt_completed()

    (incident,) = world.incidents()
    assert incident["lost_seconds_by_phase"] == {"detect": 0.25, "restart": 2.0}


def test_an_attempt_ends_once(world):
    world.start(0)
    world.step(1)
    world.fail()
    world.chronicle.cancelled("SIGTERM", [])

    assert [p["outcome"] for p in world.of("attempt.ended")] == ["failed"]


def test_a_signal_that_came_after_a_failure_does_not_hide_it(world):
    world.start(0)
    world.step(1)
    exits = world.killed()
    world.chronicle.cancelled("SIGINT", exits, seen_mono_ns=world.clock.mono_ns())

    (incident,) = world.incidents()
    assert incident["failure_class"] == "host_mem.sigkill_probable"
    assert incident["state"] == "closed"


def test_a_signal_that_came_first_is_what_ended_the_run(world):
    world.start(0)
    world.step(1)
    seen_ns = world.clock.mono_ns()
    world.clock.advance(0.1)
    world.chronicle.cancelled("SIGINT", world.killed(), seen_mono_ns=seen_ns)

    (incident,) = world.incidents()
    assert incident["failure_class"] == "scheduler.cancelled"


def test_a_run_cancelled_before_its_first_attempt_has_its_incident(world):
    world.chronicle.cancelled("SIGINT", [])

    (incident,) = world.incidents()
    assert (incident["failure_class"], incident["state"]) == ("scheduler.cancelled", "closed")
    assert world.of("attempt.ended") == []
