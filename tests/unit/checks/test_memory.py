"""The verdict on available memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checks import CASE, limit, said

from gpuops.checks.host.memory import Parameters, judge
from gpuops.host.procfs import Memory

LIMITS = Parameters(available_percent=limit(warn=10, fail=1))


@pytest.mark.parametrize(
    ("available", "status", "failure_class"),
    [
        (500, "pass", None),
        (101, "pass", None),
        (100, "warn", "host_mem.low"),
        (11, "warn", "host_mem.low"),
        (10, "fail", "host_mem.low"),
        (0, "fail", "host_mem.low"),
    ],
)
def test_memory_is_judged_by_its_percentage(available, status, failure_class):
    assert said(judge(Memory(1000, available), LIMITS, CASE)) == [("n1", status, failure_class)]


@given(total=st.integers(1, 2**50), first=st.integers(0, 2**50), second=st.integers(0, 2**50))
def test_less_memory_is_never_a_better_verdict(total, first, second):
    less, more = sorted((min(first, total), min(second, total)))
    (scarce,), (plenty,) = (judge(Memory(total, x), LIMITS, CASE) for x in (less, more))

    assert scarce.status >= plenty.status


def test_the_finding_shows_value_unit_threshold_and_source():
    (finding,) = judge(Memory(2_000_000_000, 500_000_000), LIMITS, CASE)

    assert (finding.value, finding.unit) == (25.0, "%")
    assert finding.threshold == "> 10 % (fail: 1 %)"
    assert finding.source == "a test"
    assert finding.message == "500.0 MB of 2.0 GB available"
