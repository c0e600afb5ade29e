"""The verdicts on network interfaces and bonds."""

from dataclasses import replace

import pytest
from support.checks import CASE, limit, said
from support.counters import HOUR_S, grown_from

from gpuops.checks.core.profile import NO_PROFILE, TextExpectation
from gpuops.checks.nic.interfaces import Parameters, counters, judge
from gpuops.host.net.interfaces import Bond, BondSlave, Interface, Interfaces

LIMITS = Parameters(downs_per_day=limit(warn=1, fail=5))
BAD = "network.port_down"
DEFAULTED = 0x45


def interface(name, **changes):
    healthy = Interface(
        name=name,
        address=f"mac-{name}",
        is_physical=True,
        is_switched_on=True,
        carrier=True,
        operstate="up",
    )
    return replace(healthy, **changes)


def down(name, **changes):
    return interface(name, **{"carrier": False, "operstate": "down"} | changes)


def slave(name, *, status="up", state=0x3D, **changes):
    part = BondSlave(mii_status=status, actor_state=state)
    return interface(name, **{"slave": part, "rate_gbs": 3.125} | changes)


def bonded(*slaves, mode="802.3ad", on=True, **changes):
    names = tuple(item.name for item in slaves)
    bond = Bond(name="bond0", mode=mode, slaves=names, **changes)
    master = interface("bond0", is_physical=False, is_switched_on=on)
    return Interfaces((master, *slaves), (bond,))


def profiled(*names, case=CASE):
    expected = TextExpectation(value=names, source="order 7")
    return replace(case, profile=replace(NO_PROFILE, name="p", interfaces=expected))


def findings(facts, case=CASE):
    return judge(facts, LIMITS, case)


def test_an_interface_of_the_profile_without_link_fails_as_its_switch_may_be_down():
    facts = Interfaces((interface("ens0"), down("ens1")))
    (finding,) = findings(facts, profiled("ens0", "ens1"))

    assert said([finding]) == [("mac-ens1", "fail", BAD)]
    assert finding.shared_cause
    assert not finding.hardware_reported
    assert (finding.message, finding.source) == ("ens1 has no link", "profile p: order 7")


@pytest.mark.parametrize(
    ("facts", "entity", "text"),
    [
        (Interfaces((interface("ens0"),)), "ens1", "ens1 does not exist"),
        (
            Interfaces((interface("ens0"), down("ens1", carrier=None, is_switched_on=False))),
            "mac-ens1",
            "ens1 is switched off (ip link set … up)",
        ),
    ],
)
def test_one_that_is_missing_or_switched_off_is_this_nodes_own(facts, entity, text):
    (finding,) = findings(facts, profiled("ens0", "ens1"))

    assert said([finding]) == [(entity, "fail", BAD)]
    assert (finding.shared_cause, finding.message) == (False, text)


def test_interfaces_with_a_link_pass_by_name():
    (finding,) = findings(Interfaces((interface("ens0"), down("usb0"))), profiled("ens0"))

    assert said([finding]) == [("n1", "pass", None)]
    assert (finding.value, finding.message) == (1, "1 of 1 interfaces have a link: ens0")


def test_one_that_does_not_say_is_skipped():
    silent = interface("ens0", carrier=None, operstate="unknown")
    verdicts = said(findings(Interfaces((silent, interface("ens1"))), profiled("ens0", "ens1")))

    assert verdicts == [("n1", "pass", None), ("mac-ens0", "skip", None)]


@pytest.mark.parametrize("there", [(), (interface("eth0", is_physical=False),)])
def test_a_namespace_without_devices_says_nothing_of_the_nodes_interfaces(there):
    assert said(findings(Interfaces(there), profiled("ens0"))) == [("n1", "skip", None)]


@pytest.mark.parametrize(
    ("in_host_namespace", "status"), [(True, "fail"), (False, "skip"), (None, "fail")]
)
def test_what_is_not_in_a_containers_namespace_is_not_missing(in_host_namespace, status):
    """A virtual function was moved into it, or an interface of the node."""
    facts = Interfaces((interface("net1"),), in_host_namespace=in_host_namespace)

    assert [item.status.word for item in findings(facts, profiled("ens0"))] == [status]
    facts = replace(facts, interfaces=(down("ens0"), interface("net1")))
    assert said(findings(facts, profiled("ens0"))) == [("mac-ens0", "fail", BAD)]


def test_a_node_that_lost_all_its_interfaces_fails():
    lost = Interfaces((interface("lo", is_physical=False),), in_host_namespace=True)

    assert said(findings(lost, profiled("ens0"))) == [("ens0", "fail", BAD)]
    unread = Interfaces(in_host_namespace=True)
    assert said(findings(unread, profiled("ens0"))) == [("n1", "skip", None)]


@pytest.mark.parametrize(
    "facts",
    [
        Interfaces(),
        Interfaces((interface("lo", is_physical=False), down("eno2"))),
        # What `modprobe bonding` makes, and one that nobody uses.
        bonded(),
        bonded(down("ens0", slave=BondSlave(mii_status="down")), on=False),
    ],
)
def test_unused_interfaces_and_bonds_may_be_down(facts):
    assert said(findings(facts)) == [("n1", "skip", None)]


