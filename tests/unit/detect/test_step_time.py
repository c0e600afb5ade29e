"""When the steps of a job became slower for good, and what is no such change."""

import random

import pytest

from gpuops.detect.step_time import REFERENCE_MIN, StepTimeWatch

ONSET = 60


def rises(times):
    """Return after which steps an alarm is raised, with it."""
    watch = StepTimeWatch()
    return {n: rise for n, s in enumerate(times) if (rise := watch.feed(s)) is not None}


def times(n_steps, *, noise=0.01, factor=1.0, seed=1, odd=lambda n: 1.0):
    draw = random.Random(seed)
    for n in range(n_steps):
        yield 0.2 * draw.gauss(1, noise) * odd(n) * (factor if n >= ONSET else 1.0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("factor", [1.12, 1.2, 2.0])
def test_a_rise_is_found_within_a_few_steps_once(factor, seed):
    found = rises(times(ONSET + 100, factor=factor, seed=seed))

    (at,) = found
    assert ONSET < at <= ONSET + 6
    assert found[at].since_s / found[at].before_s == pytest.approx(factor, rel=0.04)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "odd",
    [
        lambda n: 1.0,
        lambda n: 1.6 if n % 100 == 99 else 1.0,
        lambda n: 40.0 if n % 50 == 49 else 1.0,
        lambda n: 1.04 if n > ONSET else 1.0,
        lambda n: 0.5 if n > ONSET else 1.0,
    ],
    ids=["steady", "planned pauses", "evaluations", "a little slower", "faster"],
)
def test_no_rise_is_none(odd, seed):
    assert rises(times(1000, odd=odd, seed=seed)) == {}


def test_after_a_rise_the_new_time_is_the_reference():
    again = [*times(ONSET + 60, factor=1.5), *(0.5 for _ in range(10))]

    assert len(rises(again)) == 2


def test_the_first_steps_are_no_rise():
    warming = [3.0 - n / 10 for n in range(REFERENCE_MIN - 1)]

    assert rises([*warming, *(0.2 for _ in range(200))]) == {}


def test_what_is_no_time_counts_for_nothing():
    found = rises([*(0.1 for _ in range(40)), float("nan"), 0.0, -1.0, *(0.2 for _ in range(9))])

    assert list(found) == [45]
