"""What is told of a check is what its source, its suite and its profile say."""

import pytest

from gpuops.checks import NAMES
from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.explain import catalogued_for, explain, origins
from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation, Profile
from gpuops.checks.core.suite import load_suite, suite_paths
from gpuops.model import FailureClass
from gpuops.resources import data_dir

SUITES = [data_dir("checks") / "suites"]
PATHS = suite_paths(SUITES)
FULL = load_suite("full", SUITES)


def told(name, *, suite="full", profile=NO_PROFILE, **settings):
    (planned,) = FULL.only((name,)).planned
    return explain(planned, suite, PATHS, profile, settings)


def test_the_classes_are_those_that_the_check_names():
    assert told("memory").failure_classes == (FailureClass.HOST_MEM_LOW,)


def test_a_class_that_a_check_has_from_another_is_told_too():
    """disk_space takes the class of a mount from mount_alive's module, or the other way round."""
    assert FailureClass.HOST_DISK in told("mount_alive").failure_classes
    assert FailureClass.STORAGE_SHARED_FS in told("mount_writable").failure_classes


def test_the_classes_of_xids_and_log_rules_are_told_with_those_of_the_source():
    machine = ProbeContext(
        rule_dirs=(data_dir("checks") / "rules",), xid_dirs=(data_dir("checks") / "xid",)
    )

    assert FailureClass.GPU_FELL_OFF_BUS in catalogued_for("gpu_xid", machine)
    assert FailureClass.STORAGE_SHARED_FS in catalogued_for("kernel_log", machine)
    assert catalogued_for("memory", machine) == frozenset()
    (planned,) = FULL.only(("memory",)).planned
    it = explain(planned, "full", PATHS, NO_PROFILE, {}, {FailureClass.HOST_DISK})
    assert set(it.failure_classes) == {FailureClass.HOST_MEM_LOW, FailureClass.HOST_DISK}


def test_the_profiles_expectations_are_told_with_what_is_in_force():
    profile = Profile(name="p", pcie_width=NumberExpectation(value=16, source="a sheet"))

    assert told("gpu_pcie_link", profile=profile).expectations == {
        "pcie_generation": None,
        "pcie_width": NumberExpectation(value=16, source="a sheet"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_check_says_what_it_reads_and_how_it_judges(name):
    it = told(name)

    assert it.doc
    assert it.sources


def test_a_limit_is_from_the_last_suite_that_sets_it(tmp_path):
    base = tmp_path / "base.toml"
    base.write_text('deadline_s = 1\n[[check]]\nname = "load"\ntimeout_s = 1\nx = 1\ny = 1\n')
    heir = tmp_path / "heir.toml"
    heir.write_text('inherits = "base"\n[[check]]\nname = "load"\ny = 2\n')
    found = origins("load", "heir", {"base": base, "heir": heir})

    assert (found["x"], found["y"]) == (str(base), str(heir))


def test_a_setting_goes_before_the_suite():
    assert told("gpu_count", expected="flag").origins["expected"] == "flag"
