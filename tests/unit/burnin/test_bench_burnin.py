"""What `bench_burnin` makes of its measurements."""

import json

from bench_burnin import goals, measured, table


def test_each_row_has_its_goal_and_the_missed_one_says_so():
    rows = {
        "gemm, fp32, 1024": {"ratios": [0.97, 0.99, 1.01], "load": 1.0},
        "copy, 128 MiB": {"ratios": [0.9, 0.97, 1.01], "load": 1.0},
        "sweep": {"ratios": [1.4], "load": 2.5},
    }
    lines = [line.split(maxsplit=1)[1] for line in table(goals(rows))]
    assert [line.endswith("MISSED") for line in lines] == [False, True, False]
    assert ">= 0.98 x  0.990 x (0.970 to 1.010), load 1" in lines[0]
    assert "<= 1.5 x  1.400 x (1.400 to 1.400), load 2.5" in lines[2]


def test_a_rate_is_the_median_of_the_measurement_that_was_asked_for():
    lines = [
        {"parameters": {"kernel": "triad"}, "values": [9.0]},
        {"parameters": {"kernel": "copy"}, "values": [1.0, 4.0, 2.0]},
        {"parameters": "dtype=fp32", "digest": "aa"},
    ]
    assert measured("\n".join(map(json.dumps, lines)), kernel="copy") == 2.0
