"""The verdicts on what holds clocks down."""

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node, part

from gpuops.checks.gpu.gpu_throttle import Parameters, judge
from gpuops.errors import ConfigError

LIMITS = Parameters(
    fail=("hw_thermal", "power_brake"), warn=("hw_slowdown", "sw_thermal"), source="a test"
)


def findings(mask):
    return judge(node(gpu(0), part(gpu(1), "clocks", reasons=mask)), LIMITS, CASE)


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
        "the hardware, for heat"
    )


def test_reasons_that_are_not_told_are_skipped():
    assert said(findings(None)) == [("n1", "pass", None), ("n1", "skip", None)]


def test_a_reason_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="no clock reason 'heat'"):
        Parameters(fail=("heat",), warn=(), source="a test")
