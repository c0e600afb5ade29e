"""Lines of traces of steps: what is read of them, and what is refused."""

import json

import pytest

from gpuops.detect.step_trace import SCHEMA, Published, StepTrace

HEAD = {"schema": SCHEMA, "generation": 2, "node": "n1", "ranks": [0, 1], "slow_after_s": 30.0}
PUBLISHED = {"monitor": "straggler", "time_us": 10, "published": {"ranks": {}}}


def read(*files):
    trace = StepTrace()
    for lines in files:
        trace.read(json.dumps(line) for line in lines)
    return trace


def test_steps_are_counted_and_what_is_published_has_its_node_and_generation():
    step = {"rank": 0, "step": 1, "time_us": 5, "data_us": 3}
    other = {**PUBLISHED, "monitor": "links", "published": None}
    trace = read(
        [HEAD, step, PUBLISHED, step, other],
        [{**HEAD, "node": "n2", "ranks": [2]}, PUBLISHED],
        [],
    )

    assert (trace.ranks, trace.n_steps, trace.slow_after_s) == ({0, 1, 2}, 2, 30.0)
    assert trace.published == [
        Published(2, 10, "n1", {"ranks": {}}),
        Published(2, 10, "n2", {"ranks": {}}),
    ]


def test_a_file_may_go_on_with_another_generation():
    trace = read([HEAD, PUBLISHED, {**HEAD, "generation": 3}, PUBLISHED])

    assert [item.generation for item in trace.published] == [2, 3]


@pytest.mark.parametrize(
    "lines",
    [
        ["{"],
        ["[]"],
        ["7"],
        ['{"rank": 0, "step": 1}'],
        [json.dumps({**HEAD, "schema": "gpuops.step-trace/9"})],
        [json.dumps({**HEAD, "ranks": 3})],
        [json.dumps({**HEAD, "slow_after_s": "soon"})],
        [json.dumps(HEAD), "null"],
        [json.dumps(HEAD), json.dumps({**PUBLISHED, "published": 3})],
        [json.dumps(HEAD), json.dumps({**PUBLISHED, "time_us": None})],
        [json.dumps(HEAD), "[" * 100_000],
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(lines):
    with pytest.raises(ValueError, match=rf"line {len(lines)} is none of a trace of steps"):
        StepTrace().read(lines)
