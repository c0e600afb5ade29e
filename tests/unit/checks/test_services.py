"""Services that profile and suite name."""

import pytest
from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.profile import Profile, TextExpectation
from gpuops.checks.host.services import Parameters, inputs, judge
from gpuops.host.systemd import Unit, Units

PROFILE = Profile(
    name="p", services=TextExpectation(value=("nvidia-fabricmanager",), source="site")
)
WITH = JudgeContext(node=NODE, profile=PROFILE)


def unit(active="active", load="loaded", name="nvidia-fabricmanager", **more):
    return Unit(name=name, load=load, active=active, **more)


def findings(*units, case=WITH, parameters=None):
    return judge(Units(systemd=True, units=units), parameters or Parameters(), case)


@pytest.mark.parametrize(
    ("active", "status"),
    [
        ("active", "pass"),
        ("reloading", "pass"),
        ("activating", "warn"),
        ("deactivating", "warn"),
        ("inactive", "fail"),
        ("failed", "fail"),
    ],
)
def test_a_unit_that_is_wanted_must_run(active, status):
    (finding,) = findings(unit(active))

    assert finding.status.word == status
    assert (finding.failure_class is None) == (status == "pass")


def test_a_failure_names_the_unit_its_result_and_who_wants_it():
    (finding,) = findings(unit("failed", sub="failed", result="exit-code", restarts=5))

    assert said([finding]) == [("n1", "fail", "host_sw.service")]
    assert finding.source == "site"
    assert finding.message == (
        "nvidia-fabricmanager is failed (failed), result exit-code, restarted 5 times"
    )


def test_a_unit_that_is_not_installed_is_unknown_and_drains_nothing():
    for missing in [(), (unit("inactive", load="not-found"),)]:
        (finding,) = findings(*missing)
        assert (finding.status.word, finding.unknown_reason) == ("unknown", "missing_tool")


def test_a_masked_unit_warns_for_somebody_did_that():
    assert said(findings(unit("inactive", load="masked")))[0][1] == "warn"


def test_suite_and_profile_both_name_units():
    parameters = Parameters(units=("munge",), source="ops")

    assert inputs(parameters, PROFILE) == ("munge", "nvidia-fabricmanager")
    (finding,) = findings(unit(), unit("failed", name="munge"), parameters=parameters)
    assert (finding.value, finding.source) == ("munge", "ops")


def test_without_systemd_or_units_it_is_skipped():
    assert said(judge(Units(systemd=False), Parameters(), WITH)) == [("n1", "skip", None)]
    assert said(findings(case=CASE)) == [("n1", "skip", None)]
