"""What a person reads of a check run: what is wrong last, and each reason to skip once."""

from dataclasses import replace

from support.checks import NODE

from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.text import findings_table, nagios_line, reason_lines
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


def test_a_table_fits_eighty_columns():
    long = {"threshold": "> 10 % (fail: 0 %)", "source": "gpuops judgement of its own"}
    run = ran(
        finding("a" * 20, Status.PASS, "m" * 10, value="v" * 18, **long),
        finding("b", Status.FAIL, "many words of a message " * 4, value=0.5, unit="s", **long),
        finding("c", Status.SKIP, "no GPU and no word that is short " * 4),
    )
    *lines, verdict = findings_table(run, width=80).splitlines()
    words = " ".join(" ".join(line.split()) for line in lines)

    assert max(map(len, lines)) <= 80
    assert verdict.startswith("n1: fail")
    assert words.startswith("STATUS CHECK VALUE MESSAGE ")
    assert "10 %" in words
    assert "judgement" in words


def test_a_reason_that_many_checks_have_is_said_once():
    same = "NVML gave no answer; see gpu_driver"
    lines = reason_lines(
        [
            finding("gpu_driver", Status.UNKNOWN, "NVML gave no answer"),
            *(finding(name, Status.UNKNOWN, same) for name in ("gpu_count", "gpu_lost", "gpu_ecc")),
            finding("memory", Status.WARN, same),
            finding("load", Status.FAIL, "stuck"),
        ]
    )

    assert lines == [
        "unknown gpu_driver: NVML gave no answer",
        f"unknown gpu_count: {same} (also gpu_lost, gpu_ecc)",
        "fail load: stuck",
    ]
