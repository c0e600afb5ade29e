"""Who is slower than its equals: planted slow ranks, healthy fleets, and what must name nobody."""

import math
import random

import pytest

from gpuops.detect.slow_rank import SlowRankDetector, _medians_of_others

ONSET = 40


def steps_of(seed, n_ranks, n_steps, *, noise=0.01, slow=None):
    """Yield own times of *n_ranks*; those in *slow* (rank to factor) are slow from `ONSET` on."""
    draw = random.Random(seed)
    for number in range(n_steps):
        factors = (slow or {}) if number >= ONSET else {}
        yield {rank: 0.1 * draw.gauss(1, noise) * factors.get(rank, 1.0) for rank in range(n_ranks)}


def named(steps, groups):
    """Return which ranks are named, and after how many steps each first was."""
    detector, found = SlowRankDetector(groups), {}
    for number, own in enumerate(steps):
        for item in detector.feed(own):
            found.setdefault(item.rank, number)
    return found


ALIKE = dict.fromkeys(range(8), "all")


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_is_a_tenth_slower_is_named_within_15_steps_and_nobody_else(seed):
    found = named(steps_of(seed, 8, ONSET + 16, slow={3: 1.1}), ALIKE)

    assert found.keys() == {3}
    assert ONSET < found[3] <= ONSET + 15


def test_where_steps_differ_by_a_tenth_a_longer_look_finds_one_half_slower():
    found = named(steps_of(1, 8, ONSET + 40, noise=0.1, slow={3: 1.5}), ALIKE)

    assert found.keys() == {3}


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03, 0.1])
def test_of_a_healthy_fleet_nobody_is_named(noise):
    assert named(steps_of(2, 32, 400, noise=noise), dict.fromkeys(range(32), "all")) == {}


@pytest.mark.parametrize(
    ("n_ranks", "slow", "groups"),
    [
        (2, {1: 2.0}, dict.fromkeys(range(2), "all")),
        (8, dict.fromkeys(range(8), 1.5), ALIKE),
        (8, dict.fromkeys(range(4, 8), 1.5), {rank: rank // 4 for rank in range(8)}),
    ],
    ids=["one of two", "all of them", "a whole stage"],
)
def test_where_nobody_is_slower_than_its_equals_nobody_is_named(n_ranks, slow, groups):
    assert named(steps_of(3, n_ranks, ONSET + 40, slow=slow), groups) == {}


@pytest.mark.parametrize(("noise", "n_steps"), [(0.01, 14), (0.1, 34)])
def test_it_says_after_how_many_steps_a_rank_would_have_been_named(noise, n_steps):
    detector = SlowRankDetector(ALIKE)
    for own in steps_of(9, 8, n_steps - 1, noise=noise):
        detector.feed(own)
    assert not any(map(detector.is_compared, range(8)))

    detector.feed(dict.fromkeys(range(8), 0.1))
    assert all(map(detector.is_compared, range(8)))


def test_two_slow_ranks_of_eight_are_both_named():
    assert named(steps_of(4, 8, ONSET + 30, slow={2: 1.2, 5: 1.4}), ALIKE).keys() == {2, 5}


def test_a_rank_that_has_recovered_is_named_no_more():
    detector = SlowRankDetector(ALIKE)
    for own in steps_of(5, 8, ONSET + 20, slow={3: 1.2}):
        during = detector.feed(own)
    for own in steps_of(6, 8, 30):
        after = detector.feed(own)

    assert [item.rank for item in during] == [3]
    assert during[0].ratio == pytest.approx(1.2, rel=0.02)
    assert (during[0].n_peers, after) == (7, ())


def test_what_was_not_measured_counts_for_nobody():
    bad = [0.0, math.nan] * 20
    steps = [{**own, 5: seconds} for own, seconds in zip(steps_of(7, 6, 40), bad, strict=True)]

    assert named(steps, ALIKE) == {}


def test_the_median_of_the_others_is_that_without_the_rank_itself():
    draw = random.Random(8)
    for count in (2, 3, 4, 5, 10):
        values = {rank: draw.choice([1.0, 2.0, draw.random()]) for rank in range(count)}
        for rank, found in _medians_of_others(values).items():
            others = sorted(value for other, value in values.items() if other != rank)
            middle = others[(count - 2) // 2], others[(count - 1) // 2]
            assert found == pytest.approx(sum(middle) / 2)
