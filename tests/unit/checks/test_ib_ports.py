"""The verdicts on RDMA network ports."""

from dataclasses import replace

import pytest
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.profile import (
    NumberExpectation,
    NumbersExpectation,
    Profile,
    TextExpectation,
)
from gpuops.checks.nic.ib_ports import Parameters, counters, judge
from gpuops.host.infiniband import Port, RdmaPorts
from gpuops.host.node_state import Counters, CounterSample

LIMITS = Parameters(downs_per_day=limit(warn=1, fail=5))


def port(n, **changes):
    healthy = Port(
        device=f"mlx5_{n}",
        number=1,
        guid=f"guid{n}",
        state="ACTIVE",
        phys_state="LinkUp",
        rate_gbs=50.0,
        link_layer="InfiniBand",
        firmware="28.39.1002",
    )
    return replace(healthy, **changes)


def fabric(*changed, count=8):
    ports = {n: port(n) for n in range(count)}
    ports |= {int(item.device.removeprefix("mlx5_")): item for item in changed}
    return RdmaPorts(tuple(ports.values()))


def case(count=None, rate_gbs=None, firmware=(), earlier=None):
    rates = rate_gbs if isinstance(rate_gbs, tuple) else (rate_gbs,)
    profile = Profile(
        name="p",
        nic_count=None if count is None else NumberExpectation(value=count, source="order 7"),
        nic_rate_gbs=None
        if rate_gbs is None
        else NumbersExpectation(value=rates, source="order 7"),
        nic_firmware=TextExpectation(value=firmware, source="site") if firmware else None,
    )
    samples = ()
    if earlier is not None:
        samples = (CounterSample(boot_id="b", since_boot_s=0.0, t_us=0, values=earlier),)
    seen = Counters(boot_id="b", since_boot_s=3600.0, t_us=3600_000_000, samples=samples)
    return JudgeContext(node=NODE, profile=profile, counters=seen)


def down(n, phys_state="Polling"):
    return port(n, state="DOWN", phys_state=phys_state, rate_gbs=2.5)


@pytest.mark.parametrize(("there", "status"), [(7, "fail"), (8, "pass"), (9, "pass")])
def test_active_adapters_are_counted_against_the_profile(there, status):
    count, *others = judge(fabric(count=there), LIMITS, case(count=8))

    assert (count.status.word, count.value, others) == (status, there, [])


def test_a_port_that_is_down_fails_where_every_adapter_is_expected():
    findings = judge(fabric(down(3)), LIMITS, case(count=8))

    assert said(findings) == [
        ("n1", "fail", "network.port_down"),
        ("guid3", "fail", "network.port_down"),
    ]
    assert findings[1].message == "mlx5_3/1: InfiniBand is DOWN, physically Polling"


def test_ports_beyond_those_expected_are_nobodys_concern():
    facts = fabric(down(8), port(9, rate_gbs=12.5), count=10)

    assert said(judge(facts, LIMITS, case(count=8, rate_gbs=50))) == [("n1", "pass", None)]


def test_with_adapters_to_spare_the_node_fails_and_the_ports_are_only_told():
    findings = said(judge(fabric(down(3), down(8), count=9), LIMITS, case(count=8)))

    assert [status for _, status, _ in findings] == ["fail", "warn", "warn"]


def test_without_an_expectation_a_port_that_is_down_only_warns():
    findings = said(judge(fabric(down(3)), LIMITS, CASE))

    assert findings == [("n1", "skip", None), ("guid3", "warn", "network.port_down")]
    assert len(judge(fabric(down(3, "Disabled")), LIMITS, CASE)) == 1


@pytest.mark.parametrize(
    ("rate_gbs", "bad"), [(49.9, True), (50.0, False), (100.0, False), (None, True)]
)
def test_a_port_below_its_rate_does_not_count(rate_gbs, bad):
    findings = said(judge(fabric(port(2, rate_gbs=rate_gbs)), LIMITS, case(count=8, rate_gbs=50)))

    fails = [("n1", "fail", "network.port_down"), ("guid2", "fail", "network.port_down")]
    assert findings == (fails if bad else [("n1", "pass", None)])


STORAGE = port(8, rate_gbs=3.125, link_layer="Ethernet")
MIXED = (*[50.0] * 8, 3.125)


