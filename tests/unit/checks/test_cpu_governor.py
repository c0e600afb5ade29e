"""The frequency governor against the profile."""

from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import Profile, TextExpectation
from gpuops.checks.host.cpu_governor import judge
from gpuops.host.kernel_state import Cpu

WITH = JudgeContext(
    node=NODE,
    profile=Profile(name="p", cpu_governor=TextExpectation(value=("performance",), source="site")),
)


def test_each_governor_in_use_is_held_against_the_profile_and_warns_at_most():
    facts = Cpu(governors={"performance": 220, "powersave": 4})
    good, bad = judge(facts, NoParameters(), WITH)

    assert (good.status.word, bad.status.word) == ("pass", "warn")
    assert bad.message == "governor powersave on 4 of 224 frequency policies"
    assert (bad.threshold, bad.source) == ("= performance", "site")


def test_without_frequency_scaling_or_a_profile_it_is_skipped():
    assert said(judge(Cpu(), NoParameters(), WITH)) == [("n1", "skip", None)]
    assert said(judge(Cpu(governors={"powersave": 2}), NoParameters(), CASE)) == [
        ("n1", "skip", None)
    ]
