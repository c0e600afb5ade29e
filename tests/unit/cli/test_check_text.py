"""What a person reads of a check run: what is wrong last, and each reason to skip once."""

from dataclasses import replace

from support.checks import NODE

from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.text import findings_table, nagios_line
from gpuops.model import FailureClass, Finding, Status, UnknownReason


def finding(check, status, message="seen", **more):
    reason = UnknownReason.TIMEOUT if status is Status.UNKNOWN else None
    failed = FailureClass.UNRESOLVED if status is Status.FAIL else None
    return Finding(
        check=check,
        entity=NODE,
        status=status,
        message=message,
        failure_class=failed,
        unknown_reason=reason,
        **more,
    )


def ran(*findings):
    return CheckRun(suite="s", node="n1", start_us=0, end_us=1000, findings=findings)


def test_what_is_wrong_stands_last_above_the_verdict():
    lines = findings_table(
        ran(finding("a", Status.FAIL), finding("b", Status.PASS), finding("c", Status.WARN)),
        width=None,
    ).splitlines()

    assert [line.split()[:2] for line in lines[1:5]] == [
        ["pass", "b"],
        [],
        ["warn", "c"],
        ["fail", "a"],
    ]
    assert lines[-1] == "n1: fail (suite s, 0.00 s): a: seen"


def test_checks_with_the_same_reason_to_skip_share_a_line():
    text = findings_table(
        ran(
            finding("a", Status.SKIP, "no GPU"),
            finding("b", Status.SKIP, "no NIC"),
            finding("c", Status.SKIP, "no GPU"),
            finding("d", Status.PASS),
        ),
        width=None,
    )

    assert "skip  a, c: no GPU\nskip  b: no NIC\n" in text


def test_long_cells_are_wrapped_within_their_column():
    text = findings_table(
        ran(finding("a", Status.PASS, "m" * 10, threshold="a threshold of very many words " * 3)),
        width=100,
    )

    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_run_in_which_anything_passed_is_not_skipped():
    assert ran(finding("a", Status.SKIP), finding("b", Status.PASS)).verdict is Status.PASS
    assert ran(finding("a", Status.SKIP)).verdict is Status.SKIP
    assert ran().verdict is Status.PASS
    assert ran(finding("a", Status.UNKNOWN), finding("b", Status.WARN)).verdict is Status.UNKNOWN


def test_the_last_line_says_what_is_wrong_and_not_all_that_follows_from_it():
    run = ran(finding("gpu_xid", Status.FAIL, "Xid 79; NVIDIA: RESTART_BM; counts until a reboot"))

    assert findings_table(run, width=None).splitlines()[-1].endswith("gpu_xid: Xid 79")


def test_checks_that_say_the_same_share_a_row():
    same = "NVML gave no answer"
    text = findings_table(
        ran(finding("a", Status.WARN, same), finding("b", Status.WARN, same)), width=None
    )

    assert "NVML gave no answer (also b)" in text
    assert text.count(same) == 2  # in the row and in the last line


def test_the_last_line_names_three_late_checks_and_counts_the_others():
    late = ("gpu_driver", "gpu_count", "gpu_lost", "gpu_ecc", "gpu_power")
    run = replace(ran(finding("gpu_driver", Status.UNKNOWN)), late=late)

    for line in (findings_table(run, width=None).splitlines()[-1], nagios_line(run)):
        assert line.endswith("; late: gpu_driver, gpu_count, gpu_lost and 2 more")
    three = replace(run, late=late[:3])
    assert nagios_line(three).endswith("; late: gpu_driver, gpu_count, gpu_lost")
