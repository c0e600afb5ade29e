"""Suites from TOML: what they become, and what each mistake in one is answered with."""

import math
import re

import pytest

from gpuops.checks.core.profile import NumberExpectation
from gpuops.checks.core.suite import load_suite, parse_suite
from gpuops.errors import ConfigError, UsageError
from gpuops.model import Status, UnknownReason
from gpuops.resources import data_dir

SHIPPED = data_dir("checks") / "suites"
MEMORY = {
    "name": "memory",
    "timeout_s": 3,
    "available_percent": {"warn": 10, "source": "a test"},
}

OWN = """
deadline_s = 1
[[check]]
name = "processes"
timeout_s = 1
zombies = { warn = 100, source = "a test" }
"""


@pytest.fixture
def site(tmp_path):
    def write(text, name="site"):
        (tmp_path / f"{name}.toml").write_text(text)
        return [SHIPPED, tmp_path]

    return write


def parsed(path, **table):
    return parse_suite("site", {"deadline_s": 5, "check": [MEMORY], **table}, path)


def test_a_suite_is_what_its_file_says(tmp_path):
    suite = parsed(tmp_path, unknown={"crash": "warn"})

    assert (suite.names, suite.deadline_s) == (("memory",), 5.0)
    assert suite.planned[0].parameters.available_percent.warn == 10
    assert suite.unknown == {UnknownReason.CRASH: Status.WARN}


def test_a_sites_suite_replaces_the_shipped_one_of_its_name(site):
    suite = load_suite("prolog", site(OWN, name="prolog"))

    assert (suite.deadline_s, suite.names) == (1.0, ("processes",))


def test_an_unknown_suite_lists_those_there_are():
    with pytest.raises(UsageError) as caught:
        load_suite("prolgo", [SHIPPED])

    expected = "there is no suite 'prolgo'; did you mean 'prolog'? (there is: default,"
    assert str(caught.value).startswith(expected)


