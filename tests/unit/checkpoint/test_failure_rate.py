"""The rate of failures that saving goes by, with known figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.plan.failure_rate import FAILURES_VARIABLE, FailureRate, poisson_bounds
from gpuops.plan.interval import failures_per_hour


@pytest.mark.parametrize(
    ("n", "low", "high"),
    # Garwood's table, as in any table of the chi-squared distribution.
    [
        (0, 0, 3.6889),
        (1, 0.0253, 5.5716),
        (3, 0.6187, 8.7673),
        (10, 4.7954, 18.3904),
        (50, 37.1110, 65.9188),
        (100, 81.3640, 121.6268),
    ],
)
def test_the_bounds_are_those_of_the_tables(n, low, high):
    assert poisson_bounds(n) == pytest.approx((low, high), abs=6e-5)


def test_no_failure_is_less_than_three_at_95_percent():
    assert poisson_bounds(0, confidence=0.9)[1] == pytest.approx(-math.log(0.05))


def test_the_approximation_continues_where_the_sum_ends():
    exact, near = poisson_bounds(100), poisson_bounds(101)
    assert near[0] - exact[0] == pytest.approx(1, abs=0.11)
    assert near[1] - exact[1] == pytest.approx(1, abs=0.11)
    assert poisson_bounds(10**9)[0] == pytest.approx(10**9, rel=1e-4)


@given(st.integers(0, 3000))
def test_bounds_enclose_the_count_and_grow_with_it(n):
    low, high = poisson_bounds(n)
    assert low <= n < high
    assert poisson_bounds(n + 1) > (low, high)


def test_no_count_is_below_zero():
    with pytest.raises(ValueError, match="-1"):
        poisson_bounds(-1)


def test_without_a_record_it_is_the_published_rate():
    rate = FailureRate()
    assert rate.per_1000_node_days == pytest.approx(6.5)
    assert rate.bounds is None
    assert rate.source == "published"
    assert "6.5 failures per 1000 node days" in rate.describe()
    assert rate.per_hour(1000) == pytest.approx(failures_per_hour(1000))


def test_a_record_draws_the_rate_to_itself():
    # 3 failures in 1000 node days, and one in 1000 / 6.5 of the prior.
    rate = FailureRate(3, 24_000.0)
    assert rate.per_1000_node_days == pytest.approx(4 / (1 + 1 / 6.5))
    assert rate.bounds == pytest.approx((0.6187, 8.7673), abs=6e-5)
    assert rate.source == "store"
    assert "3 in 1e+03 node days" in rate.describe()
    assert FailureRate(300, 2_400_000.0).per_1000_node_days == pytest.approx(3, rel=0.01)
    assert FailureRate(0, 2_400_000.0).per_1000_node_days < 0.01


def test_an_hour_of_a_demo_that_fails_does_not_decide_alone():
    assert FailureRate(3, 1.0).per_1000_node_days == pytest.approx(4 * 6.5, rel=0.001)


@given(st.integers(0, 10**9), st.floats(0, 1e12))
def test_what_an_agent_tells_is_what_a_worker_hears(n_failures, node_hours):
    told = {FAILURES_VARIABLE: FailureRate(n_failures, node_hours).to_text()}
    heard = FailureRate.from_env(told)
    assert heard.n_failures == n_failures
    assert heard.node_hours == pytest.approx(node_hours, abs=1e-6)


@pytest.mark.parametrize("text", ["", "3", "3/", "-1/5", "1/-5", "nan/1", "1/inf", "9" * 99 + "/1"])
def test_what_is_no_record_is_none(text):
    assert FailureRate.from_env({FAILURES_VARIABLE: text}) == FailureRate()
    assert FailureRate.from_env({}) == FailureRate()


@pytest.mark.parametrize("record", [(-1, 0.0), (0, -1.0), (0, math.nan), (1, math.inf)])
def test_there_is_no_record_of_less_than_nothing(record):
    with pytest.raises(ValueError, match="node hours"):
        FailureRate(*record)


def test_the_bounds_have_the_unit_of_the_rate():
    found = FailureRate(3, 24_000.0).as_dict()  # in 1000 node days

    assert found["low_per_1000_node_days"] == pytest.approx(0.6187, abs=6e-5)
    assert found["high_per_1000_node_days"] == pytest.approx(8.7673, abs=6e-5)
    assert found["low_per_1000_node_days"] < found["per_1000_node_days"]
    assert found["per_1000_node_days"] < found["high_per_1000_node_days"]
