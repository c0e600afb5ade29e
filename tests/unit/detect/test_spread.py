"""The spread of numbers of which some are far off."""

import random
import statistics

import pytest

from gpuops.detect.spread import robust_sigma


def test_it_is_the_standard_deviation_of_normal_values_also_with_some_far_off():
    draw = random.Random(1)
    values = [draw.gauss(10, 2) for _ in range(4000)]

    assert robust_sigma(values) == pytest.approx(statistics.stdev(values), rel=0.05)
    assert robust_sigma([*values, *[1e9] * 40]) == pytest.approx(2, rel=0.1)
    assert robust_sigma([3.0]) == 0
