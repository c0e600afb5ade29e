"""The kernel's clock source against the profile."""

import pytest
from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import Profile, TextExpectation
from gpuops.checks.host.clock_source import judge
from gpuops.host.kernel_state import Cpu

WITH = JudgeContext(
    node=NODE,
    profile=Profile(
        name="p", clock_source=TextExpectation(value=("tsc", "kvm-clock"), source="site")
    ),
)


@pytest.mark.parametrize(
    ("source", "status"), [("tsc", "pass"), ("kvm-clock", "pass"), ("hpet", "warn")]
)
def test_a_source_that_the_profile_does_not_name_warns(source, status):
    facts = Cpu(clock_source=source, clock_sources=("tsc", "hpet"))
    (finding,) = judge(facts, NoParameters(), WITH)

    assert (finding.status.word, finding.threshold) == (status, "= tsc or kvm-clock")
    assert finding.message == f"clock source {source} (available: tsc, hpet)"


def test_what_is_not_told_or_not_expected_is_skipped():
    assert said(judge(Cpu(), NoParameters(), WITH)) == [("n1", "skip", None)]
    assert said(judge(Cpu(clock_source="hpet"), NoParameters(), CASE)) == [("n1", "skip", None)]
