"""Each decision is recorded once, by whom it was made and by whom it was about."""

from dataclasses import replace
from uuid import UUID

import pytest
from support.decisions import cluster, decision, report

from gpuops.agent.journal.run_journal import RunJournal
from gpuops.agent.journal.session import DecisionLog
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.control.step import DecisionRecord
from gpuops.host.clock import FakeClock

MADE = decision(report())
FORM = ControlRecord(
    run_id=str(UUID(int=1)),
    folder="run",
    generation=1,
    phase=RunPhase.RENDEZVOUS,
    since_s=0.0,
    decision=MADE,
    decided_by="n1",
)


class World:
    """An agent whose leader decided *decided*, and the kinds of events that it recorded."""

    def __init__(self, decided=None):
        self.events = []
        clock = FakeClock()
        journal = RunJournal(self.emit, clock, run_id="run-1", node="n1", rules=())
        self.decisions = DecisionLog(journal)
        if decided is not None:
            self.decisions.propose(decided)

    def emit(self, *news):
        self.events += [item.kind for item in news]


def by_us(made):
    return DecisionRecord(
        decision=made, reports=(report(),), cluster=cluster(), history=(), note="the site agrees"
    )


def test_a_decision_of_ours_is_recorded_whether_or_not_workers_ran_here():
    world = World(by_us(MADE))

    world.decisions.record(FORM, None)

    assert world.events.count("decision.made") == 1


def test_it_is_recorded_once_wherever_it_is_heard_of():
    world = World(by_us(MADE))

    world.decisions.record(FORM, None)
    world.decisions.record(replace(FORM, phase=RunPhase.RUN, decided_by="n7"), 0)
    world.decisions.record(FORM, 0)

    assert world.events.count("decision.made") == 1


def test_one_that_lost_against_another_leaders_is_not_recorded_as_made():
    other = replace(MADE, failure=replace(MADE.failure, at_s=100.5))
    world = World(by_us(other))

    world.decisions.record(FORM, 0)

    assert "decision.made" not in world.events
    assert world.events  # what was decided instead


def test_one_that_lost_hides_none_of_ours_that_is_not_recorded_yet():
    world = World(by_us(MADE))
    world.decisions.propose(by_us(replace(MADE, failure=replace(MADE.failure, at_s=100.5))))

    world.decisions.record(FORM, None)

    assert world.events.count("decision.made") == 1


@pytest.mark.parametrize("generation", [None, 1, 5])
def test_one_of_others_on_a_generation_that_did_not_run_here_is_theirs_to_tell(generation):
    world = World()

    world.decisions.record(FORM, generation)

    assert world.events == []


def test_a_record_without_a_decision_says_nothing():
    world = World(by_us(MADE))

    world.decisions.record(replace(FORM, decision=None), 0)

    assert world.events == []
