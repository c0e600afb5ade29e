"""A limit in another unit would fail every node or none, so it is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from gpuops.checks.core.check import CheckLimit, check_units
from gpuops.checks.core.suite import load_suite
from gpuops.errors import ConfigError
from gpuops.resources import data_dir


@dataclass(frozen=True)
class Parameters:
    """A limit of each unit."""

    space_percent: CheckLimit | None = None
    used_percent: CheckLimit | None = None
    answer_s: CheckLimit | None = None
    application_minutes: CheckLimit | None = None
    used_bytes: CheckLimit | None = None
    off_w: CheckLimit | None = None
    margin_c: CheckLimit | None = None
    count: CheckLimit | None = None
    per_hour: Mapping[str, CheckLimit] = field(default_factory=dict)


def limit(number, *, fails=False):
    return CheckLimit(source="a test", **{"fail" if fails else "warn": number})


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("space_percent", 0, 100),
        ("used_percent", 0, 255),
        ("answer_s", 0, 3600),
        ("application_minutes", 0, 100_000),
        ("used_bytes", 1e3, 1e15),
        ("off_w", 0, 10_000),
        ("margin_c", -100, 200),
        ("count", 0, 1e15),
    ],
)
def test_a_limit_is_within_what_its_unit_can_be(name, low, high):
    for number in (low, high):
        check_units(Parameters(**{name: limit(number)}), "it")
    for number in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"warn of {name} of it: .* looks like another unit"):
            check_units(Parameters(**{name: limit(number)}), "it")


def test_a_limit_that_fails_and_each_of_a_table_are_looked_at_too():
    with pytest.raises(ConfigError, match="fail of space_percent of it: 150 looks like another"):
        check_units(Parameters(space_percent=limit(150, fails=True)), "it")
    with pytest.raises(ConfigError, match="warn of per_hour of it: -5 looks like another unit"):
        check_units(Parameters(per_hour={"a": limit(1), "b": limit(-5)}), "it")


def test_what_is_shipped_has_limits_that_can_be_meant():
    assert load_suite("full", [data_dir("checks") / "suites"]).planned


@pytest.mark.parametrize(
    ("value", "status"), [(6, "pass"), (5, "warn"), (4, "warn"), (3, "fail"), (2, "fail")]
)
def test_a_value_at_a_limit_is_beyond_it(value, status):
    assert CheckLimit(source="a test", warn=5, fail=3).floor(value).word == status
    assert CheckLimit(source="a test", warn=-5, fail=-3).ceiling(-value).word == status
