"""The seconds of a run: each in one phase, adding up to the wall time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exits import incident_of, killed
from support.history import a_killed_run, attempt_row, run_row, us

from gpuops.report.account import Phase, account


def seconds(found):
    return {phase.value: s for phase, s in found.seconds.items() if s}


def test_a_run_without_failures_is_init_productive_and_other():
    found = account(run_row(), [attempt_row(0, (1, 10, None, 95, 96), (1, 200))], [])

    assert seconds(found) == {"init": 10, "productive": 85, "other": 5}
    assert found.ettr_alloc == found.ettr_alloc_max == pytest.approx(0.85)
    assert found.lost_s == 0
    assert found.redone_steps == 0


def test_a_killed_rank_costs_detection_restart_and_repeated_steps():
    found = account(*a_killed_run())

    assert seconds(found) == pytest.approx(
        {"init": 10, "productive": 55, "detect": 0.4, "restart": 4.6, "redo": 25, "other": 5}
    )
    assert found.ettr_alloc == pytest.approx(0.55)
    assert found.redone_steps == 57
    assert found.attempts[1].began_again


def test_a_job_that_resumes_where_it_failed_redoes_nothing():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, 45, 95, 96), (58, 120)),
    ]
    found = account(run_row(), rows, [])

    assert found.seconds[Phase.REDO] == 0
    assert found.redone_steps == 0
    assert not found.attempts[1].began_again


def test_a_job_that_resumes_from_an_older_checkpoint_did_not_begin_again():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, 50, 95, 96), (51, 120)),
    ]
    found = account(run_row(), rows, [])

    assert found.redone_steps == 7
    assert found.seconds[Phase.REDO] == 5
    assert not found.attempts[1].began_again


def test_an_attempt_that_never_caught_up_only_repeated():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), (1, 57), "failed"),
        attempt_row(1, (41, 45, None, 60, 61), (1, 30), "failed"),
        attempt_row(2, (62, 65, 80, 95, 96), (1, 120)),
    ]
    found = account(run_row(), rows, [])

    assert found.seconds[Phase.REDO] == 15 + 15
    assert found.redone_steps == 30 + 57


def test_without_step_numbers_later_attempts_are_unknown_and_the_ratio_is_a_range():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40.5), outcome="failed", beats=50),
        attempt_row(1, (41, 45, None, 95, 96), beats=90),
    ]
    found = account(run_row(), rows, [])

    assert found.seconds[Phase.UNKNOWN] == 50
    assert found.redone_steps is None
    assert found.ettr_alloc == pytest.approx(0.3)
    assert found.ettr_alloc_max == pytest.approx(0.8)


def test_a_run_whose_steps_nobody_saw_is_unknown_not_idle():
    found = account(run_row(), [attempt_row(0, (2, None, None, None, 98))], [])

    assert seconds(found) == {"init": 2, "unknown": 96, "other": 2}
    assert found.ettr_alloc == 0


def test_an_attempt_that_died_before_its_first_step_is_part_of_the_restart():
    rows = [
        attempt_row(0, (1, 10, None, 40, 40), (1, 57), "failed"),
        attempt_row(1, (41, None, None, None, 50), outcome="failed"),
        attempt_row(2, (51, 55, 80, 95, 96), (1, 120)),
    ]
    found = account(run_row(), rows, [])

    assert found.seconds[Phase.RESTART] == 15


def test_a_live_run_is_accounted_up_to_its_last_news():
    rows = [attempt_row(0, (1, 10, None, 40, None), (1, 57), None)]
    found = account(run_row(ended_us=None, outcome=None), rows, [])

    assert found.is_live
    assert found.wall_s == 40


def test_a_run_of_no_length_has_no_ratio():
    found = account(run_row(ended_us=us(0)), [], [])

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


@settings(max_examples=300, deadline=None)
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
    found = account(run, data.draw(st.permutations(rows)), incidents)

    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, abs=1e-6)
    assert all(s >= 0 for s in found.seconds.values())
    edges = [found.start_us, *(span.end_us for span in found.spans)]
    assert [span.start_us for span in found.spans] == edges[:-1]
    assert edges[-1] == found.end_us
    if found.ettr_alloc is not None:
        assert 0 <= found.ettr_alloc <= found.ettr_alloc_max <= 1
