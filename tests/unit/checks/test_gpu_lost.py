"""The verdicts on GPUs that NVML cannot open, has lost, or hangs on."""

import pytest
from support.checks import CASE, said
from support.gpus import address, gpu, node

from gpuops.checks.core.check import NoParameters
from gpuops.checks.gpu.gpu_lost import judge
from gpuops.host.nvml.facts import CallError

OPENING = "nvmlDeviceGetHandleByIndex: no"


def findings(*gpus):
    return judge(node(*gpus), NoParameters(), CASE)


def test_gpus_that_open_pass():
    assert said(findings(gpu(0), gpu(1))) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    ("code", "status", "failure_class"),
    [
        (8, "fail", "gpu_hw.thermal_power"),
        (14, "fail", "gpu_hw.inforom"),
        (15, "fail", "gpu_hw.fell_off_bus"),
        (16, "fail", "gpu_sw.driver"),
        (4, "unknown", None),
        (999, "warn", "gpu_sw.driver"),
        (None, "warn", "gpu_sw.driver"),
    ],
)
def test_a_gpu_that_cannot_be_opened_is_judged_by_its_code(code, status, failure_class):
    broken = gpu(1, uuid=None, error=OPENING, error_code=code)

    assert said(findings(gpu(0), broken)) == [(f"PCI:{address(1)}", status, failure_class)]


@pytest.mark.parametrize(
    ("code", "status", "failure_class"),
    [
        (15, "fail", "gpu_hw.fell_off_bus"),
        (16, "fail", "gpu_sw.driver"),
        (999, "warn", "gpu_sw.driver"),
        (10, "warn", "gpu_sw.driver"),
        (-1, "warn", "gpu_sw.driver"),
    ],
)
def test_a_call_that_fails_later_is_judged_by_its_code(code, status, failure_class):
    errors = (CallError("nvmlDeviceGetSerial", code, "no"),)

    assert said(findings(gpu(0, errors=errors))) == [("GPU-0", status, failure_class)]


@pytest.mark.parametrize("code", [2, 4, 6])
def test_a_call_that_is_refused_for_other_reasons_says_nothing_of_the_gpu(code):
    errors = (CallError("nvmlDeviceGetSerial", code, "no"),)

    assert said(findings(gpu(0, errors=errors))) == [("n1", "pass", None)]


def test_many_signs_are_shown_as_a_few():
    errors = tuple(CallError(f"nvml{n}", 999, "odd") for n in range(5))
    (finding,) = findings(gpu(0, errors=errors))

    assert finding.message == "GPU 0: nvml0: odd; nvml1: odd; nvml2: odd; 2 more"


def test_a_call_without_an_answer_is_unknown_and_named():
    (finding,) = findings(gpu(0), gpu(1, hung_call="nvmlDeviceGetEccMode"))

    assert (finding.status.word, finding.unknown_reason) == ("unknown", "timeout")
    assert finding.entity.id == "GPU-1"
    assert "nvmlDeviceGetEccMode" in finding.message
