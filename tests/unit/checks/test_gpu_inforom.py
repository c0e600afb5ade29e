"""The verdicts on the InfoROM."""

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node

from gpuops.checks.core.check import NoParameters
from gpuops.checks.gpu.gpu_inforom import judge
from gpuops.host.nvml.facts import CallError


def findings(*gpus):
    return judge(node(*gpus), NoParameters(), CASE)


def test_a_valid_inforom_passes():
    assert said(findings(gpu(0), gpu(1))) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    "changes",
    [
        {"inforom_valid": False},
        {"inforom_valid": None, "errors": (CallError("nvmlDeviceValidateInforom", 14, "bad"),)},
        {"errors": (CallError("nvmlDeviceGetSerial", 14, "bad"),)},
    ],
)
def test_a_corrupt_inforom_fails(changes):
    assert said(findings(gpu(0), gpu(1, **changes))) == [("GPU-1", "fail", "gpu_hw.inforom")]


def test_an_inforom_that_nobody_could_read_is_not_valid():
    untold = gpu(0, inforom_valid=None, unsupported=("nvmlDeviceValidateInforom",))
    refused = gpu(
        0, inforom_valid=None, errors=(CallError("nvmlDeviceValidateInforom", 4, "root only"),)
    )

    assert said(findings(untold)) == [("n1", "skip", None)]
    assert said(findings(refused)) == [("n1", "unknown", None)]
