"""The verdicts on the clocks that are allowed."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node, part

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation
from gpuops.checks.gpu.gpu_clocks import judge
from gpuops.host.nvml.facts import Clocks

PROFILED = replace(
    CASE, profile=replace(NO_PROFILE, sm_clock_mhz_min=NumberExpectation(value=1155, source="us"))
)


def allowed(index, mhz, **changes):
    return part(gpu(index), "clocks", sm_application_mhz=mhz, **changes)


def findings(*gpus, case=CASE):
    return judge(node(*gpus), NoParameters(), case)


@pytest.mark.parametrize(("mhz", "status"), [(1154, "fail"), (1155, "pass"), (1156, "pass")])
def test_the_profiles_clock_must_be_allowed(mhz, status):
    (verdict,) = said(findings(allowed(0, mhz), case=PROFILED))
    assert verdict[1] == status

    (verdict,) = said(findings(allowed(0, None, sm_max_mhz=mhz), case=PROFILED))
    assert verdict[1] == status


def test_without_a_profile_one_that_is_slower_than_most_warns():
    assert said(findings(allowed(0, 1980), allowed(1, 1980), allowed(2, 1979))) == [
        ("GPU-2", "warn", "gpu_sw.config")
    ]
    assert said(findings(allowed(0, 1980), allowed(1, 1980), allowed(2, 1981))) == [
        ("n1", "pass", None)
    ]


def test_models_are_not_compared_with_each_other():
    assert said(findings(gpu(0), gpu(1), gpu(2, "a100-sxm-80gb"))) == [("n1", "pass", None)]


def test_an_idle_gpu_may_run_slowly():
    assert said(findings(part(gpu(0), "clocks", sm_mhz=120))) == [("n1", "pass", None)]


def test_clocks_that_are_not_told_are_skipped():
    assert said(findings(gpu(0, clocks=Clocks()))) == [("n1", "skip", None)]
