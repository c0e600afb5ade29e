"""The verdicts on what holds clocks down."""

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node, part

from gpuops.checks.gpu.gpu_throttle import Parameters, judge
from gpuops.errors import ConfigError
from gpuops.host.nvml.facts import SAMPLES

LIMITS = Parameters(
    fail=("hw_thermal", "power_brake"), warn=("hw_slowdown", "sw_thermal"), source="a test"
)


def findings(mask, *later, limits=LIMITS):
    """Return the verdicts on a GPU with *mask* and, in further samples, *later*."""
    samples = (mask, *later) if later else (mask,) * SAMPLES
    slow = part(gpu(1), "clocks", reasons=mask, samples=() if mask is None else samples)
    return judge(node(gpu(0), slow), limits, CASE)


@pytest.mark.parametrize(
    ("mask", "status"),
    [
        (0x0, "pass"),
        (0x1, "pass"),
        (0x2, "pass"),
        (0x4, "pass"),
        (0x10, "pass"),
        (0x100, "pass"),
        (0x8, "warn"),
        (0x20, "warn"),
        (0x24, "warn"),
        (0x40, "fail"),
        (0x80, "fail"),
        (0x48, "fail"),
    ],
)
def test_heat_and_the_power_brake_fail_and_the_power_cap_does_not(mask, status):
    (verdict,) = said(findings(mask))

    assert verdict[1] == status
    if status != "pass":
        assert verdict == ("GPU-1", status, "gpu_hw.thermal_power")


def test_all_reasons_that_matter_are_told():
    (finding,) = findings(0x6C)

    assert finding.value == "0x6c"
    assert finding.message == (
        "GPU 1: its clocks are reduced by the hardware, the driver, for heat, "
        "the hardware, for heat, in 3 of 3 samples"
    )


@pytest.mark.parametrize(
    ("samples", "status", "often"),
    [
        ((0x40, 0x40, 0x40), "fail", "3 of 3"),
        ((0x40, 0x40, 0x1), "warn", "2 of 3"),
        ((0x40, 0x80, 0x40), "warn", "2 of 3"),
        ((0x8, 0x1, 0x1), "warn", "1 of 3"),
        ((0x40, 0x40), "warn", "2 of 2"),
    ],
)
def test_what_slows_a_gpu_down_for_a_moment_only_warns(samples, status, often):
    (finding,) = findings(*samples)

    assert finding.status.word == status
    assert finding.message.endswith(f"in {often} samples")


def test_a_reason_that_is_never_sampled_fails_where_a_site_wants_it():
    strict = Parameters(fail=("sw_power_cap",), warn=("hw_slowdown",), source="a test")
    capped = part(gpu(0), "clocks", reasons=0x4)

    assert said(judge(node(capped), strict, CASE))[0][1] == "fail"


def test_reasons_that_are_not_told_are_skipped():
    assert said(findings(None)) == [("n1", "pass", None), ("n1", "skip", None)]


def test_a_reason_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="no clock reason 'heat'"):
        Parameters(fail=("heat",), warn=(), source="a test")
