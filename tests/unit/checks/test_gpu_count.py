"""The verdicts on the number of GPUs."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.fake_root import FakeRoot
from support.gpus import gpu, node, shipped, silent

from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation
from gpuops.checks.gpu.gpu_count import Parameters, judge
from gpuops.host.nvml.facts import UNREADABLE, CallError, NvmlStatus
from gpuops.host.sysfs import count_amd_gpus

ABSENT = {"status": NvmlStatus.ABSENT, "error": "nvmlInit: NVML Shared Library Not Found"}
PROFILED = replace(
    CASE, profile=replace(NO_PROFILE, gpu_count=NumberExpectation(value=8, source="a test"))
)


def gpus(count, lost=()):
    return [
        gpu(n, uuid=None, error="nvmlDeviceGetHandleByIndex: lost", error_code=15)
        if n in lost
        else gpu(n)
        for n in range(count)
    ]


def findings(facts, *, expected=None, case=CASE):
    return said(judge(facts, Parameters(expected=expected, source="flag"), case))


def test_no_gpu_and_none_expected_is_skipped():
    assert findings(node(**ABSENT)) == [("n1", "skip", None)]
    assert findings(node()) == [("n1", "skip", None)]


def test_gpus_of_amd_are_said_to_be_out_of_scope(tmp_path):
    facts = replace(node(**ABSENT), amd=8)
    (finding,) = judge(facts, Parameters(), CASE)

    assert said([finding]) == [("n1", "skip", None)]
    assert finding.message.startswith("8 GPUs of AMD on the PCI bus: gpuops checks")
    assert findings(facts, expected=8) == [("n1", "fail", "gpu_hw.missing")]
    assert findings(replace(node(gpu(0)), amd=1)) == [("n1", "pass", None)]
    root = FakeRoot(tmp_path).gpu("0000:1b:00.0")
    for number, kind in enumerate(["0x038000", "0x120000", "0x060400"]):
        device = f"sys/bus/pci/devices/0000:0{number}:00.0"
        root.write(f"{device}/vendor", "0x1002").write(f"{device}/class", kind)
    assert count_amd_gpus(root.path) == 2


def test_no_gpu_but_some_expected_fails():
    assert findings(node(**ABSENT), expected=8) == [("n1", "fail", "gpu_hw.missing")]
    assert findings(node(), expected=8) == [("n1", "fail", "gpu_hw.missing")]
    assert findings(node(**ABSENT), case=PROFILED) == [("n1", "fail", "gpu_hw.missing")]


def test_no_gpu_as_expected_passes():
    assert findings(node(**ABSENT), expected=0) == [("n1", "pass", None)]


def test_all_gpus_there_passes_and_shows_what_they_are():
    (finding,) = judge(node(*gpus(8)), Parameters(expected=8, source="flag"), CASE)

    assert finding.status.word == "pass"
    assert (finding.value, finding.unit, finding.threshold) == (8, "GPUs", "= 8")
    assert finding.source == "flag"
    assert finding.message == "8 GPUs (NVIDIA H100 80GB HBM3), driver 550.163.01"


@pytest.mark.parametrize(("count", "status"), [(7, "fail"), (8, "pass"), (9, "warn")])
def test_a_number_that_a_person_wrote_down_must_be_met(count, status):
    facts = node(*gpus(count), on_bus=8)

    assert [item[1] for item in findings(facts, expected=8)] == [status]
    assert [item[1] for item in findings(facts, case=PROFILED)] == [status]


def test_the_flag_goes_before_the_profile():
    (finding,) = judge(node(*gpus(4)), Parameters(expected=4, source="flag"), PROFILED)
    assert (finding.status.word, finding.source) == ("pass", "flag")

    (finding,) = judge(node(*gpus(4)), Parameters(), PROFILED)
    assert (finding.status.word, finding.source) == ("fail", "profile none: a test")


def test_fewer_than_the_bus_shows_only_warns():
    """A container or a job's cgroup rightly hides GPUs from NVML, and not from sysfs."""
    assert findings(node(*gpus(7), on_bus=8)) == [("n1", "warn", "gpu_hw.missing")]


@pytest.mark.parametrize(("on_bus", "status"), [(7, "fail"), (8, "warn"), (9, "warn")])
def test_inside_a_job_gpus_that_the_bus_shows_may_be_hidden(on_bus, status):
    inside = Parameters(inside_job=True)
    (finding,) = judge(node(*gpus(4), on_bus=on_bus), inside, PROFILED)

    assert finding.status.word == status
    assert shipped("gpu_count", suite="preflight")["gpu_count"] == inside
    assert not shipped("gpu_count", suite="prolog")["gpu_count"].inside_job


def test_a_gpu_that_fell_off_the_bus_is_not_hidden():
    facts = node(*gpus(7), on_bus=8)
    fallen = replace(facts, pci=(*facts.pci[:7], replace(facts.pci[7], answers=False)))

    assert judge(fallen, Parameters(inside_job=True), PROFILED)[0].status.word == "fail"


def test_a_gpu_that_nvml_cannot_open_is_missing():
    assert findings(node(*gpus(8, lost=[3])), expected=8) == [("n1", "fail", "gpu_hw.missing")]