def test_a_whole_bond_passes():
    facts = bonded(slave("ens0"), slave("ens1"), has_partner=True)

    assert said(findings(facts)) == [("n1", "pass", None)]
    assert said(findings(facts, profiled("bond0"))) == [("n1", "pass", None)]


@pytest.mark.parametrize("mode", ["802.3ad", "active-backup", "balance-alb", None])
@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (slave("ens1", carrier=False, status="down"), "has no link"),
        (slave("ens1", carrier=False), "has no link"),
        (slave("ens1", carrier=None, is_switched_on=False), "is switched off (ip link set … up)"),
        (slave("ens1", status="down"), "is down for its bond (mii_status)"),
    ],
)
def test_a_slave_that_its_bond_cannot_use_warns(mode, lost, text):
    (finding,) = findings(bonded(slave("ens0"), lost, mode=mode), profiled("bond0"))

    assert said([finding]) == [("mac-ens1", "warn", BAD)]
    assert finding.message == f"bond0: its slave ens1 {text}"


@pytest.mark.parametrize("status", ["going down", "going back", None])
def test_a_slave_on_its_way_and_one_that_is_not_told_are_no_fault(status):
    assert said(findings(bonded(slave("ens0"), slave("ens1", status=status))))[0][1] == "pass"


def test_a_slave_that_the_profile_names_fails_once():
    facts = bonded(slave("ens0"), slave("ens1", carrier=False, status="down"))

    assert said(findings(facts, profiled("bond0", "ens1"))) == [("mac-ens1", "fail", BAD)]


def test_a_slave_without_a_partner_warns_where_lacp_runs():
    facts = bonded(slave("ens0"), slave("ens1", state=DEFAULTED), has_partner=True)
    (finding,) = findings(facts)

    assert said([finding]) == [("mac-ens1", "warn", BAD)]
    assert finding.message == "bond0: no LACP partner answers on ens1"
    assert (finding.value, finding.threshold) == ("no partner", "an LACP partner")
    backup = bonded(slave("ens0"), slave("ens1", state=DEFAULTED), mode="active-backup")
    assert said(findings(backup)) == [("n1", "pass", None)]


def test_a_group_without_a_partner_is_told_once():
    whole = [slave("ens0"), slave("ens1")]
    silent = [slave("ens0", state=None), slave("ens1", state=None)]
    alone = [slave("ens0", state=DEFAULTED), slave("ens1")]

    assert said(findings(bonded(*silent, has_partner=False))) == [("bond0", "warn", BAD)]
    assert said(findings(bonded(*alone, has_partner=False))) == [("mac-ens0", "warn", BAD)]
    assert said(findings(bonded(*whole, has_partner=None))) == [("n1", "pass", None)]


@pytest.mark.parametrize(
    ("mode", "bad"),
    [
        ("802.3ad", True),
        ("balance-rr", True),
        ("balance-xor", True),
        ("active-backup", False),
        ("balance-tlb", False),
        (None, False),
    ],
)
def test_a_slower_slave_warns_where_all_carry_the_same(mode, bad):
    facts = bonded(slave("ens0"), slave("ens1", rate_gbs=1.25), mode=mode)
    (finding,) = findings(facts)

    assert finding.status.word == ("warn" if bad else "pass")
    if bad:
        assert finding.message == "bond0: its slave ens1 has 1.25 GB/s, others 3.125"
        assert finding.unit == "GB/s"


def test_a_speed_that_is_not_known_is_compared_with_nothing():
    facts = bonded(slave("ens0"), slave("ens1", rate_gbs=None))

    assert said(findings(facts)) == [("n1", "pass", None)]


@pytest.mark.parametrize(("downs", "status"), [(7, None), (8, "warn"), (12, "fail")])
def test_lost_links_of_what_is_used_are_judged_by_their_growth(downs, status):
    past = {"interfaces:mac-ens1:carrier_downs": 7.0, "interfaces:mac-usb0:carrier_downs": 0.0}
    case = replace(CASE, counters=grown_from(past, HOUR_S))
    facts = bonded(slave("ens0"), slave("ens1", carrier_downs=downs))
    facts = replace(facts, interfaces=(*facts.interfaces, interface("usb0", carrier_downs=99)))
    (finding,) = findings(facts, case)

    expected = ("mac-ens1", status, "network.link_flap") if status else ("n1", "pass", None)
    assert said([finding]) == [expected]
    assert finding.shared_cause is (status == "fail")


def test_ports_for_rdma_are_counted_by_another_check():
    facts = bonded(slave("ens0", carrier_downs=3, has_rdma=True), slave("ens1", carrier_downs=4))

    assert counters(facts) == {"interfaces:mac-ens1:carrier_downs": 4}


def test_a_slave_that_vanished_is_no_slave():
    facts = bonded(slave("ens0"))
    gone = replace(facts.bonds[0], slaves=("ens0", "ens9"))

    assert said(findings(replace(facts, bonds=(gone,)))) == [("n1", "pass", None)]
