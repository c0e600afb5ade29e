"""Processors against the profile."""

import pytest
from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import NumberExpectation, Profile
from gpuops.checks.host.cpu_count import judge
from gpuops.host.kernel_state import Cpu

WITH = JudgeContext(
    node=NODE, profile=Profile(name="p", cpu_count=NumberExpectation(value=224, source="order 7"))
)


@pytest.mark.parametrize(("online", "status"), [(223, "fail"), (224, "pass"), (225, "warn")])
def test_fewer_than_the_profile_says_fail(online, status):
    (finding,) = judge(Cpu(online=online, present=online), NoParameters(), WITH)

    assert (finding.status.word, finding.threshold) == (status, "= 224")


def test_processors_that_are_offline_are_told():
    (finding,) = judge(Cpu(online=222, present=224), NoParameters(), WITH)

    assert finding.message == "222 CPUs online, 2 more are present and offline"
    assert said([finding]) == [("n1", "fail", "host_sw.config")]


def test_what_is_not_told_or_not_expected_is_skipped():
    assert said(judge(Cpu(), NoParameters(), WITH)) == [("n1", "skip", None)]
    assert said(judge(Cpu(online=8), NoParameters(), CASE)) == [("n1", "skip", None)]
