"""How often to save: published figures, the equations themselves, and failures thrown by dice."""

import math
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuops.plan.interval import (
    INTERVAL_S_MAX,
    TierCost,
    daly,
    failures_per_hour,
    mtbf_of_nodes,
    one_plus_lambert_w,
    optimum,
    steps_between_saves,
    two_tiers,
    wall_time,
    waste,
    young,
)

MINUTE = 60.0
HOUR = 3600.0
COSTS = st.floats(1e-3, 1e4)
MTBFS = st.floats(1.0, 1e9)


@pytest.mark.parametrize(
    ("cost_min", "mtbf_min", "young_min", "daly_min"),
    [
        (5, 108, 32.863, 29.615),
        (1, 185.4, 19.256, 18.595),
        (0.17, 108, 6.06, 5.947),
        (5, 474, 68.848, 65.555),
        (5, 24 * 60, 120.0, 116.69),
        (5, 6 * 60, 60.0, 56.71),
        (5, 15, 12.247, 9.14),
    ],
)
def test_young_and_daly_as_published(cost_min, mtbf_min, young_min, daly_min):
    assert young(cost_min * MINUTE, mtbf_min * MINUTE) / MINUTE == pytest.approx(young_min, 1e-3)
    assert daly(cost_min * MINUTE, mtbf_min * MINUTE) / MINUTE == pytest.approx(daly_min, 1e-3)


# Daly's figures 3 to 5 show 117, 57 and 9.1 minutes for a cost of 5 minutes.
@pytest.mark.parametrize(("mtbf_min", "best_min"), [(1440, 116.690), (360, 56.714), (15, 9.1665)])
def test_the_exact_optimum(mtbf_min, best_min):
    assert optimum(5 * MINUTE, mtbf_min * MINUTE) / MINUTE == pytest.approx(best_min, 1e-4)


def test_daly_gives_the_time_between_failures_where_a_save_takes_twice_that():
    assert daly(30, 15) == daly(1000, 15) == 15
    assert daly(29.999, 15) == pytest.approx(15, rel=0.2)


@given(st.floats(1e-12, 700))
def test_one_plus_w_solves_the_equation_of_w(x):
    u = one_plus_lambert_w(x)

    assert 0 < u <= 1
    # W e^W = -e^(-1-x), with W = u - 1, in logarithms: log(1 - u) + u = -x.
    if u < 1:
        residual = -u - math.log1p(-u) - x
        slope = u / (1 - u)
        assert abs(residual) <= 4e-16 * (1 + abs(math.log1p(-u))) + 1e-14 * u * slope


@given(st.floats(-14, -10).map(lambda exponent: 10**exponent) | st.floats(1e-300, 1e-14))
def test_one_plus_w_keeps_its_precision_at_the_branch_point(x):
    # 1 + W(z) = p - p^2/3 + 11/72 p^3 - ..., p = sqrt(2 (e z + 1)) (Corless et al., 1996, 4.22).
    p = math.sqrt(-2 * math.expm1(-x))
    expected = p - p * p / 3 + 11 / 72 * p**3

    assert one_plus_lambert_w(x) == pytest.approx(expected, rel=4e-15, abs=0)


@given(COSTS, MTBFS)
def test_the_exact_optimum_is_one_and_the_others_are_near(cost_s, mtbf_s):
    assume(1e-7 < cost_s / mtbf_s < 100)
    best = optimum(cost_s, mtbf_s)
    least = waste(best, cost_s, 0, mtbf_s)

    assert 0 < best <= min(young(cost_s, mtbf_s), mtbf_s)
    for factor in (0.5, 0.9, 1.1, 2):
        assert waste(best * factor, cost_s, 0, mtbf_s) >= least
    if cost_s < mtbf_s / 2:
        assert daly(cost_s, mtbf_s) == pytest.approx(best, rel=0.01)


