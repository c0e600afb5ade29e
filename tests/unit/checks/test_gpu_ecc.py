"""The verdicts on memory errors that ECC could not correct."""

import pytest
from support import kernel_log as log
from support.checks import CASE, limit, said
from support.gpus import address, gpu, node, part, shipped

from gpuops.checks.gpu import gpu_xid
from gpuops.checks.gpu.gpu_ecc import Parameters, judge
from gpuops.host.nvml.facts import EccErrors

LIMITS = Parameters(volatile=limit(fail=1), sram_aggregate=limit(fail=5))


def findings(ecc, **changes):
    return judge(node(gpu(0), gpu(1, ecc=ecc, **changes)), LIMITS, CASE)


@pytest.mark.parametrize(
    ("ecc", "status"),
    [
        (EccErrors(volatile_uncorrected=0), "pass"),
        (EccErrors(volatile_uncorrected=1), "warn"),
        (EccErrors(volatile_uncorrected=2), "warn"),
        (EccErrors(sram_volatile_uncorrected=1), "warn"),
        (EccErrors(volatile_uncorrected=0, sram_volatile_uncorrected=1), "warn"),
        (EccErrors(sram_aggregate_uncorrected=4), "pass"),
        (EccErrors(sram_aggregate_uncorrected=5), "fail"),
        (EccErrors(sram_aggregate_uncorrected=6), "fail"),
        (EccErrors(sram_threshold_exceeded=False), "pass"),
        (EccErrors(sram_threshold_exceeded=True), "fail"),
        (EccErrors(volatile_uncorrected=0, aggregate_uncorrected=9), "pass"),
    ],
)
def test_uncorrected_errors_are_judged(ecc, status):
    (verdict,) = said(findings(ecc))

    assert verdict[1] == status
    if status != "pass":
        assert verdict == ("GPU-1", status, "gpu_hw.ecc_uncorrectable")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"recovery_action": 0}, "warn"),
        ({"recovery_action": None}, "warn"),
        ({"recovery_action": 1}, "fail"),
        ({"remapped": None}, "fail"),
    ],
    ids=["no action", "an older driver", "a reset is wanted", "before Ampere"],
)
def test_an_error_that_may_be_contained_warns(changes, status):
    (verdict,) = said(findings(EccErrors(volatile_uncorrected=1), **changes))

    assert verdict == ("GPU-1", status, "gpu_hw.ecc_uncorrectable")


@pytest.mark.parametrize(("code", "status"), [(94, "warn"), (95, "fail"), (48, "fail")], ids=str)
def test_with_the_kernels_log_the_two_checks_say_the_same(tmp_path, code, status):
    """Its count alone never convicts what Xid 94 lets run, and acquits nothing."""
    line = f"NVRM: Xid (PCI:{address(1)[:-2]}): {code}, pid=7, name=python, Contained: SM (0x1)"
    by_log = gpu_xid.judge(log.facts(tmp_path, line), gpu_xid.Parameters(), CASE)
    by_count = findings(EccErrors(volatile_uncorrected=1))

    assert max(finding.status for finding in (*by_log, *by_count)).word == status


def test_each_kind_of_error_is_told():
    bad = EccErrors(
        volatile_uncorrected=1, sram_aggregate_uncorrected=5, sram_threshold_exceeded=True
    )

    assert [finding.value for finding in findings(bad)] == [1, 5, 1]


def test_a_flag_that_is_not_told_is_said():
    (finding,) = findings(EccErrors(volatile_uncorrected=0))

    assert finding.message.endswith("1 do not report the SRAM flag")


def test_errors_that_are_not_counted_are_skipped():
    off = part(gpu(1), "modes", ecc=False).modes
    untold = findings(EccErrors(), unsupported=("nvmlDeviceGetTotalEccErrors",))

    assert said(untold) == [("n1", "pass", None), ("n1", "skip", None)]
    assert findings(EccErrors(), modes=off)[1].message == "not judged on GPU 1: ECC is off"


def test_a_lifetime_count_of_sram_errors_warns_and_the_drivers_own_flag_fails():
    parameters = shipped("gpu_ecc", suite="prolog")["gpu_ecc"]
    aged = part(gpu(0), "ecc", sram_aggregate_uncorrected=500)
    flagged = part(gpu(0), "ecc", sram_aggregate_uncorrected=5, sram_threshold_exceeded=True)

    assert [item.status.word for item in judge(node(aged), parameters, CASE)] == ["warn"]
    assert [item.status.word for item in judge(node(flagged), parameters, CASE)] == ["warn", "fail"]
