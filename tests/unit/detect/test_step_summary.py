"""Summaries of steps: what they keep, how large they are, and what is refused."""

import base64
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.detect.own_time import Measure, RankSteps
from gpuops.detect.step_summary import (
    STEPS_MAX,
    StepSummary,
    gain_without,
    own_by_step,
    pack_summary,
    slowdowns_of,
    unpack_summary,
)

SECONDS = st.floats(1e-4, 7200)


def steps_of(seconds, **more):
    return RankSteps(role=7, measure=Measure.OWN, seconds=seconds, step_s=0.5, **more)


@given(
    st.integers(0, 2**31),
    st.dictionaries(st.integers(0, 60), SECONDS, min_size=1),
    st.integers(0, 2**31 - 1),
    st.sampled_from(Measure),
)
def test_a_summary_keeps_the_newest_steps_to_a_hundredth_in_48_bytes(first, gaps, role, measure):
    seconds = {first + gap: value for gap, value in gaps.items()}
    made = RankSteps(role=role, measure=measure, seconds=seconds, step_s=3.0, data_share=0.5)

    text = pack_summary(made)
    found = unpack_summary(text)

    assert len(base64.b64decode(text)) <= 48
    newest = {step for step in seconds if step > max(seconds) - STEPS_MAX}
    assert found.seconds.keys() == newest
    assert (found.role, found.measure, found.step_s) == (role, measure, 3.0)
    assert found.data_share == pytest.approx(0.5, abs=0.01)
    middle = sorted(seconds[step] for step in newest)[len(newest) // 2]
    for step in newest:
        if abs(math.log(seconds[step] / middle)) < 1:
            assert found.seconds[step] == pytest.approx(seconds[step], rel=0.01)


def test_a_rank_without_steps_has_no_summary():
    assert pack_summary(steps_of({})) == ""
    assert pack_summary(steps_of({3: 0.0, 4: math.nan, 5: -1.0})) == ""


GOOD = pack_summary(steps_of({1: 0.1, 2: 0.1}))


@pytest.mark.parametrize(
    "text",
    [
        *(None, 3, "", "no base64!", GOOD[:8], GOOD * 9),
        *(base64.b64encode(bytes(n)).decode() for n in (18, 19, 48, 49)),
        base64.b64encode(b"\xff" * 30).decode(),
    ],
)
def test_what_is_no_summary_is_refused(text):
    with pytest.raises(ValueError, match=r"summary|times"):
        unpack_summary(text)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_summary_or_refused(raw):
    try:
        found = unpack_summary(base64.b64encode(raw).decode())
    except ValueError:
        return
    assert len(found.seconds) <= STEPS_MAX


def summary(seconds, measure=Measure.OWN, step_s=0.1):
    return StepSummary(
        role=1,
        measure=measure,
        seconds=seconds,
        step_s=step_s,
        data_share=0.0,
        optimizer_share=0.0,
    )


def test_own_times_are_listed_by_step_and_rank():
    found = own_by_step({0: summary({5: 0.1, 6: 0.2}), 1: summary({6: 0.3})})

    assert found == {5: {0: 0.1}, 6: {0: 0.2, 1: 0.3}}


def test_of_seconds_in_collectives_the_rank_that_waits_least_has_the_most_of_its_own():
    waits = {rank: summary({9: s}, Measure.IN_COLLECTIVES) for rank, s in enumerate((0.04, 0.01))}

    (own,) = own_by_step(waits).values()

    assert own == pytest.approx({0: 0.07, 1: 0.1})


def test_more_time_in_collectives_than_in_the_step_leaves_little_of_ones_own():
    waits = {rank: summary({9: s}, Measure.IN_COLLECTIVES) for rank, s in enumerate((0.4, 0.01))}

    assert own_by_step(waits)[9][0] == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("own_s", "gain"), [(1.0, 0.25), (0.8, 0.0), (0.5, 0.0), (100.0, 0.25)], ids=str
)
def test_the_job_without_a_slow_rank_is_faster_by_what_the_others_wait(own_s, gain):
    assert gain_without(1.0, own_s, 0.8) == pytest.approx(gain)


@pytest.mark.parametrize(
    "body", [None, 7, {}, {"ranks": 7}, {"ranks": {"x": 7, "1": {"steps": "?"}, "2": {}}}]
)
def test_what_nobody_can_read_of_own_times_slows_no_node(body):
    assert slowdowns_of({"n1": body}) == {}


def test_a_node_is_as_slow_as_its_slowest_rank_beside_those_of_its_role():
    def body(**own_s):
        made = {rank[1:]: dict.fromkeys(range(16), value) for rank, value in own_s.items()}
        return {
            "ranks": {rank: {"steps": pack_summary(steps_of(own))} for rank, own in made.items()}
        }

    found = slowdowns_of({"n1": body(r0=1.0, r1=1.0), "n2": body(r2=1.5, r3=1.0)})

    assert found == {"n1": pytest.approx(1.0), "n2": pytest.approx(1.5)}
    assert slowdowns_of({"n1": body(r0=1.0, r1=2.0)}) == {}, "of two nobody can say which"
