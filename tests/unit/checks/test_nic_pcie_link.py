"""The verdicts on the PCIe links of network adapters."""

from dataclasses import replace

import pytest
from support.checks import CASE, said

from gpuops.checks.core.check import NoParameters
from gpuops.checks.core.profile import NO_PROFILE, NumberExpectation, TextExpectation
from gpuops.checks.nic.nic_pcie_link import judge
from gpuops.host.pci.nic_link import NicPcieLink, NicPcieLinks, PcieCapability


def at(generation, width):
    return PcieCapability(generation=generation, width=width)


FULL, UNKNOWN = at(5, 16), PcieCapability()


def link(n, now=FULL, **changes):
    healthy = NicPcieLink(
        address=f"0000:{n:02x}:00.0",
        names=(f"mlx5_{n}",),
        guid=f"guid{n}",
        now=now,
        adapter=FULL,
        port=FULL,
    )
    return replace(healthy, **changes)


def case(width=None, generation=None, count=None, interfaces=()):
    def number(value):
        return None if value is None else NumberExpectation(value=value, source="order 7")

    profile = replace(
        NO_PROFILE,
        nic_pcie_width=number(width),
        nic_pcie_generation=number(generation),
        nic_count=number(count),
        interfaces=TextExpectation(value=interfaces, source="us") if interfaces else None,
    )
    return replace(CASE, profile=profile)


PROFILED = case(width=16, generation=5)


def findings(*links, profiled=CASE):
    return judge(NicPcieLinks(links), NoParameters(), profiled)


@pytest.mark.parametrize(("now", "bad"), [(FULL, 0), (at(5, 8), 1), (at(4, 16), 1), (at(1, 1), 2)])
def test_less_than_the_profile_fails_and_less_than_the_slot_warns(now, bad):
    for profiled, status in ((PROFILED, "fail"), (CASE, "warn")):
        verdicts = said(findings(link(0), link(1, now), profiled=profiled))

        expected = [("guid1", status, "host_hw.pcie")] * bad or [("n1", "pass", None)]
        assert verdicts == expected


def test_a_finding_names_the_adapter_its_address_and_both_numbers():
    (finding,) = findings(link(1, at(5, 8), names=("mlx5_1", "ib1")))

    assert finding.message == "mlx5_1/ib1 (0000:01:00.0): PCIe lanes: 8, expected 16"
    assert (finding.value, finding.unit, finding.threshold) == (8, "lanes", ">= 16")
    assert not finding.hardware_reported
    assert not finding.shared_cause


def test_an_adapter_in_a_slower_slot_is_not_degraded():
    assert said(findings(link(0, at(4, 8), port=at(4, 8)))) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    ("now", "count", "status"),
    [(8, None, "warn"), (4, None, "fail"), (8, 1, "pass"), (8, 2, "fail")],
)
def test_a_narrow_slot_warns_unless_the_profile_counts(now, count, status):
    narrow = link(1, at(5, now), port=at(5, 8))
    found = findings(link(0), narrow, profiled=case(width=16, count=count))

    assert [item.status.word for item in found] == [status]
    assert ("nic_count" in found[0].message) == (status == "warn")


@pytest.mark.parametrize(
    "odd",
    [
        link(0, at(1, 1), port=UNKNOWN),
        link(0, at(1, 1), adapter=UNKNOWN),
        link(0, PcieCapability(generation=5), port=UNKNOWN, adapter=UNKNOWN),
    ],
)
def test_what_is_not_known_convicts_nobody_without_a_profile(odd):
    assert said(findings(odd)) == [("n1", "pass", None)]


def test_links_that_are_not_shown_are_skipped_even_with_a_profile():
    (finding,) = findings(link(0, UNKNOWN), profiled=PROFILED)

    assert (finding.status.word, finding.message) == (
        "skip",
        "no network adapter shows its PCIe link",
    )
    assert said(findings(profiled=PROFILED)) == [("n1", "skip", None)]


def test_only_adapters_for_rdma_and_those_of_the_profile_are_judged():
    slow = link(1, at(1, 1), guid=None, names=("ens1f0",))

    assert said(findings(slow)) == [("n1", "skip", None)]
    assert said(findings(link(0), slow)) == [("n1", "pass", None)]
    assert (
        said(findings(slow, profiled=case(interfaces=("ens1f0",))))
        == [("pci 0000:01:00.0", "warn", "host_hw.pcie")] * 2
    )


def test_adapters_of_another_kind_need_not_reach_the_profile():
    onboard = link(8, at(3, 8), adapter=at(3, 8))

    assert said(findings(link(0), onboard, profiled=PROFILED)) == [("n1", "pass", None)]
    assert said(findings(onboard, profiled=PROFILED))[0][1] == "fail"


@pytest.mark.parametrize(("count", "status"), [(1, "pass"), (2, "fail")])
def test_with_as_many_good_adapters_as_the_profile_counts_others_are_ignored(count, status):
    profiled = case(width=16, count=count)

    assert said(findings(link(0), link(1, at(5, 8)), profiled=profiled))[0][1] == status
