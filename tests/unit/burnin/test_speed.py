"""Which pair tests are slow: against the fleet's median and a floor, and never without a rate."""

import math
import random

import pytest

from gpuops.burnin.pairs import PairOutcome, PairTest, node_pair
from gpuops.burnin.schedule import first_rounds
from gpuops.burnin.speed import speed_limits, with_speed


def measured(rates, **fields):
    """Return tests with the rates of *rates*, by pair: ``{"a b": 400.0}``."""
    return [
        PairTest(nodes=node_pair(*pair.split()), outcome=PairOutcome.PASS, value=rate, **fields)
        for pair, rate in rates.items()
    ]


def slow(tests, **kwargs):
    limits = speed_limits(tests, **kwargs)
    judged = [with_speed(test, limits, kwargs.get("domains")) for test in tests]
    return {" ".join(test.nodes) for test in judged if test.outcome is PairOutcome.SLOW}


def fleet(n, slow_nodes, *, share, noise, seed):
    """Return the tests of the first rounds of *n* nodes; slow ones have *share* of the rate."""
    rng = random.Random(seed)
    nodes = [f"n{i:03}" for i in range(n)]
    return [
        PairTest(
            nodes=pair,
            outcome=PairOutcome.PASS,
            value=rng.gauss(400, 400 * noise) * (share if set(nodes[:slow_nodes]) & {*pair} else 1),
        )
        for one in first_rounds(nodes, seed=seed)
        for pair in one.pairs
    ]


@pytest.mark.parametrize(("n", "slow_nodes"), [(4, 1), (5, 1), (6, 2), (8, 2), (17, 2), (64, 6)])
def test_pairs_of_slow_nodes_are_slow_and_no_others(n, slow_nodes):
    for seed in range(10):
        tests = fleet(n, slow_nodes, share=0.75, noise=0.01, seed=seed)
        bad = {f"n{i:03}" for i in range(slow_nodes)}

        assert slow(tests) == {" ".join(test.nodes) for test in tests if bad & {*test.nodes}}


def test_a_noisy_fleet_has_a_wider_limit():
    found = [len(slow(fleet(256, 0, share=1, noise=0.03, seed=seed))) for seed in range(10)]

    assert sum(found) / (10 * 256) < 0.01  # 5 % alone would be 1.7 sigma: 5 % of the pairs


def test_the_limit_is_5_percent_below_the_median_of_a_quiet_fleet():
    rates = {"a b": 100.0, "a c": 100.0, "b d": 100.0, "c d": 95.0, "b c": 94.9}

    assert slow(measured(rates)) == {"b c"}
    limit = speed_limits(measured(rates))[None]
    assert limit.low == pytest.approx(95)
    assert "median of 5 pairs: 100" in limit.text
    assert "stas00" in limit.source


def test_two_pairs_have_no_median_that_means_anything():
    assert slow(measured({"a b": 100.0, "c d": 50.0})) == set()


def test_a_site_may_say_how_far_below_the_median_is_slow():
    rates = {"a b": 100.0, "a c": 60.0, "b c": 140.0, "a d": 1.0, "b d": 2.0, "c d": 12.0}

    assert slow(measured(rates), slow_percent=90) == {"a d", "b d"}
    assert speed_limits(measured(rates), slow_percent=90)[None].low == pytest.approx(8)


def test_pairs_across_leaves_are_held_against_each_other():
    leaves = {node: node[0] for node in ("a1", "a2", "a3", "b1", "b2", "b3")}
    near = {"a1 a2": 400.0, "a2 a3": 400.0, "b1 b2": 400.0, "b2 b3": 300.0}
    far = {"a1 b1": 200.0, "a2 b2": 200.0, "a3 b3": 200.0, "a1 b3": 150.0}
    tests = measured({**near, **far})

    assert slow(tests, domains=leaves) == {"b2 b3", "a1 b3"}
    # Too few of one kind: those are held against all.
    assert slow(measured({**near, "a1 b1": 200.0}), domains=leaves) == {"b2 b3", "a1 b1"}


@pytest.mark.parametrize("rate", [0.0, math.nan, math.inf, -1.0, None])
def test_what_did_not_measure_is_unknown_and_moves_no_median(rate):
    tests = measured({"a b": 100.0, "a c": 100.0, "b c": 100.0, "c d": rate, "a d": rate})
    limits = speed_limits(tests)

    assert with_speed(tests[3], limits).outcome is PairOutcome.UNKNOWN
    assert limits[None].low == pytest.approx(95)


@pytest.mark.parametrize("outcome", [PairOutcome.TIMEOUT, PairOutcome.FAIL])
def test_what_failed_stays_failed(outcome):
    test = PairTest(nodes=("a", "b"), outcome=outcome)

    assert with_speed(test, {}) == test
