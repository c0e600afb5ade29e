"""Tiers, --only and --duration: which tests, for how long; processors in groups."""

import pytest

from gpuops.burnin.plan import TESTS, TIERS, cpus_text, make_tests, split_cpus
from gpuops.config.burnin_schema import BURNIN_TIERS
from gpuops.errors import UsageError


@pytest.mark.parametrize("tier", TIERS)
def test_the_tests_of_a_tier_fill_its_time(tier):
    tests = make_tests(tier)

    assert sum(test.seconds for test in tests) == pytest.approx(TIERS[tier][0])
    assert {test.name for test in tests} <= set(TESTS)


def test_each_tier_can_be_set():
    assert tuple(TIERS) == BURNIN_TIERS


def test_a_longer_tier_has_every_test_of_a_shorter_one():
    names = [{test.name for test in make_tests(tier)} for tier in ("10m", "30m", "60m")]

    assert names[0] < names[1] <= names[2]


def test_a_duration_scales_all_tests():
    assert [test.seconds for test in make_tests("10m", (), 10)] == [4, 2, 1, 2, 1]


def test_only_takes_any_test_of_all_tiers():
    tests = make_tests("10m", ("patterns", "gemm"), 60)

    assert [test.name for test in tests] == ["gemm", "patterns"]
    assert sum(test.seconds for test in tests) == pytest.approx(60)


def test_what_is_not_installed_leaves_its_time_to_the_others_but_can_be_named():
    tests = make_tests("60m", absent=("tools", "dcgm"))

    assert {"tools", "dcgm"}.isdisjoint(test.name for test in tests)
    assert sum(test.seconds for test in tests) == pytest.approx(3600)
    assert [test.name for test in make_tests("60m", ("dcgm",), absent=("dcgm",))] == ["dcgm"]


def test_a_test_has_a_least_time_however_short_the_duration():
    assert min(test.seconds for test in make_tests("10m", (), 0.01)) == 0.2


@pytest.mark.parametrize(
    ("name", "text"),
    [("gem", "did you mean 'gemm'"), ("golden", "come with the corruption checks")],
)
def test_an_unknown_test_is_refused_with_a_hint(name, text):
    with pytest.raises(UsageError, match=text):
        make_tests("10m", (name,))


@pytest.mark.parametrize(
    ("cpus", "groups"),
    [
        ((0, 1), ((0,), (1,))),
        ((5,), ((5,),)),
        (range(16), tuple((2 * i, 2 * i + 1) for i in range(8))),
        (
            (0, 1, 2, 3, 8, 9, 10, 11, 12),
            ((0, 1), (2,), (3,), (8,), (9,), (10,), (11,), (12,)),
        ),
    ],
)
def test_processors_are_split_into_at_most_eight_equal_groups(cpus, groups):
    assert split_cpus(tuple(cpus)) == groups


def test_processors_as_text():
    assert cpus_text((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"
