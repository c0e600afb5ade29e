"""The verdicts on retired pages of GPU memory."""

import pytest
from support.checks import CASE, limit, said
from support.gpus import gpu, node

from gpuops.checks.gpu.gpu_retired_pages import Parameters, judge
from gpuops.host.nvml.facts import RetiredPages

LIMITS = Parameters(pages=limit(warn=16, fail=64), pending=limit(fail=1))


def old(single=0, double=0, *, pending=False):
    pages = RetiredPages(single_bit=single, double_bit=double, pending=pending)
    return gpu(0, remapped=None, retired=pages)


def findings(*gpus):
    return judge(node(*gpus), LIMITS, CASE)


@pytest.mark.parametrize(
    ("single", "double", "status"),
    [
        (0, 0, "pass"),
        (10, 5, "pass"),
        (10, 6, "warn"),
        (10, 7, "warn"),
        (60, 3, "warn"),
        (60, 4, "fail"),
        (0, 65, "fail"),
    ],
)
def test_pages_of_both_kinds_are_judged_together(single, double, status):
    (verdict,) = said(findings(old(single, double)))

    assert verdict[1] == status
    assert verdict[2] == (None if status == "pass" else "gpu_hw.row_remap")


def test_a_page_that_waits_for_a_reset_fails():
    assert said(findings(old(pending=True))) == [("GPU-0", "fail", "gpu_hw.row_remap")]


def test_a_gpu_that_remaps_rows_has_no_pages_to_retire():
    (finding,) = findings(gpu(0))

    assert finding.status.word == "pass"
    assert "gpu_row_remap" in finding.message


def test_pages_that_are_not_told_are_skipped():
    (finding,) = findings(gpu(0, remapped=None, unsupported=("NVML_FI_DEV_RETIRED_SBE",)))

    assert finding.status.word == "skip"