def test_a_malformed_file_is_named_with_the_place_of_the_mistake(site):
    with pytest.raises(ConfigError, match=r"site\.toml as TOML: .*line 1"):
        load_suite("site", site("deadline_s = = 3"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deadlines": 3}, "unknown key 'deadlines'; did you mean 'deadline_s'"),
        ({"deadline_s": 0}, "deadline_s of .* must be seconds up to 3600, got 0"),
        ({"deadline_s": "8s"}, "must be seconds up to 3600, got '8s'"),
        ({"deadline_s": True}, "must be seconds up to 3600, got True"),
        ({"check": {"name": "memory"}}, r"written as \[\[check\]\] tables"),
        ({"check": [MEMORY, MEMORY]}, "runs the check 'memory' twice"),
        ({"check": [{**MEMORY, "name": "memroy"}]}, "no check 'memroy'; did you mean 'memory'"),
        ({"check": [{"timeout_s": 1}]}, "no check 'None'"),
        ({"check": [{**MEMORY, "availble_percent": 1}]}, "did you mean 'available_percent'"),
        ({"check": [{**MEMORY, "available_percent": 10}]}, "must be a table, got 10"),
        (
            {"check": [{**MEMORY, "available_percent": {"warn": "10", "source": "x"}}]},
            "warn of available_percent of check 'memory' .* must be a number, got '10'",
        ),
        ({"check": [{**MEMORY, "available_percent": {"warn": 10}}]}, "lacks 'source'"),
        (
            {"check": [{**MEMORY, "available_percent": {"warn": math.nan, "source": "x"}}]},
            "warn of available_percent of check 'memory' .* a finite number, got nan",
        ),
        (
            {"check": [{**MEMORY, "available_percent": {"fail": 100.5, "source": "x"}}]},
            "fail of available_percent of check 'memory' .*: 100.5 looks like another unit",
        ),
        (
            {"check": [{**MEMORY, "available_percent": {"warn": -1, "source": "x"}}]},
            "-1 looks like another unit: percent are expected, from 0 to 100",
        ),
        ({"deadline_s": math.nan}, "must be seconds up to 3600, got nan"),
        ({"check": []}, "the suite .* runs no check"),
        ({"check": [{"name": "memory", "timeout_s": 1}]}, "lacks 'available_percent'"),
        ({"unknown": "warn"}, "unknown is a table of reasons, got 'warn'"),
        ({"unknown": {"crashed": "warn"}}, "unknown key 'crashed'; did you mean 'crash'"),
        ({"unknown": {"crash": "fail"}}, "unknown.crash must be one of skip, warn, unknown"),
    ],
)
def test_a_mistake_is_answered_with_what_is_valid(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        parsed(tmp_path, **change)


def test_a_suite_can_be_reduced_to_some_of_its_checks():
    suite = load_suite("default", [SHIPPED])

    assert suite.only(["load", "memory"]).names == ("memory", "load")
    assert suite.only([]) is suite


def test_reducing_to_a_check_that_is_not_there_says_so(tmp_path):
    with pytest.raises(UsageError, match=r"no check 'gpu_coutn'; did you mean 'gpu_count'"):
        load_suite("default", [SHIPPED]).only(["gpu_coutn"])
    with pytest.raises(UsageError, match=r"does not run the check 'load' \(it runs memory\)"):
        parsed(tmp_path).only(["load"])


def test_the_number_of_gpus_comes_from_the_settings_where_they_have_one():
    suite = load_suite("default", [SHIPPED])
    (gpu_count,) = suite.expecting_gpus(8, "flag").only(["gpu_count"]).planned

    assert (gpu_count.parameters.expected, gpu_count.parameters.source) == (8, "flag")
    assert suite.expecting_gpus(None, "default") is suite
    assert suite.gpus_expected is None
    assert suite.expecting_gpus(8, "flag").gpus_expected == NumberExpectation(
        value=8, source="flag"
    )
    assert suite.expecting_gpus(8, "flag").only(["gpu_driver"]).gpus_expected is None


def written(folder, **suites):
    for name, text in suites.items():
        (folder / f"{name}.toml").write_text(text)
    return [folder]


BASE = """
deadline_s = 9
[unknown]
crash = "warn"
[[check]]
name = "memory"
timeout_s = 3
available_percent = { warn = 10, source = "a test" }
[[check]]
name = "gpu_pci"
timeout_s = 4
[[check]]
name = "gpu_count"
timeout_s = 4
"""


def test_a_suite_inherits_the_checks_it_runs_and_may_change_their_keys(tmp_path):
    heir = """
inherits = "base"
run = ["gpu_*"]
deadline_s = 2
[unknown]
timeout = "warn"
[[check]]
name = "gpu_pci"
timeout_s = 1
"""
    suite = load_suite("heir", written(tmp_path, base=BASE, heir=heir))

    assert suite.names == ("gpu_pci", "gpu_count")
    assert [planned.timeout_s for planned in suite.planned] == [1, 4]
    assert suite.deadline_s == 2
    assert {reason.value for reason in suite.unknown} == {"crash", "timeout"}


def test_an_exclamation_mark_takes_checks_away_from_the_others(tmp_path):
    heir = 'inherits = "base"\nrun = ["*", "!gpu_p*"]'
    suite = load_suite("heir", written(tmp_path, base=BASE, heir=heir))

    assert "gpu_count" in suite.names
    assert "gpu_pci" not in suite.names


@pytest.mark.parametrize(
    ("heir", "message"),
    [
        ('inherits = "bse"', "no suite 'bse'; did you mean 'base'"),
        ('inherits = "heir"', "inherits itself: heir > heir"),
        ('inherits = "base"\nrun = ["gpu_pcie"]', "no check 'gpu_pcie'; did you mean 'gpu_pci'"),
        ('inherits = "base"\nrun = "gpu_pci"', "run is a list of names"),
        ('inherits = "base"\nrun = ["*", "!gpu_pcie"]', "no check '!gpu_pcie'"),
        ('run = ["memory"]\ndeadline_s = 1', "selects inherited checks"),
    ],
)
def test_a_wrong_inheritance_is_named(tmp_path, heir, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_suite("heir", written(tmp_path, base=BASE, heir=heir))
