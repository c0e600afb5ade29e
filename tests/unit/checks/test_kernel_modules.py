"""Kernel modules against the profile."""

from support.checks import CASE, NODE, said

from gpuops.checks.core.check import JudgeContext, NoParameters
from gpuops.checks.core.profile import NO_PROFILE, Profile, TextExpectation
from gpuops.checks.host.kernel_modules import inputs, judge
from gpuops.host.kernel_state import Modules

PROFILE = Profile(
    name="p", kernel_modules=TextExpectation(value=("nvidia_peermem", "mlx5_ib"), source="site")
)
WITH = JudgeContext(node=NODE, profile=PROFILE)


def test_each_module_that_is_absent_fails():
    facts = Modules(present=("mlx5_ib",), absent=("nvidia_peermem",))
    (finding,) = judge(facts, NoParameters(), WITH)

    assert said([finding]) == [("n1", "fail", "host_sw.config")]
    assert (finding.message, finding.source) == ("nvidia_peermem is not loaded", "site")


def test_all_there_passes():
    facts = Modules(present=("nvidia_peermem", "mlx5_ib"))

    assert said(judge(facts, NoParameters(), WITH)) == [("n1", "pass", None)]


def test_only_what_the_profile_names_is_asked_and_judged():
    assert inputs(NoParameters(), PROFILE) == ("nvidia_peermem", "mlx5_ib")
    assert inputs(NoParameters(), NO_PROFILE) == ()
    assert said(judge(Modules(absent=("zfs",)), NoParameters(), CASE)) == [("n1", "skip", None)]