# The share of the time that is work; the interval, the restart and the save in minutes.
@pytest.mark.parametrize(
    ("nodes", "rate", "interval", "restart", "save", "worked"),
    [
        (2000, 6.5, 60, 5, 0, 0.7202),
        (2000, 6.5, 5, 5, 0, 0.9345),
        (1000, 6.5, 30, 6, 0, 0.9089),
        (1000, 6.5, 60, 5, 0, 0.8513),
        (256, 6.5, 60, 5, 0, 0.9602),
        (512, 6.5, 60, 5, 0, 0.9216),
        (12500, 2.34, 2, 2, 0, 0.9408),
        (1500, 6.5, 38.43, 5, 5, 0.7358),
    ],
)
def test_the_share_of_work_that_arxiv_2410_21680_expects(
    nodes, rate, interval, restart, save, worked
):
    mtbf_s = mtbf_of_nodes(nodes, rate)
    lost = waste(interval * MINUTE, save * MINUTE, restart * MINUTE, mtbf_s)

    assert 1 - lost == pytest.approx(worked, abs=1e-4)
    assert wall_time(1000, interval * MINUTE, save * MINUTE, restart * MINUTE, mtbf_s) == (
        pytest.approx(1000 / worked, rel=2e-4)
    )


@pytest.mark.parametrize(
    ("stall_s", "restart_s", "lost"), [(60, 900, 0.092), (2, 900, 0.042), (0.5, 60, 0.0079)]
)
def test_beside_a_slow_restart_the_stall_is_small(stall_s, restart_s, lost):
    mtbf_s = 8 * HOUR

    assert waste(optimum(stall_s, mtbf_s), stall_s, restart_s, mtbf_s) == pytest.approx(lost, 0.01)


@pytest.mark.parametrize(
    ("gpus", "rate", "hours"),
    [(16384, 6.5, 1.803), (131072, 6.5, 0.2254), (12000, 6.5, 2.462), (16384, 2.34, 5.008)],
)
def test_the_time_between_failures_of_a_job(gpus, rate, hours):
    assert mtbf_of_nodes(gpus // 8, rate) / HOUR == pytest.approx(hours, 1e-3)


def test_failures_that_never_come_or_never_stop():
    assert optimum(1, math.inf) == young(1, math.inf) == math.inf
    assert optimum(0, math.inf) == optimum(0, 100) == 0
    assert waste(10, 1, 60, math.inf) == pytest.approx(1 / 11)
    assert waste(math.inf, 1, 60, math.inf) == 0
    assert waste(math.inf, 1, 60, 100) == waste(1e9, 1, 60, 1) == waste(10, 1, 1e9, 1) == 1
    assert wall_time(1, 1e9, 1, 60, 1) == math.inf


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s"), [(-1, 10), (math.nan, 10), (math.inf, 10), (1, 0), (1, math.nan)]
)
def test_no_interval_for_what_is_no_time(cost_s, mtbf_s):
    for figure in (young, daly, optimum):
        with pytest.raises(ValueError, match="no interval for a cost"):
            figure(cost_s, mtbf_s)


def thrown(work_s, memory, persistent, mtbf_s, missed, dice):
    """Return the wall time of a run whose failures are thrown, saves and restarts one by one.

    *memory* and *persistent* are (interval, cost, restore): saves stand at their multiples of work.
    """
    now, done, saved = 0.0, 0.0, [0.0, 0.0]
    fails_at = dice.expovariate(1 / mtbf_s)
    tiers = (memory, persistent)
    while done < work_s:
        targets = [(int(done / tier[0] + 1e-9) + 1) * tier[0] for tier in tiers]
        target = min(targets)
        cost = sum(tier[1] for tier, at in zip(tiers, targets, strict=True) if at <= target + 1e-9)
        if now + target - done + cost <= fails_at:
            now += target - done + cost
            done = target
            saved = [
                target if at <= target + 1e-9 else old
                for at, old in zip(targets, saved, strict=True)
            ]
            continue
        while True:  # a failure, and those that come while it restarts
            now = fails_at
            fails_at = now + dice.expovariate(1 / mtbf_s)
            tier = int(dice.random() < missed)
            done = saved[tier]
            saved = [min(at, done) for at in saved]
            if now + tiers[tier][2] < fails_at:
                now += tiers[tier][2]
                break
    return now


def test_one_tier_s_waste_is_what_dice_say():
    work_s, mtbf_s = 4000 * HOUR, HOUR
    best = optimum(30, mtbf_s)
    now = thrown(work_s, (best, 30, 120), (1e12, 0, 0), mtbf_s, 0, Random(1))

    assert now / work_s == pytest.approx(wall_time(1, best, 30, 120, mtbf_s), rel=0.01)


