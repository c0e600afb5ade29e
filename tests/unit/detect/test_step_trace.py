"""Traces of steps: own times by what was published, and what is refused."""

import json

import pytest

from gpuops.detect.own_time import Measure, RankSteps
from gpuops.detect.step_summary import pack_summary
from gpuops.detect.step_trace import SCHEMA, StepTrace, TraceRank, read_trace


def head(generation=0, ranks=(0, 1, 2)):
    return {"schema": SCHEMA, "generation": generation, "node": "n1", "ranks": list(ranks)}


def published(time_us, seconds, role=7, measure=Measure.OWN):
    """Return the line in which ranks published *seconds* by step."""
    ranks = {
        str(rank): pack_summary(RankSteps(role=role, measure=measure, seconds=by_step, step_s=0.5))
        for rank, by_step in seconds.items()
    }
    return {"monitor": "straggler", "time_us": time_us, "published": {"ranks": ranks}}


def read(*files):
    traces = {}
    for lines in files:
        read_trace(map(json.dumps, lines), traces)
    return traces


def near(times):
    return {rank: pytest.approx(seconds, rel=0.01) for rank, seconds in times.items()}


def test_steps_count_once_all_nodes_have_published_them():
    one = [head(ranks=(0, 1)), published(10, {0: {5: 0.1, 6: 0.1}, 1: {5: 0.2, 6: 0.2}})]
    two = [head(ranks=(2,)), published(9, {2: {5: 0.3}}), published(20, {2: {5: 0.5, 6: 0.4}})]
    two.insert(1, {"rank": 2, "step": 5, "time_us": 8})

    for files in ((one, two), (two, one)):
        (trace,) = read(*files).values()
        assert trace.ranks == {0, 1, 2}
        own = trace.own_times()
        assert list(own) == [5, 6]
        # What is published of a step again is not counted again.
        assert own[5] == near({TraceRank(7, 0): 0.1, TraceRank(7, 1): 0.2, TraceRank(7, 2): 0.3})
        assert own[6] == near({TraceRank(7, 0): 0.1, TraceRank(7, 1): 0.2, TraceRank(7, 2): 0.4})


def test_ranks_of_another_role_are_not_waited_for_and_not_compared():
    lines = [published(1, {0: {1: 0.1}}, role=1), published(2, {1: {2: 0.2}}, role=2)]
    (trace,) = read([head(), *lines]).values()

    own = trace.own_times()
    assert {step: [rank.stage for rank in times] for step, times in own.items()} == {1: [1], 2: [2]}


def test_of_seconds_in_collectives_the_one_that_waits_least_takes_longest():
    line = published(1, {0: {1: 0.2}, 1: {1: 0.05}}, measure=Measure.IN_COLLECTIVES)
    (trace,) = read([head(), line]).values()

    own = trace.own_times()[1]
    assert own[TraceRank(7, 1)] > own[TraceRank(7, 0)]


def test_generations_are_apart_and_own_times_may_be_a_column():
    lines = [{"rank": rank, "step": 1, "own_us": 1000 * (1 + rank)} for rank in range(3)]
    traces = read([head(0), *lines, head(1), lines[0]])

    assert traces.keys() == {0, 1}
    assert sorted(traces[0].own_times()[1].values()) == pytest.approx([0.001, 0.002, 0.003])
    assert len(traces[1].own_times()[1]) == 1
    assert [str(rank) for rank in sorted(traces[1].own_times()[1])] == ["rank 0"]


def test_of_what_other_monitors_publish_nothing_is_read():
    (trace,) = read([head(), {"monitor": "links", "published": None, "time_us": 1}]).values()

    assert trace.own_times() == {}


@pytest.mark.parametrize(
    "lines",
    [
        ["{"],
        ["[]"],
        ["7"],
        ['{"rank": 0}'],
        [json.dumps({**head(), "schema": "gpuops.step-trace/9"})],
        [json.dumps({**head(), "ranks": 3})],
        [json.dumps(head()), '{"own_us": 1}'],
        [json.dumps(head()), '{"rank": 0, "step": 1, "own_us": "soon"}'],
        [json.dumps(head()), '{"monitor": "straggler", "published": {}, "time_us": 1}'],
        [json.dumps(head()), json.dumps(published(1, {}) | {"published": {"ranks": {"0": "?"}}})],
        [json.dumps(head()), "[" * 100_000],
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(lines):
    with pytest.raises(ValueError, match=rf"line {len(lines)} is none of a trace of steps"):
        read_trace(lines, {})


def test_no_lines_are_an_empty_trace():
    traces: dict[int, StepTrace] = {}
    read_trace([], traces)

    assert traces == {}
