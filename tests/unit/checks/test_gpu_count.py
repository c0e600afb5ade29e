"""The verdicts on the number of GPUs and on each that NVML cannot open."""

import pytest
from support.checks import CASE, said

from gpuops.checks.gpu_count import Parameters, judge
from gpuops.host.gpu_facts import NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.host.gpus import Gpus
from gpuops.host.sysfs import PciGpu

ABSENT = NvmlSnapshot(status=NvmlStatus.ABSENT, error="nvmlInit: NVML Shared Library Not Found")


def bus(count):
    return tuple(PciGpu(f"0000:{n:02x}:00.0", answers=True, driver="nvidia") for n in range(count))


def nvml(count, broken=None):
    gpus = tuple(
        NvmlGpu(index=n, error="nvmlDeviceGetHandleByIndex: bad", error_code=broken[n])
        if broken and n in broken
        else NvmlGpu(index=n, uuid=f"GPU-{n}", address=f"0000:{n:02x}:00.0", name="H100")
        for n in range(count)
    )
    return NvmlSnapshot(status=NvmlStatus.OK, driver="999.1", gpus=gpus)


def findings(snapshot, *, on_bus=0, expected=None):
    parameters = Parameters(expected=expected, source="flag")
    return said(judge(Gpus(bus(on_bus), snapshot), parameters, CASE))


def test_no_gpu_and_none_expected_is_skipped():
    assert findings(ABSENT) == [("n1", "skip", None)]
    assert findings(nvml(0)) == [("n1", "skip", None)]


def test_no_gpu_but_some_expected_fails():
    assert findings(ABSENT, expected=8) == [("n1", "fail", "gpu_hw.missing")]
    assert findings(nvml(0), expected=8) == [("n1", "fail", "gpu_hw.missing")]


def test_no_gpu_as_expected_passes():
    assert findings(ABSENT, expected=0) == [("n1", "pass", None)]


def test_all_gpus_there_passes_and_shows_what_they_are():
    (finding,) = judge(Gpus(bus(8), nvml(8)), Parameters(expected=8, source="flag"), CASE)

    assert finding.status.word == "pass"
    assert (finding.value, finding.unit, finding.threshold, finding.source) == (
        8,
        "GPUs",
        "= 8",
        "flag",
    )
    assert finding.message == "8 GPUs (H100), driver 999.1"


def test_fewer_than_a_person_wrote_down_fails():
    assert findings(nvml(7), on_bus=8, expected=8) == [("n1", "fail", "gpu_hw.missing")]


def test_fewer_than_the_bus_shows_only_warns():
    """A container or a job's cgroup rightly hides GPUs from NVML, and not from sysfs."""
    assert findings(nvml(7), on_bus=8) == [("n1", "warn", "gpu_hw.missing")]


def test_more_than_expected_warns():
    assert findings(nvml(8), on_bus=8, expected=4) == [("n1", "warn", None)]


def test_without_a_view_of_the_bus_the_count_of_nvml_stands():
    assert findings(nvml(2)) == [("n1", "pass", None)]


def test_gpus_without_a_driver_library_fail_only_where_they_are_expected():
    assert findings(ABSENT, on_bus=8, expected=8) == [("n1", "fail", "gpu_sw.driver")]
    assert findings(ABSENT, on_bus=8, expected=0) == [("n1", "pass", None)]

    (finding,) = judge(Gpus(bus(8), ABSENT), Parameters(), CASE)
    assert (finding.status.word, finding.unknown_reason) == ("unknown", "missing_tool")


@pytest.mark.parametrize(
    ("code", "status", "failure_class"),
    [
        (15, "fail", "gpu_hw.fell_off_bus"),
        (16, "fail", "gpu_sw.driver"),
        (999, "warn", "gpu_sw.driver"),
    ],
    ids=["lost", "reset required", "unknown error"],
)
def test_a_gpu_that_cannot_be_opened_is_the_drivers_verdict(code, status, failure_class):
    count, broken = findings(nvml(8, {3: code}), on_bus=8)

    assert count == ("n1", "warn", "gpu_hw.missing")
    assert broken == ("n1", status, failure_class)


@pytest.mark.parametrize(("expected", "status"), [(None, "warn"), (8, "fail")])
def test_an_nvml_that_will_not_start_fails_only_where_gpus_are_expected(expected, status):
    broken = NvmlSnapshot(status=NvmlStatus.ERROR, error="nvmlInit: mismatch", error_code=18)

    assert findings(broken, on_bus=8, expected=expected) == [("n1", status, "gpu_sw.driver")]


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (NvmlStatus.TIMEOUT, None, "timeout"),
        (NvmlStatus.CRASH, None, "crash"),
        (NvmlStatus.ERROR, 4, "no_permission"),
    ],
)
def test_an_nvml_that_says_nothing_convicts_nobody(status, code, reason):
    silent = NvmlSnapshot(status=status, error="NVML gave no answer in 7.0 s", error_code=code)
    (finding,) = judge(Gpus(bus(8), silent), Parameters(expected=8, source="flag"), CASE)

    assert (finding.status.word, finding.unknown_reason) == ("unknown", reason)
