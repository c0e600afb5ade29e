"""The scorecard of slow ranks, in a small form: it fails where the detector gets worse."""

import pytest
from support.slow_rank_scores import false_alarms, nvrx, ours, score, wilson

SEED = 500


@pytest.mark.parametrize(
    ("factor", "noise", "within", "recall"),
    [
        (1.10, (0.002, 0.01), 15, 1.0),
        (1.05, (0.002, 0.01), 30, 0.9),
        (1.20, (0.10, 0.15), 40, 0.75),
    ],
)
def test_a_slow_rank_is_found_in_time_and_nobody_else(factor, noise, within, recall):
    found = score(ours, factor=factor, noise=noise, within=within, n=20, seed=SEED)

    assert found.recall >= recall
    assert found.wrong == 0


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.12])
def test_in_healthy_jobs_nobody_is_named(noise):
    named, hours = false_alarms(ours, noise=noise, n=1, seed=SEED)

    assert named == 0
    assert hours > 300


def test_the_rule_of_a_peer_sees_a_third_and_no_tenth():
    kept = {"noise": (0.002, 0.01), "within": 15, "n": 10, "seed": SEED}

    assert score(nvrx, factor=1.1, **kept).recall == 0
    assert score(nvrx, factor=1.5, **kept).recall == 1


def test_the_interval_of_a_share():
    assert wilson(300, 300) == (pytest.approx(0.9874, abs=1e-4), pytest.approx(1.0))
    assert wilson(5, 10) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
