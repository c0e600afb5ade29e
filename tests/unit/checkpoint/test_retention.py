"""Which states are removed, and which never are."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.digest import digest_root
from gpuops.checkpoint.manifest import Manifest, ShardRecord, format_utc
from gpuops.checkpoint.storage.api import StoredState
from gpuops.checkpoint.storage.persist import (
    DAY_S,
    DEFAULT_BUCKETS,
    HOUR_S,
    RetentionBucket,
    RetentionPolicy,
    decide_retention,
    prune,
    states_to_delete,
)
from gpuops.checkpoint.types import CheckpointError, Digest, Shard, StateId

NOON_S = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp())
TABLE = blake3(b"").digest(8)
RECORD = ShardRecord(Shard(0, 1), "0" * 64, Digest(1, TABLE, digest_root(1, TABLE)))


def stored(step, *, epoch=1, age_s=0, tags=(), is_damaged=False):
    state = StateId(epoch, step)
    made = Manifest(
        state=state,
        world=1,
        shards=(RECORD,),
        created=format_utc((NOON_S - age_s) * 1_000_000),
        version="1",
        generation=0,
        job="",
    )
    return StoredState(state, made, tags, is_damaged=is_damaged)


def row(*steps):
    """Return states of these steps, a minute apart, the last one now."""
    return [stored(step, age_s=60 * (len(steps) - n)) for n, step in enumerate(steps, start=1)]


def kept(states, retention, verified=()):
    return [
        verdict.state.step
        for verdict in decide_retention(states, retention, verified)
        if verdict.is_kept
    ]


def test_the_newest_stay_and_the_rest_go_oldest_first():
    states = row(1, 2, 3, 4, 5)

    gone = states_to_delete(states, RetentionPolicy(keep_last=2), {StateId(1, 5)})

    assert [verdict.state.step for verdict in gone] == [1, 2, 3]
    assert {verdict.why for verdict in gone} == {"no rule keeps it"}


def test_newest_is_by_epoch_first():
    states = [stored(900, epoch=1), stored(100, epoch=2), stored(200, epoch=2)]

    gone = states_to_delete(states, RetentionPolicy(keep_last=2), {StateId(2, 200)})

    assert [verdict.state for verdict in gone] == [StateId(1, 900)]


def test_each_so_many_steps_one_stays():
    states = row(0, 50, 100, 150, 200, 250)

    assert kept(states, RetentionPolicy(keep_last=1, keep_every=100), {StateId(1, 250)}) == [
        250,
        200,
        100,
        0,
    ]


def test_the_newest_verified_stays_however_old():
    states = row(1, 2, 3, 4, 5, 6)

    assert kept(states, RetentionPolicy(keep_last=2), {StateId(1, 1), StateId(1, 2)}) == [6, 5, 2]


def test_a_damaged_state_is_none_of_the_newest_and_goes_once_enough_newer_ones_are_there():
    retention, damaged = RetentionPolicy(keep_last=3), stored(20, is_damaged=True)
    states = [stored(13), stored(17), damaged, stored(18, epoch=2), stored(22, epoch=2)]
    newest = {StateId(2, 22)}

    assert kept(states, retention, newest) == [22, 18, 20, 17]
    assert kept([*states, stored(26, epoch=2)], retention, newest) == [26, 22, 18]
    verdicts = decide_retention(states, retention, newest)
    assert verdicts[2].why == "damaged, and newer than what is kept instead"
    bad = [stored(step, epoch=3, is_damaged=True) for step in range(30, 40)]
    assert kept([*states, *bad], retention, newest) == [39, 38, 37, 22, 18, 17]


def test_a_damaged_state_is_not_the_one_of_its_hour():
    states = [stored(1, age_s=120), stored(2, age_s=60, is_damaged=True), stored(3)]
    hourly = RetentionPolicy(keep_last=1, buckets=(RetentionBucket(HOUR_S, DAY_S),))

    assert kept(states, hourly, {StateId(1, 3)}) == [3, 1]


def test_nothing_goes_while_none_is_known_to_be_good():
    states = row(1, 2, 3, 4)

    assert states_to_delete(states, RetentionPolicy(keep_last=1)) == []
    assert (
        states_to_delete(states, RetentionPolicy(keep_last=1), {StateId(7, 7)}) == []
    )  # not in this store
    verdicts = decide_retention(states, RetentionPolicy(keep_last=1))
    assert verdicts[-1].why == "no state is known to be good"


def test_pinned_ones_stay_and_the_reasons_are_told():
    states = [stored(1, tags=("a", "b"), age_s=99), *row(2, 3)]

    verdicts = decide_retention(states, RetentionPolicy(keep_last=1, keep_every=3), {StateId(1, 3)})

    assert [(verdict.state.step, verdict.is_kept) for verdict in verdicts] == [
        (3, True),
        (2, False),
        (1, True),
    ]
    assert verdicts[0].why == "among the newest 1; each 3 steps; the newest that was verified"
    assert verdicts[2].why == "pinned by a, b"


def test_the_ladder_keeps_one_an_hour_for_a_day_and_one_a_day_for_a_week():
    minutes = range(0, 10 * 24 * 60, 20)
    states = [stored(10**6 - minute, age_s=60 * minute) for minute in minutes]

    retention = RetentionPolicy(keep_last=1, buckets=DEFAULT_BUCKETS)
    steps = set(kept(states, retention, {StateId(1, 10**6)}))
    ages_s = sorted(NOON_S - item.manifest.created_s for item in states if item.state.step in steps)

    in_a_day = [age_s for age_s in ages_s if age_s <= DAY_S]
    later = [age_s for age_s in ages_s if age_s > DAY_S]
    # By the clock's hours and days: the newest of 12:00 itself, then 11:40, 10:40, …
    assert in_a_day[:3] == [0, 20 * 60, 80 * 60]
    assert len(in_a_day) == 25
    assert len(later) == 6
    assert max(later) <= 7 * DAY_S


def test_a_clock_that_jumped_or_a_long_pause_removes_nothing_by_age():
    states = [stored(step, age_s=400 * DAY_S + HOUR_S * (9 - step)) for step in range(10)]

    retention = RetentionPolicy(keep_last=1, buckets=(RetentionBucket(HOUR_S, DAY_S),))

    assert len(kept(states, retention, {StateId(1, 9)})) == 10


def test_one_state_or_none_is_left_alone():
    assert decide_retention([], RetentionPolicy()) == []
    assert states_to_delete([stored(1)], RetentionPolicy(keep_last=1), {StateId(1, 1)}) == []


@pytest.mark.parametrize(
    "values", [{"keep_last": 0}, {"keep_last": -1}, {"keep_every": -1}], ids=str
)
def test_a_rule_that_would_keep_none_is_refused(values):
    with pytest.raises(ValueError, match="keep_last is"):
        RetentionPolicy(**values)


@pytest.mark.parametrize("rung", [(0, 10), (-1, 10), (10, 5)])
def test_a_rung_that_means_nothing_is_refused(rung):
    with pytest.raises(ValueError, match="kept each"):
        RetentionBucket(*rung)


STORED = st.builds(
    stored,
    st.integers(0, 30),
    epoch=st.integers(0, 2),
    age_s=st.integers(0, 10 * DAY_S),
    tags=st.sampled_from([(), (), (), ("x",)]),
    is_damaged=st.booleans(),
)
RETENTIONS = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 7),
    buckets=st.sampled_from([(), DEFAULT_BUCKETS, (RetentionBucket(60, 3600),)]),
)


@given(
    states=st.lists(STORED, max_size=25, unique_by=lambda item: item.state),
    retention=RETENTIONS,
    data=st.data(),
)
def test_what_must_stay_stays_and_a_second_time_nothing_goes(states, retention, data):
    intact = [item.state for item in states if not item.is_damaged]
    verified = data.draw(st.sets(st.sampled_from(intact)) if intact else st.just(set()))
    gone = {verdict.state for verdict in states_to_delete(states, retention, verified)}

    assert not gone & {item.state for item in states if item.tags}
    assert max(verified, default=None) not in gone
    newest = sorted(intact, reverse=True)[: retention.keep_last]
    assert not gone & set(newest)
    if not verified:
        assert not gone
    left = [item for item in states if item.state not in gone]
    assert states_to_delete(left, retention, verified) == []


class ListOfStates:
    """A store that only lists and deletes; one of its states cannot be removed."""

    def __init__(self, states, stuck=None):
        self.states, self.stuck = states, stuck

    def list_states(self):
        return tuple(self.states)

    def delete(self, state):
        if state == self.stuck:
            raise CheckpointError("cannot")
        self.states = [item for item in self.states if item.state != state]


def test_what_the_job_resumed_from_stays_until_a_newer_state_was_read_back():
    def left(*states):
        store = ListOfStates([stored(1), stored(2), *states])
        prune(store, RetentionPolicy(keep_last=1), {StateId(1, 4)}, StateId(1, 1))
        return [item.state.step for item in store.states]

    assert left(stored(3), stored(4)) == [1, 4]
    assert left(replace(stored(3), is_verified=True), stored(4)) == [3, 4]


def test_pruning_stops_at_a_state_that_cannot_be_removed():
    store = ListOfStates(row(1, 2, 3, 4), stuck=StateId(1, 2))

    with pytest.raises(CheckpointError):
        prune(store, RetentionPolicy(keep_last=1), {StateId(1, 4)})

    assert [item.state.step for item in store.states] == [2, 3, 4]
