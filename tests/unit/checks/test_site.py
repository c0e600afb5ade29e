"""A site's executable as a check: what each of its endings means, and how a suite names it."""

import pytest
from support.checks import CASE, said

from gpuops.checks import check_named
from gpuops.checks.core.profile import NO_PROFILE
from gpuops.checks.core.site import Parameters, SiteResult, fault, judge, site_check
from gpuops.checks.core.suite import load_suite
from gpuops.errors import ConfigError
from gpuops.model import UnknownReason


def judged(exit_code, line="fan 3 is slow", ending="exited with code 7"):
    answer = SiteResult(path="/site/checks.d/fan", exit_code=exit_code, line=line, ending=ending)
    return judge("site/fan", answer, Parameters(), CASE)


@pytest.mark.parametrize(
    ("exit_code", "status", "failure_class"),
    [
        (0, "pass", None),
        (1, "warn", None),
        (2, "fail", "site.check"),
        (3, "unknown", None),
    ],
)
def test_an_exit_code_is_a_verdict_as_it_is_for_nagios(exit_code, status, failure_class):
    found = judged(exit_code)

    assert said(found) == [("n1", status, failure_class)]
    assert (found[0].message, found[0].source) == ("fan 3 is slow", "/site/checks.d/fan")


@pytest.mark.parametrize("exit_code", [-11, -9, 4, 64, 126, 127, 255, None])
def test_any_other_ending_is_no_verdict_and_never_fails(exit_code):
    (found,) = judged(exit_code, ending="ended by SIGSEGV")

    assert said([found]) == [("n1", "unknown", None)]
    assert found.unknown_reason is UnknownReason.CRASH
    assert found.message == (
        "no result: it ended by SIGSEGV (0 pass, 1 warn, 2 fail, 3 unknown)"
        " and printed: fan 3 is slow"
    )


def test_a_check_that_says_nothing_is_told_by_its_ending():
    assert judged(0, line="")[0].message == "it printed nothing and exited with code 7"


def test_a_check_is_asked_for_by_its_file_with_its_arguments_in_order():
    check = check_named("site/fan")

    assert check.inputs(Parameters(), NO_PROFILE) == ('["fan"]',)
    told = Parameters(run="fan.sh", arguments=("-w", "5", "-c", "5"))
    assert check.inputs(told, NO_PROFILE) == ('["fan.sh", "-w", "5", "-c", "5"]',)


@pytest.mark.parametrize("name", ["site/", "site/../sh", "site/a/b", "site/.hidden", "site/a b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name):
    with pytest.raises(ConfigError, match="comes the name of a file in checks"):
        site_check(name)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"run": "../sh"}, "run is the name of a file in checks.d, got '../sh'"),
        ({"run": ""}, "run is the name of a file in checks.d, got ''"),
        ({"arguments": ("a\0b",)}, "cannot hold a NUL byte"),
    ],
)
def test_a_parameter_that_cannot_be_run_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Parameters(**wrong)


def test_a_suite_names_a_sites_check_beside_the_shipped_ones(tmp_path):
    (tmp_path / "own.toml").write_text(
        """
        deadline_s = 5
        [[check]]
        name = "gpu_pci"
        timeout_s = 2
        [[check]]
        name = "site/fan"
        timeout_s = 3
        run = "fan.sh"
        """
    )
    suite = load_suite("own", [tmp_path])

    assert suite.names == ("gpu_pci", "site/fan")
    assert suite.only(["site/fan"]).planned[0].parameters == Parameters(run="fan.sh")


def test_why_a_check_cannot_be_run_is_said_before_it_is_run(tmp_path):
    (tmp_path / "fan").write_text("")

    assert fault("site/fan", Parameters(), None) == "no site folder is set (check.site_dir)"
    assert fault("site/fin", Parameters(), tmp_path) == f"there is no file {tmp_path}/fin"
    assert fault("site/fan", Parameters(), tmp_path) == f"{tmp_path}/fan is not executable"
    (tmp_path / "fan").chmod(0o755)
    assert fault("site/x", Parameters(run="fan"), tmp_path) is None
