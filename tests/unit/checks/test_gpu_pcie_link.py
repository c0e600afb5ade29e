"""The verdicts on PCIe width and generation."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.gpus import gpu, node, part

from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation
from gpuops.checks.gpu.gpu_pcie_link import Parameters, judge
from gpuops.host.nvml.facts import PcieLink

LIMITS = Parameters(busy_percent=50, source="a test")
PROFILED = replace(
    CASE,
    profile=replace(
        NO_PROFILE,
        pcie_width=NumberExpectation(value=16, source="us"),
        pcie_generation=NumberExpectation(value=5, source="us"),
    ),
)


def findings(case=CASE, *, busy=0, reasons=0, **link):
    changed = replace(part(gpu(1), "pcie", **link), utilization_percent=busy)
    changed = part(changed, "clocks", reasons=reasons)
    return judge(node(gpu(0), changed), LIMITS, case)


@pytest.mark.parametrize(("width", "bad"), [(8, True), (15, True), (16, False)])
def test_the_width_is_always_judged(width, bad):
    for case, status in ((PROFILED, "fail"), (CASE, "warn")):
        wanted = ("GPU-1", status, "host_hw.pcie") if bad else ("n1", "pass", None)
        assert said(findings(case, width=width)) == [wanted]


@pytest.mark.parametrize(
    ("busy", "bad"), [(None, False), (0, False), (49, False), (50, True), (100, True)]
)
def test_the_generation_is_judged_only_under_load(busy, bad):
    for case, status in ((PROFILED, "fail"), (CASE, "warn")):
        wanted = ("GPU-1", status, "host_hw.pcie") if bad else ("n1", "pass", None)
        assert said(findings(case, busy=busy, generation=4)) == [wanted]


def test_a_gpu_that_was_busy_a_moment_ago_and_idles_now_is_not_under_load():
    found = findings(PROFILED, busy=100, reasons=0x1, generation=1)

    assert said(found) == [("n1", "pass", None)]
    assert said(findings(PROFILED, busy=100, reasons=None, generation=1))[0][1] == "fail"


def test_a_slot_that_can_do_less_than_the_profile_fails_at_rest_too():
    assert said(findings(PROFILED, generation=1, generation_max=4)) == [
        ("GPU-1", "fail", "host_hw.pcie")
    ]
    assert said(findings(PROFILED, width=16, width_max=8)) == [("GPU-1", "fail", "host_hw.pcie")]
    assert said(findings(CASE, generation=1, generation_max=4)) == [("n1", "pass", None)]


def test_the_passing_finding_says_what_was_not_judged():
    (finding,) = findings(PROFILED)

    assert "the generation in use is judged on 0, the others are idle" in finding.message


def test_a_link_that_is_not_told_is_skipped():
    facts = node(gpu(0, pcie=PcieLink(width_max=16)))

    assert said(judge(facts, LIMITS, PROFILED)) == [("n1", "skip", None)]


@pytest.mark.parametrize(
    ("hypervisor", "is_shipped", "status"),
    [("QEMU", True, "warn"), ("QEMU", False, "fail"), (None, True, "fail")],
)
def test_a_shipped_profile_does_not_convict_a_virtual_machine(hypervisor, is_shipped, status):
    width = NumberExpectation(value=16, source="us", is_shipped=is_shipped)
    case = replace(CASE, profile=replace(NO_PROFILE, pcie_width=width))
    facts = replace(node(part(gpu(0), "pcie", width=1)), hypervisor=hypervisor)

    (finding,) = judge(facts, LIMITS, case)

    assert said([finding]) == [("GPU-0", status, "host_hw.pcie")]
    assert ("this virtual machine (QEMU) may not" in finding.message) == (status == "warn")
