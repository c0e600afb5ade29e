"""The seconds of a run: each in one phase, adding up to the wall time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decisions import cluster, decision, report
from support.draws import draws
from support.exits import NODE, RULES, RUN, S, incident_of, killed
from support.history import a_killed_run, attempt_row, record_run, run_row, us
from support.recorders import ListRecorder

from gpuops.agent.journal.payloads import AttemptFacts
from gpuops.agent.journal.run_journal import RunJournal
from gpuops.host.clock import FakeClock
from gpuops.incident.cause import judge_exits
from gpuops.report.time_breakdown import LOST_PHASES, TimePhase, break_down_run
from gpuops.store.engine import memory_store
from gpuops.store.events import new_event
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import SpoolLine
from gpuops.wire.ring import Beat, StepSource
from gpuops.wire.ring import WorkerPhase as Beating

OPTIMIZER = StepSource.OPTIMIZER_STATE


def seconds(found):
    return {phase.value: s for phase, s in found.seconds.items() if s}


def test_a_run_without_failures_is_init_productive_and_other():
    found = break_down_run(run_row(), [attempt_row(0, (1, 10, None, 95, 96), (1, 200))], [])

    assert seconds(found) == {"init": 10, "productive": 85, "other": 5}
    assert found.ettr_alloc == found.ettr_alloc_max == pytest.approx(0.85)
    assert found.lost_s == 0
    assert found.redone_steps == 0


def test_an_incident_that_ended_no_attempt_is_no_failure_of_the_run():
    _run, _attempts, (incident, *_) = a_killed_run()
    attempts = [attempt_row(0, (1, 10, None, 95, 96), (1, 200))]

    assert not break_down_run(run_row(), attempts, [replace(incident, attempt=None)]).has_failed
    assert break_down_run(run_row(), attempts, [incident]).has_failed


def test_a_killed_rank_costs_detection_restart_and_repeated_steps():
    found = break_down_run(*a_killed_run())

    assert seconds(found) == pytest.approx(
        {"init": 10, "productive": 55, "detect": 0.4, "restart": 4.6, "redo": 25, "other": 5}
    )
    assert found.ettr_alloc == pytest.approx(0.55)
    assert found.redone_steps == 57
    assert found.attempts[1].restarted_from_scratch


def test_a_node_that_did_not_join_does_not_hide_when_the_attempt_failed():
    run, rows, incidents = a_killed_run()
    gate = replace(incidents[0], about="0/n042", first_us=us(0.5), detected_us=us(0.5), lost_s={})

    assert break_down_run(run, rows, [gate, *incidents]).seconds == (
        break_down_run(run, rows, incidents).seconds
    )


def test_a_job_that_resumes_where_it_failed_redoes_nothing():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, 45, 95, 96), (58, 120)),
    ]
    found = break_down_run(run_row(), rows, [])

    assert found.seconds[TimePhase.REDO] == 0
    assert found.redone_steps == 0
    assert not found.attempts[1].restarted_from_scratch


def test_a_job_that_resumes_from_an_older_checkpoint_did_not_begin_again():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, 50, 95, 96), (51, 120)),
    ]
    found = break_down_run(run_row(), rows, [])

    assert found.redone_steps == 7
    assert found.seconds[TimePhase.REDO] == 5
    assert not found.attempts[1].restarted_from_scratch


def test_an_attempt_that_never_caught_up_only_repeated():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, None, 60, 61), (1, 30), "failed"),
        attempt_row(2, (62, 65, 80, 95, 96), (1, 120)),
    ]
    found = break_down_run(run_row(), rows, [])

    assert found.seconds[TimePhase.REDO] == 15 + 15
    assert found.redone_steps == 30 + 57


def test_without_step_numbers_later_attempts_are_unknown_and_the_ratio_is_a_range():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), outcome="failed", beats=50),
        attempt_row(1, (41, 45, None, 95, 96), beats=90),
    ]
    found = break_down_run(run_row(), rows, [])

    assert found.seconds[TimePhase.UNKNOWN] == 50
    assert found.redone_steps is None
    assert found.ettr_alloc == pytest.approx(0.3)
    assert found.ettr_alloc_max == pytest.approx(0.8)


def test_a_run_whose_steps_nobody_saw_is_unknown_not_idle():
    found = break_down_run(run_row(), [attempt_row(0, (2, None, None, None, 98))], [])

    assert seconds(found) == {"init": 2, "unknown": 96, "other": 2}
    assert found.ettr_alloc == 0


def test_an_attempt_that_failed_before_its_first_step_is_lost_from_its_start():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40), (1, 57), "failed"),
        attempt_row(1, (41, None, None, None, 50), outcome="failed"),
        attempt_row(2, (51, 55, 80, 95, 96), (1, 120)),
    ]
    found = break_down_run(run_row(), rows, [])

    assert found.seconds[TimePhase.RESTART] == 1 + 5
    assert found.seconds[TimePhase.DETECT] == 9


def test_a_failed_start_is_init_up_to_its_failure_and_lost_even_of_the_first_attempt():
    rows = [
        attempt_row(0, (2, None, None, None, 22), outcome="failed"),
        attempt_row(1, (23, 30, None, 95, 96), (1, 120)),
    ]
    failed = incident_of(killed(0, at_s=20), detected_s=21)
    found = break_down_run(run_row(), rows, [replace(failed, lost_s={"decide": 1})])

    assert seconds(found) == {
        "init": 2 + 18 + 7,
        "detect": 1,
        "decide": 1,
        "rendezvous": 1,
        "productive": 65,
        "other": 5,
    }
    assert found.lost[TimePhase.INIT] == 18 + 7
    assert found.lost_s == 18 + 7 + 3


def test_a_failed_start_whose_failure_has_no_time_is_init_up_to_its_detection():
    rows = [attempt_row(0, (2, None, None, None, 22), outcome="failed")]
    incident = incident_of(detected_s=21)
    found = break_down_run(run_row(ended_us=us(25), outcome="failed"), rows, [incident])

    assert seconds(found) == {"init": 2 + 19, "other": 4}
    assert found.lost_s == 19


def test_a_run_of_attempts_that_all_failed_before_a_step_is_lost_as_a_whole():
    rows = [
        attempt_row(n, (30 * n + 2, None, None, None, 30 * n + 20), outcome="failed")
        for n in range(3)
    ]
    found = break_down_run(run_row(ended_us=us(81), outcome="failed"), rows, [])

    assert seconds(found) == {"init": 2, "detect": 3 * 18, "restart": 2 * 12, "other": 1}
    assert found.ettr_alloc == found.ettr_alloc_max == 0


def test_the_report_counts_what_the_incidents_of_the_run_count():
    """The chronicle of an agent and the account of its events, over every kind of attempt."""
    events, clock = ListRecorder(), FakeClock()
    run = tell_a_run(events, clock)
    found = break_down_run(*run)

    assert len(found.incidents) == 4
    for phase in LOST_PHASES:
        charged = sum(incident.lost_s.get(phase.value, 0.0) for incident in found.incidents)
        assert found.lost[phase] == pytest.approx(charged, abs=1e-5)
    assert found.lost_s > 0
    assert found.seconds[TimePhase.INIT] - found.lost[TimePhase.INIT] == pytest.approx(1.5)


def test_a_step_before_a_load_is_none_that_was_made_again():
    attempts = (range(1, 13), (1, *range(9, 15)))
    found = break_down_run(*tell_a_run(ListRecorder(), FakeClock(), attempts))

    assert found.redone_steps == 4
    assert not found.attempts[1].restarted_from_scratch


STEPS = ((), (1, 2, 3), (), (1, 2), (1, 2, 3, 4, 5))


def tell_a_run(recorder, clock, attempts=STEPS):
    """Record a run that fails before its first step, in mid-training, again, and in a redo."""

    def emit(*news):
        for item in news:
            recorder.record(
                new_event(
                    item.kind,
                    node=NODE,
                    clock=clock,
                    run_id=RUN,
                    attempt=item.attempt,
                    payload=item.payload,
                )
            )

    chronicle = RunJournal(emit, clock, run_id=RUN, node=NODE, rules=())
    record_run(recorder, run_row(outcome=None, ended_us=None), [], [], clock)
    for ordinal, steps in enumerate(attempts):
        clock.advance(1.5)
        chronicle.attempt_started(ordinal, facts(clock))
        clock.advance(2.0)
        for calls, step in enumerate(steps, 1):
            clock.advance(0.75)
            beat = Beat(calls, step, clock.mono_ns(), Beating.STEPPING, OPTIMIZER, calls)
            chronicle.beats({0: [beat]})
        clock.advance(0.5)
        if ordinal + 1 < len(attempts):
            end = killed(0, at_s=clock.mono_ns() / S)
            clock.advance(0.25)
            told = report(NODE, generation=ordinal)
            chronicle.attempt_failed(judge_exits([end], RULES), report=told)
            clock.advance(0.125)
            made = decision(told, generation=ordinal)
            chronicle.decided(made, (told,), cluster(NODE), by_us=True)
    chronicle.attempt_completed()
    clock.advance(0.5)
    chronicle.run_ended("completed", 0, "done")
    with memory_store() as store, store.begin() as connection:
        lines = [SpoolLine("n041.0", "b", n, e) for n, e in enumerate(recorder.events, start=1)]
        ingest(connection, [EventEnvelope(line, "c", 0) for line in lines], 0)
        run = run_queries.find_run(connection, RUN)
        incidents = run_queries.incidents(connection, run_id=RUN)
        return run, run_queries.attempts(connection, RUN), incidents


def facts(clock):
    return AttemptFacts(
        start_us=clock.now_us(),
        world_size=1,
        n_nodes=1,
        group_rank=0,
        torch_run_id="t",
        log_dir="/logs",
        slurm_job_id=None,
        slurm_restart_count=0,
    )


def test_a_failure_that_a_cancellation_cut_short_is_detected_time():
    row = attempt_row(0, (1, 10, None, 40, 42), (1, 57), "cancelled")
    run = run_row(ended_us=us(43), outcome="cancelled")
    found = break_down_run(run, [row], [incident_of(killed(0, at_s=41), detected_s=42)])

    assert seconds(found) == {"init": 10, "productive": 30, "detect": 2, "other": 1}


def test_a_run_that_was_cancelled_while_it_restarted_lost_that_time_to_the_failure():
    row = attempt_row(0, (1, 10, None, 40, 41), (1, 57), "failed")
    found = break_down_run(run_row(ended_us=us(50), outcome="cancelled"), [row], [])

    assert seconds(found) == {"init": 10, "productive": 30, "detect": 1, "restart": 9}


def test_the_time_after_a_step_is_unknown_where_the_end_is_not_on_record():
    rows = [attempt_row(0, (1, 10, None, None, None), (1, None), None)]
    run = run_row(ended_us=None, outcome=None)
    found = break_down_run(run, rows, [], last_event_us=us(70))

    assert seconds(found) == {"init": 10, "unknown": 60}


def test_a_live_run_is_accounted_up_to_its_last_news():
    rows = [attempt_row(0, (1, 10, None, 40, None), (1, 57), None)]
    found = break_down_run(run_row(ended_us=None, outcome=None), rows, [])

    assert found.is_live
    assert found.wall_s == 40


def test_a_run_of_no_length_has_no_ratio():
    found = break_down_run(run_row(ended_us=us(0)), [], [])

    assert found.wall_s == 0
    assert found.ettr_alloc is None


TIMES = st.none() | st.floats(-50, 150)


@st.composite
def any_attempt(draw, ordinal):
    times = [draw(TIMES) for _ in range(5)]
    known = draw(st.booleans())
    first = draw(st.integers(0, 50)) if known else None
    last = first + draw(st.integers(0, 80)) if known else None
    outcome = draw(st.sampled_from(["failed", "completed", "cancelled", None]))
    return attempt_row(ordinal, times, (first, last), outcome)


@settings(max_examples=draws(300))
@given(
    data=st.data(),
    count=st.integers(0, 5),
    end=st.none() | st.floats(-10, 200),
    detected=st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 200)), max_size=4),
)
def test_whatever_was_recorded_the_phases_add_up_to_the_wall_time(data, count, end, detected):
    rows = [data.draw(any_attempt(n)) for n in range(count)]
    incidents = [incident_of(killed(0), attempt=n, detected_s=t) for n, t in detected]
    run = run_row(ended_us=None if end is None else us(end))
    found = break_down_run(run, data.draw(st.permutations(rows)), incidents)

    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-6)
    assert all(s >= 0 for s in found.seconds.values())
    edges = [found.start_us, *(span.end_us for span in found.spans)]
    assert [span.start_us for span in found.spans] == edges[:-1]
    assert edges[-1] == found.end_us
    if found.ettr_alloc is not None:
        assert 0 <= found.ettr_alloc <= found.ettr_alloc_max <= 1
