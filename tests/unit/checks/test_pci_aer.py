"""The verdicts on PCI Express errors."""

import pytest
from support.checks import CASE, NODE, limit, said

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.nic.pci_aer import Parameters, counters, judge
from gpuops.host.node_state import Counters, CounterSample
from gpuops.host.pci.aer import AerBus, AerDevice

LIMITS = Parameters(
    correctable_per_hour=limit(warn=100, fail=1000),
    nonfatal_per_hour=limit(warn=1),
    fatal_per_hour=limit(warn=1, fail=2),
)
ADDRESS = "0000:1b:00.0"


def bus(kinds=None, **totals):
    device = AerDevice(address=ADDRESS, what="GPU", totals=totals, kinds=kinds or {})
    return AerBus((device,), 1)


def case(**earlier):
    values = {f"pci_aer:{ADDRESS}:{severity}": total for severity, total in earlier.items()}
    samples = (CounterSample(boot_id="b", since_boot_s=0.0, t_us=0, values=values),)
    return JudgeContext(
        node=NODE, counters=Counters(boot_id="b", since_boot_s=3600.0, t_us=0, samples=samples)
    )


@pytest.mark.parametrize(
    ("severity", "grown", "status"),
    [
        ("correctable", 99, "pass"),
        ("correctable", 100, "warn"),
        ("correctable", 999, "warn"),
        ("correctable", 1000, "fail"),
        ("nonfatal", 0, "pass"),
        ("nonfatal", 1, "warn"),
        ("fatal", 1, "warn"),
        ("fatal", 2, "fail"),
    ],
)
def test_new_errors_are_judged_by_their_severity(severity, grown, status):
    findings = judge(bus(**{severity: 5.0 + grown}), LIMITS, case(**{severity: 5.0}))

    assert [finding.status.word for finding in findings] == [status]
    assert status == "pass" or said(findings)[0][2] == "host_hw.pcie"


def test_a_finding_names_the_device_and_its_kinds_of_errors():
    facts = bus({"RxErr": 3, "BadTLP": 200}, correctable=203)
    (finding,) = judge(facts, LIMITS, case(correctable=0))

    assert str(finding.entity) == f"link pci {ADDRESS}"
    assert finding.message.startswith(f"GPU {ADDRESS}: 203 new correctable errors in")
    assert finding.message.endswith("(since it was found: RxErr 3, BadTLP 200)")


def test_errors_of_before_the_first_look_convict_nobody():
    facts = bus(correctable=10**6, fatal=9)

    assert said(judge(facts, LIMITS, CASE)) == [("n1", "skip", None)]
    assert counters(facts) == {
        f"pci_aer:{ADDRESS}:correctable": 10**6,
        f"pci_aer:{ADDRESS}:fatal": 9,
    }


def test_a_bus_that_reports_nothing_is_not_read_as_healthy():
    assert judge(AerBus((), 9), LIMITS, CASE)[0].message == "the PCI bus does not report errors"
    assert said(judge(AerBus(), LIMITS, CASE)) == [("n1", "skip", None)]