@pytest.mark.parametrize("count", [None, 9])
def test_each_adapter_must_have_a_rate_of_the_list(count):
    profiled = case(count=count, rate_gbs=MIXED)

    assert said(judge(fabric(STORAGE, count=9), LIMITS, profiled)) == [("n1", "pass", None)]
    (fails, *bad) = judge(fabric(port(7, rate_gbs=12.5), STORAGE, count=9), LIMITS, profiled)
    assert said([fails, *bad]) == [
        ("n1", "fail", "network.port_down"),
        ("guid7", "fail", "network.port_down"),
    ]
    assert fails.message == (
        "8 of 9 network adapters are active at the rates of the profile (8 x 50, 1 x 3.125 GB/s)"
    )
    assert (bad[0].value, bad[0].threshold) == (12.5, ">= 50 GB/s")


def test_of_two_with_one_rate_none_is_blamed_alone():
    """One fell to the rate of the storage port: the node fails, and both are named."""
    facts = fabric(port(7, rate_gbs=3.125), STORAGE, count=9)
    findings = said(judge(facts, LIMITS, case(rate_gbs=MIXED)))

    assert findings == [
        ("n1", "fail", "network.port_down"),
        ("guid7", "warn", "network.port_down"),
        ("guid8", "warn", "network.port_down"),
    ]


def test_the_slow_adapter_of_a_list_is_missed_too():
    dead = port(8, state="DOWN", phys_state="Polling", rate_gbs=2.5)
    findings = said(judge(fabric(dead, count=9), LIMITS, case(rate_gbs=MIXED)))

    assert findings == [
        ("n1", "fail", "network.port_down"),
        ("guid8", "fail", "network.port_down"),
    ]


@pytest.mark.parametrize(("count", "status"), [(8, "pass"), (9, "fail"), (10, "fail")])
def test_a_count_takes_the_fastest_of_the_list(count, status):
    facts = fabric(replace(STORAGE, state="DOWN"), count=9)
    (first, *_) = judge(facts, LIMITS, case(count=count, rate_gbs=MIXED))

    assert first.status.word == status


def test_other_firmware_than_the_profile_names_fails_by_adapter():
    facts = fabric(port(2, firmware="28.38.900"), port(5, firmware=None))
    _, wrong, untold = judge(facts, LIMITS, case(count=8, firmware=("28.39.1002",)))

    assert said([wrong]) == [("guid2", "fail", "host_sw.config")]
    assert said([untold]) == [("guid5", "skip", None)]


@pytest.mark.parametrize(
    ("downs", "status"), [(0, None), (1, "warn"), (4, "warn"), (5, "fail"), (6, "fail")]
)
@pytest.mark.parametrize("name", ["link_downed", "carrier_downs"])
def test_lost_links_are_judged_by_their_growth(name, downs, status):
    earlier = {f"ib_ports:guid1:1/{name}": 7.0}
    facts = fabric(port(1, counters={name: 7 + downs}))
    flaps = said(judge(facts, LIMITS, case(count=8, earlier=earlier)))[1:]

    assert flaps == ([("guid1", status, "network.link_flap")] if status else [])


def test_lost_links_of_before_the_first_look_count_nothing():
    facts = fabric(port(1, counters={"link_downed": 200}))

    assert said(judge(facts, LIMITS, case(count=8))) == [("n1", "pass", None)]
    assert counters(facts) == {"ib_ports:guid1:1/link_downed": 200}


def test_a_node_without_adapters_is_skipped_unless_some_are_expected():
    assert said(judge(RdmaPorts(), LIMITS, CASE)) == [("n1", "skip", None)]
    assert said(judge(RdmaPorts(), LIMITS, case(count=8))) == [("n1", "fail", "network.port_down")]


@pytest.mark.parametrize(("value", "status"), [(254, None), (255, "skip"), (256, None)])
def test_a_count_of_lost_links_that_is_full_tells_nothing(value, status):
    facts = fabric(port(2, counters={"link_downed": value}))
    _count, *found = judge(facts, LIMITS, case(earlier={"ib_ports:guid2:1/link_downed": value}))

    assert [finding.status.word for finding in found] == ([status] if status else [])
