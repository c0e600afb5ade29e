"""The verdicts on remapped rows of GPU memory."""

import pytest
from support.checks import CASE, limit, said
from support.gpus import gpu, node, shipped

from gpuops.checks.gpu.gpu_row_remap import Parameters, judge
from gpuops.host.nvml.facts import RemappedRows, RetiredPages

LIMITS = Parameters(failed=limit(fail=1), pending=limit(fail=1), uncorrectable=limit(warn=513))


def remapped(uncorrectable=0, *, pending=False, failure=False):
    return RemappedRows(
        correctable=2, uncorrectable=uncorrectable, pending=pending, failure=failure
    )


def findings(*gpus, parameters=LIMITS):
    return judge(node(*gpus), parameters, CASE)


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        (remapped(), "pass"),
        (remapped(512), "pass"),
        (remapped(513), "warn"),
        (remapped(514), "warn"),
        (remapped(pending=True), "fail"),
        (remapped(failure=True), "fail"),
    ],
)
def test_rows_are_judged(rows, status):
    (verdict,) = said(findings(gpu(0), gpu(1, remapped=rows)))

    assert verdict[1] == status
    if status != "pass":
        assert verdict == ("GPU-1", status, "gpu_hw.row_remap")


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        (RemappedRows(correctable=0), "skip"),
        (RemappedRows(failure=True), "fail"),
        (RemappedRows(pending=False), "pass"),
    ],
)
def test_members_that_are_not_available_convict_nobody(rows, status):
    assert [item[1] for item in said(findings(gpu(0, remapped=rows)))] == [status]


@pytest.mark.parametrize("suite", ["prolog", "epilog", "health", "preflight", "full"])
def test_jobs_start_while_a_remap_is_pending_and_the_reset_is_asked_for(suite):
    """NVIDIA: new workloads can be launched. A site may fail it, as LIMITS do."""
    parameters = shipped("gpu_row_remap", suite=suite)["gpu_row_remap"]
    (finding,) = findings(gpu(3, remapped=remapped(pending=True)), parameters=parameters)

    assert said([finding]) == [("GPU-3", "warn", "gpu_hw.row_remap")]
    assert finding.message.endswith("reset it between jobs (nvidia-smi --gpu-reset -i 3)")
    (failed,) = findings(gpu(3, remapped=remapped(failure=True)), parameters=parameters)
    assert failed.status.word == "fail"


def test_a_gpu_that_retires_pages_has_no_rows_to_remap():
    old = gpu(0, remapped=None, retired=RetiredPages(single_bit=0, double_bit=0, pending=False))
    (finding,) = findings(old)

    assert finding.status.word == "pass"
    assert "gpu_retired_pages" in finding.message


def test_rows_that_are_not_told_are_skipped():
    (finding,) = findings(gpu(0, remapped=None, unsupported=("nvmlDeviceGetRemappedRows",)))

    assert finding.status.word == "skip"
    assert "not supported" in finding.message
