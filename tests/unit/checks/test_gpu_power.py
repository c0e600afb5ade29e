"""The verdicts on power limits."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.gpus import gpu, node, part

from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation
from gpuops.checks.gpu.gpu_power import Parameters, judge
from gpuops.host.nvml.facts import Power

LIMITS = Parameters(off_w=limit(fail=1))
PROFILED = replace(
    CASE, profile=replace(NO_PROFILE, power_limit_w=NumberExpectation(value=600, source="us"))
)


def findings(limit_w, case=CASE):
    return judge(node(gpu(0), part(gpu(1), "power", limit_w=limit_w)), LIMITS, case)


@pytest.mark.parametrize(
    ("limit_w", "status"),
    [(698.0, "warn"), (699.0, "warn"), (699.1, "pass"), (700.0, "pass"), (701.0, "warn")],
)
def test_without_a_profile_another_limit_than_the_boards_only_warns(limit_w, status):
    (verdict,) = said(findings(limit_w))

    assert verdict[1] == status
    if status == "warn":
        assert verdict == ("GPU-1", "warn", "gpu_sw.config")


@pytest.mark.parametrize(
    ("limit_w", "status"),
    [(598.0, "fail"), (599.0, "fail"), (599.1, "pass"), (600.0, "pass"), (601.0, "warn")],
)
def test_less_than_the_profile_grants_fails_and_more_warns(limit_w, status):
    facts = node(part(gpu(1), "power", limit_w=limit_w))
    (finding,) = judge(facts, LIMITS, PROFILED)

    assert finding.status.word == status
    if status != "pass":
        assert finding.source == "profile none: us"


def test_a_limit_that_is_not_told_is_skipped():
    for power in (Power(), Power(limit_w=700.0)):
        assert said(judge(node(gpu(0, power=power)), LIMITS, CASE)) == [("n1", "skip", None)]
