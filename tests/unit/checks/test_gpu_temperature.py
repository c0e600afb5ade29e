"""The verdicts on temperatures against the device's own limits."""

import pytest
from support.checks import CASE, limit, said
from support.gpus import gpu, node

from gpuops.checks.gpu.gpu_temperature import Parameters, judge
from gpuops.host.nvml.facts import Temperatures

LIMITS = Parameters(margin_c=limit(warn=2, fail=0))


def findings(**temperatures):
    return judge(node(gpu(0, temperature=Temperatures(**temperatures))), LIMITS, CASE)


@pytest.mark.parametrize(
    ("celsius", "status"),
    [(30, "pass"), (84, "pass"), (85, "warn"), (86, "warn"), (87, "fail"), (88, "fail")],
)
@pytest.mark.parametrize(
    ("now", "own"),
    [("core_c", "slowdown_c"), ("core_c", "shutdown_c"), ("memory_c", "memory_max_c")],
)
def test_a_temperature_is_judged_by_the_devices_own_limit(celsius, status, now, own):
    (verdict,) = said(findings(**{now: celsius, own: 87}))

    assert verdict[1] == status
    assert verdict[2] == (None if status == "pass" else "gpu_hw.thermal_power")


@pytest.mark.parametrize(
    ("margin_c", "status"), [(40, "pass"), (1, "pass"), (0, "warn"), (-1, "warn"), (-2, "fail")]
)
def test_newer_devices_state_their_limit_as_a_margin(margin_c, status):
    (verdict,) = said(findings(margin_c=margin_c, slowdown_margin_c=-2))

    assert verdict[1] == status


def test_the_slowdown_temperature_goes_before_the_shutdown_temperature():
    assert findings(core_c=90, slowdown_c=87, shutdown_c=92)[0].status.word == "fail"


def test_of_two_limits_of_the_core_the_nearer_one_counts():
    near = {"core_c": 30, "slowdown_c": 87, "margin_c": 1, "slowdown_margin_c": 0}
    far = {"core_c": 86, "slowdown_c": 87, "margin_c": 40, "slowdown_margin_c": 0}

    assert [findings(**each)[0].status.word for each in (near, far)] == ["warn", "warn"]


def test_core_and_memory_are_told_apart():
    found = findings(core_c=90, slowdown_c=87, memory_c=95, memory_max_c=95)

    assert [finding.message for finding in found] == [
        "GPU 0: core at 90 °C, its limit is 87 °C",
        "GPU 0: memory at 95 °C, its limit is 95 °C",
    ]


def test_a_temperature_without_a_limit_is_no_pass():
    assert said(findings()) == [("n1", "skip", None)]
    (finding,) = findings(core_c=60)
    assert finding.message == "not judged on GPU 0: the device reports no limit of its own"
    assert said(findings(core_c=60, margin_c=20)) == [("n1", "skip", None)]


def test_a_limit_of_zero_is_none():
    none = {"slowdown_c": 0, "shutdown_c": 0, "memory_max_c": 0}

    assert said(findings(core_c=60, memory_c=70, **none)) == [("n1", "skip", None)]
    assert said(findings(core_c=60, slowdown_c=0, shutdown_c=92)) == [("n1", "pass", None)]
