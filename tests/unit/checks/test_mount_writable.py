"""The verdicts on folders that must be writable."""

import pytest
from support.checks import CASE, limit, said

from gpuops.checks.storage.mount_writable import Parameters, judge
from gpuops.host.storage.write_test import WriteAnswer, Writes

LIMITS = Parameters(paths=("/scratch", "/tmp"), elapsed_s=limit(warn=2, fail=30), source="ops")


def findings(*answers):
    return judge(Writes(answers), LIMITS, CASE)


def answer(path="/scratch", elapsed_s=0.01, **more):
    return WriteAnswer(path=path, elapsed_s=elapsed_s, **more)


def test_the_slowest_of_the_good_ones_is_shown():
    (finding,) = findings(answer(), answer("/tmp", 1.5))

    assert (finding.status.word, finding.entity.id, finding.value) == ("pass", "/tmp", 1.5)


@pytest.mark.parametrize(
    ("elapsed_s", "status"),
    [(1.99, "pass"), (2.0, "warn"), (29.9, "warn"), (30.0, "fail"), (31.0, "fail")],
)
def test_a_slow_one_is_judged_by_its_limit(elapsed_s, status):
    assert findings(answer(elapsed_s=elapsed_s))[0].status.word == status


@pytest.mark.parametrize(
    ("error", "status", "failure_class"),
    [
        ("EROFS", "fail", "storage.read_only"),
        ("ENOSPC", "fail", "storage.no_space"),
        ("EDQUOT", "fail", "storage.no_space"),
        ("EIO", "fail", "storage.shared_fs"),
        ("ENOENT", "fail", "storage.shared_fs"),
        ("EACCES", "unknown", "storage.shared_fs"),
    ],
)
def test_an_error_is_the_file_systems_or_about_us(error, status, failure_class):
    assert said(findings(answer(error=error), answer("/tmp"))) == [
        ("/scratch", status, failure_class)
    ]


def test_silence_convicts_only_where_the_kernel_holds_the_process():
    stuck, slow = findings(answer(silent="no answer", stuck=True), answer("/tmp", silent="late"))

    assert (stuck.status.word, slow.status.word) == ("fail", "unknown")
    assert slow.unknown_reason == "timeout"


def test_without_folders_it_is_skipped():
    assert said(judge(Writes(), Parameters(elapsed_s=limit(warn=2)), CASE)) == [
        ("n1", "skip", None)
    ]
