"""The verdicts on what DCGM's diagnostic says."""

import pytest
from support.checks import CASE, said

from gpuops.checks.gpu.dcgm_diag import Parameters, judge
from gpuops.host.dcgm import DcgmDiagnostic, DcgmError, DcgmResult


def result(status="pass", *errors, entity="GPU 0", category="Hardware", test="memory"):
    return DcgmResult(category=category, test=test, entity=entity, status=status, errors=errors)


def error(severity=None, code=None, text="it is broken"):
    return DcgmError(text=text, code=code, severity=severity)


def findings(*results, exit_code=0, run_error=None, ignore=()):
    facts = DcgmDiagnostic(
        installed=True, version="4.2.3", exit_code=exit_code, error=run_error, results=results
    )
    return judge(facts, Parameters(ignore=ignore), CASE)


def words(*results, **more):
    return [finding.status.word for finding in findings(*results, **more)]


def test_all_passed_is_one_pass_with_its_counts():
    (finding,) = findings(result(), result(entity="GPU 1"), result("skip", test="pcie"))

    assert finding.status.word == "pass"
    assert finding.message == "level 1 (DCGM 4.2.3): 1 tests passed, 1 skipped"


@pytest.mark.parametrize(
    ("severity", "status"),
    [(0, "warn"), (1, "warn"), (2, "fail"), (3, "warn"), (4, "warn"), (5, "warn"), (6, "fail")],
)
def test_the_severity_of_an_error_decides(severity, status):
    assert words(result("fail", error(severity, 29))) == [status]


def test_errors_of_every_entity_and_all_errors_of_one_are_told():
    found = findings(
        result(),
        result("fail", error(2, 5, "DBE"), error(1, 7, "remapped"), entity="GPU 7"),
        result("fail", error(6, 9, "off"), entity="NvSwitch 1"),
    )

    assert [finding.message for finding in found] == [
        "GPU 7, test memory: DBE [error 5, isolate]",
        "GPU 7, test memory: remapped [error 7, monitor]",
        "NvSwitch 1, test memory: off [error 9, reset]",
    ]
    assert said(found)[0] == ("n1", "fail", "gpu_hw.diagnostic")


def test_an_error_in_a_test_that_passed_is_not_swallowed():
    assert words(result("pass", error(2, 78, "Unable to allocate memory"))) == ["fail"]


def test_without_severities_a_failed_test_fails_unless_it_is_about_the_installation():
    assert words(result("fail", error())) == ["fail"]
    assert words(result("fail")) == ["fail"]
    assert words(result("warn", error())) == ["warn"]
    assert words(result("fail", error(), category="Deployment")) == ["warn"]


def test_codes_that_are_ignored_say_nothing_and_others_still_do():
    assert words(result("fail", error(2, 29), error(2, 5)), ignore=(29,)) == ["fail"]
    assert words(result(), result("fail", error(2, 29)), ignore=(29,), exit_code=226) == ["pass"]


@pytest.mark.parametrize(("code", "status"), [(0, "pass"), (226, "warn"), (205, "fail")])
def test_without_any_complaint_the_exit_code_has_the_last_word(code, status):
    assert words(result(), exit_code=code) == [status]


def test_nothing_tested_is_never_healthy():
    assert words() == ["unknown"]
    assert words(result("skip")) == ["unknown"]
    (finding,) = findings(exit_code=1, run_error="unsupported GPU 0")
    assert (finding.unknown_reason, finding.message) == ("not_supported", "unsupported GPU 0")


def test_a_run_that_broke_off_is_unknown_besides_what_it_found():
    assert words(result(), run_error="nvvs died") == ["unknown"]


def test_it_is_skipped_where_dcgm_is_not_installed():
    facts = DcgmDiagnostic(installed=False)

    assert said(judge(facts, Parameters(), CASE)) == [("n1", "skip", None)]
