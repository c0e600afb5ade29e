"""Each step of the control record: from which phase to which, and never over somebody else's."""

from dataclasses import replace

import pytest
from support.decisions import failure

from gpuops.control import transitions
from gpuops.control.record import ControlRecord, RunPhase
from gpuops.errors import EXIT_FAIL
from gpuops.incident.decision import ReportKind, RestartDecision, RunAction

RECORD = ControlRecord(
    run_id="r1", folder="run", generation=3, phase=RunPhase.RUN, since_s=0.0, excluded={"n9": "old"}
)


def decision(action, **changes):
    given = {"action": action, "rule": "node.lost", "reason": "n2 is lost", "backoff_s": 5.0}
    return RestartDecision(failure=failure(), **given | changes)


def restart(now, seen):
    asked = decision(RunAction.RESTART, exclude={"n2": "lost"})
    return transitions.decide(now, seen, asked, by="n1", now_s=100.0)


def give_up(now, seen):
    return transitions.decide(now, seen, decision(RunAction.FAIL), by="n1", now_s=100.0)


def collect(now, seen):
    return transitions.collect(
        now, seen, trigger=ReportKind.NODE_LOST, reason="n2 is lost", by="n1"
    )


def stop(now, seen):
    return transitions.stop(now, seen, exit_code=0, reason="all done", by="n1")


def run(now, seen):
    return transitions.run(now, seen, by="n1")


def grow(now, seen):
    return transitions.grow(now, seen, reason="n4 waits", by="n1", now_s=100.0)


STEPS = [
    (collect, RunPhase.RUN, RunPhase.COLLECT, 0),
    (restart, RunPhase.COLLECT, RunPhase.RENDEZVOUS, 1),
    (give_up, RunPhase.COLLECT, RunPhase.STOP, 0),
    (run, RunPhase.RENDEZVOUS, RunPhase.RUN, 0),
    (grow, RunPhase.RUN, RunPhase.RENDEZVOUS, 1),
    (stop, RunPhase.RUN, RunPhase.STOP, 0),
    (stop, RunPhase.DRAIN, RunPhase.STOP, 0),
]


@pytest.mark.parametrize(("make", "before", "after", "generations"), STEPS)
def test_a_step_leads_from_one_phase_to_the_next(make, before, after, generations):
    seen = replace(RECORD, phase=before)

    changed = make(seen, seen)

    assert (changed.phase, changed.generation) == (after, 3 + generations)
    assert changed.decided_by == "n1"


@pytest.mark.parametrize(("make", "before", "after", "generations"), STEPS)
@pytest.mark.parametrize("phase", list(RunPhase))
def test_a_leader_that_was_overtaken_changes_nothing(make, before, after, generations, phase):
    seen = replace(RECORD, phase=before)
    later = replace(seen, generation=4, phase=phase)
    other = replace(seen, phase=phase)

    assert make(later, seen) is None
    assert (make(other, seen) is None) == (phase is not before)


def test_a_restart_leaves_out_whom_the_decision_names_and_waits_for_the_back_off():
    seen = replace(RECORD, phase=RunPhase.COLLECT, trigger=ReportKind.NODE_LOST)

    changed = restart(seen, seen)

    assert changed.excluded == {"n9": "old", "n2": "lost"}
    assert changed.not_before_s == 105.0
    assert changed.trigger is None


def test_a_decision_that_names_no_exit_code_ends_with_that_of_a_failure():
    seen = replace(RECORD, phase=RunPhase.COLLECT)

    assert give_up(seen, seen).exit_code == EXIT_FAIL


def test_growing_is_remembered_with_its_time_and_waits_for_nothing():
    changed = grow(RECORD, RECORD)

    assert changed.grown_at_s == (100.0,)
    assert (changed.not_before_s, changed.decision) == (0.0, None)


def test_a_readmitted_node_is_neither_left_out_nor_suspected():
    now = replace(RECORD, excluded={"n9": "old", "n8": "x"}, suspected={"n9": "slow", "n7": "y"})
    changed = transitions.readmit(now, "n9")

    assert (changed.excluded, changed.suspected) == ({"n8": "x"}, {"n7": "y"})
    assert changed.generation == now.generation
    assert transitions.readmit(now, "n7") is None
    assert transitions.readmit(replace(now, phase=RunPhase.STOP), "n9") is None
