"""The verdicts on NVLinks that are up."""

from dataclasses import replace

import pytest
from support.checks import CASE, said
from support.gpus import eight, gpu, node, part, shipped_profile

from gpuops.checks.core.check import NoParameters
from gpuops.checks.fabric.nvlink import judge
from gpuops.host.nvml.facts import NvLink

PROFILED = replace(CASE, profile=shipped_profile())


def links(up, down=0, untold=0):
    active = [True] * up + [False] * down + [None] * untold
    return tuple(NvLink(link=number, active=state) for number, state in enumerate(active))


def findings(nvlinks, case=CASE, **changes):
    return judge(node(*eight()[1:], gpu(9, nvlinks=nvlinks, **changes)), NoParameters(), case)


@pytest.mark.parametrize(("up", "bad"), [(0, True), (17, True), (18, False), (19, False)])
def test_fewer_than_the_profile_fails_and_fewer_than_the_peers_warns(up, bad):
    for case, status in ((PROFILED, "fail"), (CASE, "warn")):
        (verdict,) = said(findings(links(up, 18 - min(up, 18)), case))
        assert verdict == (("GPU-9", status, "gpu_hw.nvlink") if bad else ("n1", "pass", None))


def test_the_links_that_are_down_are_named():
    (finding,) = findings(links(16, down=2), PROFILED)

    assert finding.message == "GPU 9: 16 of 18 NVLinks are up (down: 16, 17)"


def test_links_that_gave_no_answer_convict_nobody():
    assert said(findings(links(16, untold=2), PROFILED))[1:] == [("n1", "skip", None)]
    assert said(findings(links(16, down=1, untold=1), PROFILED)) == [
        ("GPU-9", "fail", "gpu_hw.nvlink")
    ]


def test_links_that_are_not_told_are_skipped():
    assert said(findings(None, PROFILED))[1:] == [("n1", "skip", None)]


def test_a_divided_gpu_does_not_use_its_links():
    mig = part(gpu(9), "modes", mig=True).modes

    assert said(findings(links(0, down=18), PROFILED, modes=mig))[1:] == [("n1", "skip", None)]


def test_a_gpu_without_peers_has_nobody_to_link_to():
    facts = node(gpu(0, nvlinks=links(0, down=18)))
    (finding,) = judge(facts, NoParameters(), PROFILED)

    assert finding.status.word == "skip"
    assert "the only GPU here has no peer to link to (0 up)" in finding.message


def test_cards_without_links_are_skipped():
    facts = node(*(gpu(n, nvlinks=()) for n in range(2)))
    assert said(judge(facts, NoParameters(), CASE)) == [("n1", "skip", None)]


def test_models_are_not_compared_with_each_other():
    facts = node(*eight()[:4], gpu(4, "a100-sxm-80gb"))

    assert said(judge(facts, NoParameters(), CASE)) == [("n1", "pass", None)]


def test_a_disagreement_without_a_majority_convicts_nobody():
    facts = node(gpu(0), gpu(1, nvlinks=links(17, down=1)))

    assert said(judge(facts, NoParameters(), CASE)) == [("n1", "skip", None)]


@pytest.mark.parametrize(
    ("hypervisor", "is_shipped", "status"),
    [("QEMU", True, "warn"), ("QEMU", False, "fail"), (None, True, "fail")],
)
def test_a_shipped_profile_does_not_convict_a_virtual_machine(hypervisor, is_shipped, status):
    said_by = replace(shipped_profile().nvlink_count, is_shipped=is_shipped)
    case = replace(CASE, profile=replace(shipped_profile(), nvlink_count=said_by))
    facts = replace(node(*eight()[1:], gpu(9, nvlinks=links(0, 18))), hypervisor=hypervisor)

    (finding,) = judge(facts, NoParameters(), case)

    assert said([finding]) == [("GPU-9", status, "gpu_hw.nvlink")]
    assert ("this virtual machine (QEMU) may not" in finding.message) == (status == "warn")
