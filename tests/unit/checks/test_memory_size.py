"""Memory against the profile."""

import pytest
from support.checks import NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.checks.host.memory_size import judge
from gpuops.host.procfs import Memory

GB = 10**9


def verdict(total_bytes, expected=None):
    minimum = None if expected is None else NumberExpectation(value=expected, source="order 7")
    case = JudgeContext(node=NODE, profile=Profile(name="p", memory_bytes_min=minimum))
    return judge(Memory(total_bytes, total_bytes), NoParameters(), case)


@pytest.mark.parametrize(
    ("total_bytes", "status"),
    [(2000 * GB - 1, "fail"), (2000 * GB, "pass"), (2000 * GB + 1, "pass")],
)
def test_less_than_the_profile_says_fails(total_bytes, status):
    (finding,) = verdict(total_bytes, 2000 * GB)

    assert finding.status.word == status
    assert (finding.threshold, finding.source, finding.unit) == (">= 2000", "order 7", "GB")


def test_a_failure_is_one_of_memory_modules():
    assert said(verdict(1, 2)) == [("n1", "fail", "host_hw.dimm")]


def test_without_a_profile_nothing_is_held_against_the_node():
    (finding,) = verdict(5 * GB)

    assert (finding.status.word, finding.value) == ("skip", 5.0)
    assert finding.message == "5.0 GB of memory; the profile does not say what is expected"