@pytest.mark.parametrize("missed", [0.02, 0.2, 0.5])
def test_two_tiers_waste_is_what_dice_say_and_their_intervals_are_best(missed):
    work_s, mtbf_s = 1500 * HOUR, HOUR
    costs = TierCost(5, 0, 60), TierCost(30, 0, 240)
    found = two_tiers(*costs, mtbf_s, missed)

    def wall(scale_memory, scale_persistent):
        tiers = (
            (found.memory.interval_s * scale_memory, 5, 60),
            (found.persistent.interval_s * scale_persistent, 30, 240),
        )
        return thrown(work_s, *tiers, mtbf_s, missed, Random(2))

    best = wall(1, 1)

    assert 1 - work_s / best == pytest.approx(found.waste, rel=0.06)
    assert best < min(wall(4, 1), wall(1, 4), wall(0.25, 1), wall(1, 0.25))


def test_a_tier_that_serves_no_failure_has_no_interval():
    costs = TierCost(1, 0, 60), TierCost(10, 0, 90)

    assert two_tiers(*costs, HOUR, 0).persistent is None
    assert two_tiers(*costs, HOUR, 1).memory is None
    assert two_tiers(*costs, HOUR, 1).waste == waste(optimum(10, HOUR), 10, 90, HOUR)


def test_an_interval_is_never_below_a_step_or_what_a_save_is_busy_for():
    persistent = TierCost(0.1, 300, 90)
    found = two_tiers(TierCost(0.001, 9, 60), persistent, HOUR, 0.5, step_s=12)

    assert found.memory.optimum_s < 9
    assert found.memory.interval_s == 12
    assert found.persistent.interval_s == 300
    assert found.persistent.waste == waste(300, 0.1, 390, 2 * HOUR)


@pytest.mark.parametrize("missed", [-0.1, 1.1, math.nan])
def test_what_is_no_share_is_refused(missed):
    with pytest.raises(ValueError, match="share"):
        two_tiers(TierCost(1, 0, 60), TierCost(1, 0, 60), HOUR, missed)


def test_the_rate_of_failures_begins_at_the_published_one_and_follows_the_history():
    published = failures_per_hour(100)

    assert published == pytest.approx(HOUR / mtbf_of_nodes(100))
    assert published == pytest.approx(100 * 6.5 / 24_000)
    assert failures_per_hour(100, 0, 1e5) < published / 10
    assert failures_per_hour(100, 1000, 1e5) == pytest.approx(1, rel=0.04)
    assert failures_per_hour(200, 7, 1e4) == pytest.approx(2 * failures_per_hour(100, 7, 1e4))


@pytest.mark.parametrize(("nodes", "failures", "hours"), [(0, 0, 0), (1, -1, 0), (1, 0, math.inf)])
def test_no_rate_of_failures_without_nodes_or_of_an_impossible_history(nodes, failures, hours):
    with pytest.raises(ValueError, match="failures"):
        failures_per_hour(nodes, failures, hours)


@given(
    st.floats(0, 60), st.floats(0, 3600), st.floats(0, 100), st.floats(1e-3, 600), st.floats(1, 1e4)
)
def test_auto_is_bounded_and_within_its_margin_of_the_least(stall, restore, rate, step, most):
    steps = steps_between_saves(stall, restore, rate, step, interval_s_max=most)

    assert steps >= 1
    assert steps == 1 or steps * step <= most * (1 + 1e-9)
    if rate:
        at = [
            waste(n * step, max(stall, 1e-3), restore, HOUR / rate)
            for n in (max(1, steps // 2), steps, max(1, int(most / step)))
        ]
        assert at[1] <= min(at) * 1.0101 + 1e-12


def test_auto_is_near_the_optimum_and_takes_a_slow_restore_into_account():
    fast, slow = (steps_between_saves(0.5, restore, 1 / 8, 1) for restore in (0, 900))

    assert optimum(0.5, 8 * HOUR) < fast < 1.2 * optimum(0.5, 8 * HOUR)
    assert slow > fast
    assert steps_between_saves(0.5, 60, 1 / 8, 1000) == 1
    assert steps_between_saves(0, 0, 1000, 0.5) == 1
    assert steps_between_saves(0.5, 60, 0, 2) == INTERVAL_S_MAX / 2


@pytest.mark.parametrize(
    "wrong", [(-1, 1, 1, 1), (1, math.nan, 1, 1), (1, 1, math.inf, 1), (1, 1, 1, 0)]
)
def test_auto_refuses_what_no_clock_measured(wrong):
    with pytest.raises(ValueError, match="no interval follows"):
        steps_between_saves(*wrong)