def test_a_gpu_whose_uuid_is_garbage_is_not_missing():
    unread = CallError("nvmlDeviceGetUUID", UNREADABLE, "UnicodeDecodeError")
    odd = gpu(7, uuid=None, error="nvmlDeviceGetUUID: no", error_code=UNREADABLE, errors=(unread,))

    assert findings(node(*gpus(7), odd), expected=8) == [("n1", "pass", None)]


def test_a_gpu_that_gives_no_answer_is_not_missing():
    """Its first hang convicts nobody, and the second is judged by gpu_driver."""
    hung = replace(gpu(7), uuid=None, hung_call="nvmlDeviceGetHandleByIndex")
    seven = tuple(gpu(index) for index in range(7))

    assert findings(node(*seven, hung), expected=8) == [("n1", "pass", None)]


def test_without_a_view_of_the_bus_the_count_of_nvml_stands():
    assert findings(node(*gpus(2), on_bus=0)) == [("n1", "pass", None)]


def test_gpus_without_a_driver_library_fail_only_where_they_are_expected():
    facts = silent(**ABSENT)
    assert findings(facts, expected=2) == [("n1", "fail", "gpu_sw.driver")]
    assert findings(facts, expected=0) == [("n1", "pass", None)]

    (finding,) = judge(facts, Parameters(), CASE)
    assert (finding.status.word, finding.unknown_reason) == ("unknown", "missing_tool")


@pytest.mark.parametrize(("listed", "status"), [(0, "fail"), (1, "warn"), (2, "pass")])
def test_gpus_that_slurm_hands_out_are_missing_where_nvml_lists_none_at_all(listed, status):
    case = replace(CASE, gpus=frozenset({"0", "1"}))

    assert findings(node(*gpus(listed), on_bus=2), case=case)[0][1] == status
    assert findings(node(), case=case)[0][1] == "fail"
    assert findings(silent(**ABSENT), case=case)[0][1] == "unknown"
    by_slurm = replace(CASE, gpus=frozenset({"slurm:0", "slurm:1"}))
    assert findings(silent(**ABSENT), case=by_slurm)[0][1] == "fail"
    assert findings(node(**ABSENT), case=by_slurm)[0][1] == "skip"


GIVEN = replace(CASE, gpus=frozenset({"slurm:0", "slurm:1"}))


@pytest.mark.parametrize("case", [GIVEN, PROFILED])
def test_a_driver_that_does_not_start_counts_none_of_the_gpus_that_are_expected(case):
    facts = silent(NvmlStatus.ERROR, error="nvmlInit: no", error_code=9)

    assert findings(facts, case=case) == [("n1", "fail", "gpu_sw.driver")]
    assert findings(facts, expected=0, case=case) == [("n1", "pass", None)]


def test_a_gpu_that_the_job_was_given_and_nvml_does_not_list_fails():
    assert findings(node(gpu(0), on_bus=1), case=GIVEN) == [
        ("n1", "pass", None),
        ("n1", "fail", "gpu_hw.missing"),
    ]
    assert findings(node(*gpus(2)), case=GIVEN) == [("n1", "pass", None)]


@pytest.mark.parametrize(("code", "missing"), [(999, True), (15, True), (4, False), (17, False)])
def test_a_gpu_that_the_job_was_given_and_nvml_cannot_open_fails(code, missing):
    closed = gpu(
        1,
        uuid=None,
        minor=None,
        error="nvmlDeviceGetHandleByIndex: no",
        error_code=code,
        errors=(CallError("nvmlDeviceGetHandleByIndex", code, "no"),),
    )
    found = judge(node(gpu(0), closed), Parameters(), GIVEN)
    elsewhere = replace(GIVEN, gpus=frozenset({"slurm:0"}))

    assert [item.status.word for item in found] == (["warn", "fail"] if missing else ["pass"])
    assert judge(node(gpu(0), closed), Parameters(), elsewhere)[1:] == []


def test_where_slurms_number_may_be_another_gpu_none_that_cannot_be_opened_fails():
    """Its minor number is not known, and another GPU has the one that Slurm named."""
    closed = gpu(1, uuid=None, minor=None, error="no", error_code=999)
    other = gpu(0, minor=1)
    case = replace(CASE, gpus=frozenset({"slurm:1"}))

    assert "fail" not in [item[1] for item in findings(node(other, closed), case=case)]


def test_gpus_asked_for_by_name_that_are_not_listed_warn():
    case = replace(CASE, gpus=frozenset({"0", "GPU-9"}))

    assert findings(node(*gpus(2)), case=case) == [
        ("n1", "pass", None),
        ("n1", "warn", "gpu_hw.missing"),
    ]


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (NvmlStatus.TIMEOUT, None, "timeout"),
        (NvmlStatus.CRASH, None, "crash"),
        (NvmlStatus.ERROR, 4, "no_permission"),
        (NvmlStatus.ERROR, 17, "missing_tool"),
    ],
)
def test_an_nvml_that_says_nothing_is_judged_elsewhere(status, code, reason):
    facts = silent(status, error="NVML gave no answer in 7.0 s", error_code=code)
    (finding,) = judge(facts, Parameters(expected=2, source="flag"), CASE)

    assert (finding.status.word, finding.unknown_reason) == ("unknown", reason)
    assert finding.message == "NVML gave no answer in 7.0 s; see gpu_driver"
