"""Limits, and the list of checks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checks import NAMES, check_named
from gpuops.checks.core.check import CheckLimit
from gpuops.checks.core.suite import load_suite, suite_paths
from gpuops.errors import ConfigError
from gpuops.model import Status
from gpuops.resources import data_dir

SUITES = [data_dir("checks") / "suites"]
numbers = st.floats(-1e9, 1e9)


@given(numbers, numbers, numbers)
def test_a_floor_and_a_ceiling_are_mirrors(value, warn, fail):
    limit = CheckLimit(source="x", warn=warn, fail=fail)
    mirror = CheckLimit(source="x", warn=-warn, fail=-fail)

    assert limit.floor(value) is mirror.ceiling(-value)


def test_a_limit_that_is_not_given_is_not_applied():
    assert CheckLimit(source="x", warn=1).ceiling(1e9) is Status.WARN
    assert CheckLimit(source="x", fail=9).ceiling(8) is Status.PASS


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (CheckLimit(source="x", warn=5), "> 5 %"),
        (CheckLimit(source="x", fail=5), "> 5 %"),
        (CheckLimit(source="x", warn=5, fail=0.5), "> 5 % (fail: 0.5 %)"),
    ],
)
def test_a_limit_says_what_is_wanted(limit, text):
    assert limit.text(">", "%") == text


def test_a_limit_without_numbers_or_without_a_source_is_refused():
    with pytest.raises(ConfigError, match="neither warn nor fail"):
        CheckLimit(source="x")
    with pytest.raises(ConfigError, match="source"):
        CheckLimit(source=" ", warn=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_check_has_the_name_of_its_module(name):
    check = check_named(name)

    assert check.name == name
    assert check.about


@pytest.mark.parametrize("suite", sorted(suite_paths(SUITES)))
def test_every_shipped_suite_runs_checks_that_there_are_and_the_full_one_all(suite):
    loaded = load_suite(suite, SUITES)

    assert set(loaded.names) <= set(NAMES)
    assert suite != "full" or loaded.names == NAMES
    assert suite in {"full", "health", "diag"} or "dcgm_diag" not in loaded.names
    assert loaded.about
    assert "timeout" not in loaded.unknown


def test_checks_that_share_a_probe_share_the_very_same_one():
    probes = {}
    for name in NAMES:
        probe = check_named(name).probe
        assert probes.setdefault(probe.name, probe) is probe
