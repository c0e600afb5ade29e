"""When a state is persisted."""

from gpuops.checkpoint.keeper.messages import CheckpointPolicy
from gpuops.checkpoint.storage.persist_schedule import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    PersistSchedule,
)
from gpuops.checkpoint.types import StateId

POLICY = CheckpointPolicy(directory="/states", persist_every_s=60.0)
FIRST, SECOND = StateId(0, 1), StateId(0, 2)


def test_the_first_state_is_persisted_at_once_and_the_next_after_a_while():
    schedule = PersistSchedule()
    assert schedule.is_due(FIRST, POLICY, 100.0)
    schedule.on_start(FIRST, 100.0)
    assert not schedule.is_due(SECOND, POLICY, 300.0)  # one at a time
    schedule.on_success(FIRST)

    assert not schedule.is_due(FIRST, POLICY, 300.0)
    assert not schedule.is_due(SECOND, POLICY, 159.9)
    assert schedule.is_due(SECOND, POLICY, 160.0)


def test_without_a_directory_an_interval_or_a_state_nothing_is_due():
    schedule = PersistSchedule()

    assert not schedule.is_due(FIRST, None, 1.0)
    assert not schedule.is_due(FIRST, CheckpointPolicy(), 1.0)
    assert not schedule.is_due(None, POLICY, 1.0)
    only_flush = CheckpointPolicy(directory="/states", persist_every_s=None)
    assert not schedule.is_due(FIRST, only_flush, 1.0)
    assert schedule.can_persist(FIRST, only_flush)


def test_failures_are_tried_again_ever_more_rarely_and_a_success_ends_that():
    schedule, now_s, waits = PersistSchedule(), 0.0, []
    for _ in range(14):
        schedule.on_start(FIRST, now_s)
        waits.append(schedule.on_failure(now_s))
        assert not schedule.is_due(FIRST, POLICY, now_s + waits[-1] - 0.01)
        now_s += waits[-1]
        assert schedule.is_due(FIRST, POLICY, now_s)

    assert waits[:3] == [BACKOFF_MIN_S, 2 * BACKOFF_MIN_S, 4 * BACKOFF_MIN_S]
    assert waits[-1] == BACKOFF_MAX_S
    schedule.on_success(FIRST)
    assert schedule.failures == 0


def test_another_directory_has_nothing_yet():
    schedule = PersistSchedule()
    schedule.on_start(SECOND, 0.0)
    schedule.on_success(SECOND)
    assert schedule.has_persisted(FIRST)
    schedule.reset()

    assert schedule.is_due(SECOND, POLICY, 1.0)


def test_a_job_that_goes_back_persists_what_it_resumes_from():
    schedule = PersistSchedule()
    schedule.on_start(SECOND, 0.0)
    schedule.on_success(SECOND)
    schedule.rewind(FIRST)

    assert not schedule.has_persisted(FIRST)
    schedule.on_start(SECOND, 0.0)
    schedule.on_success(SECOND)
    schedule.rewind(SECOND)
    assert schedule.has_persisted(SECOND)
