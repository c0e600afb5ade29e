"""The verdicts on what the driver wants done to a GPU."""

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node

from gpuops.checks.core.check import NoParameters
from gpuops.checks.gpu.gpu_recovery_action import judge


def findings(*gpus):
    return judge(node(*gpus), NoParameters(), CASE)


@pytest.mark.parametrize(
    ("action", "failure_class"),
    [
        (1, "gpu_sw.driver"),
        (2, "gpu_sw.driver"),
        (3, "gpu_hw.nvlink"),
        (4, "gpu_sw.driver"),
        (6, "host_hw.pcie"),
        (7, "gpu_sw.driver"),
    ],
)
def test_every_action_fails(action, failure_class):
    assert said(findings(gpu(0), gpu(1, recovery_action=action))) == [
        ("GPU-1", "fail", failure_class)
    ]


def test_an_action_that_only_a_newer_driver_knows_warns():
    assert said(findings(gpu(0), gpu(1, recovery_action=8)))[0] == (
        "GPU-1",
        "warn",
        "gpu_sw.driver",
    )


def test_an_action_of_the_nvlink_domain_convicts_no_gpu_of_it():
    assert said(findings(gpu(0), gpu(1, recovery_action=5)))[0] == (
        "GPU-1",
        "warn",
        "gpu_sw.fabric",
    )


def test_no_action_passes():
    assert said(findings(gpu(0), gpu(1))) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    "unsupported", [(), ("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",)], ids=["silent", "unsupported"]
)
def test_a_driver_that_tells_none_is_not_healthy(unsupported):
    (finding,) = findings(gpu(0, recovery_action=None, unsupported=unsupported))

    assert finding.status.word == "skip"
    assert finding.message == "not judged on GPU 0: the driver reports no recovery action"


def test_a_driver_that_hangs_is_unknown():
    (finding,) = findings(gpu(0, recovery_action=None, hung_call="nvmlDeviceGetFieldValues"))

    assert (finding.status.word, finding.unknown_reason) == ("unknown", "timeout")
