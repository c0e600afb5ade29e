"""Is the PCIe link of each network adapter as wide and as fast as it should be?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    NoParameters,
    Probe,
    Subject,
    skipped,
)
from gpuops.checks.core.profile import NumberExpectation
from gpuops.host.pci.nic_link import NicPcieLink, NicPcieLinks, PcieCapability, read_nic_pcie
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

_NAME = "nic_pcie_link"


@dataclass(frozen=True, slots=True)
class _Measure:
    what: str
    of: Callable[[PcieCapability], int | None]
    expected: NumberExpectation | None


def judge(facts: NicPcieLinks, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each adapter whose link is narrower or slower than expected.

    Judged are RDMA adapters and those of the profile's ``interfaces``; unlike a GPU's, their link
    does not slow down at rest (LBNL NHC and sichek judge it there, too). Less than in the profile
    fails, unless ``nic_count`` adapters have it; beside adapters that are made for that much,
    others are of another kind. Without a ``nic_count``, an adapter that has all that its slot
    supports warns: some boards have such slots, and it may be in the wrong one. Without an
    expectation, less than adapter and slot support warns: a virtual machine may show a link that is
    not the real one.
    """
    profile = context.profile
    named = set(profile.interfaces.value) if profile.interfaces is not None else set()
    judged = [link for link in facts.links if link.guid is not None or named & set(link.names)]
    measures = (
        _Measure("lanes", lambda link: link.width, profile.nic_pcie_width),
        _Measure("generation", lambda link: link.generation, profile.nic_pcie_generation),
    )
    subject = Subject(_NAME, context.node, FailureClass.HOST_PCIE)
    known = [link for link in judged if any(item.of(link.now) for item in measures)]
    if not known:
        why = "shows its PCIe link" if judged else "is an RDMA adapter or is in the profile"
        return [skipped(subject, f"no network adapter {why}")]
    findings = [finding for measure in measures for finding in _judge(known, measure, context)]
    return findings or [_summary(subject, known)]


def _judge(links: Sequence[NicPcieLink], measure: _Measure, context: JudgeContext) -> list[Finding]:
    of, expected = measure.of, measure.expected
    if expected is None:
        return [
            _finding(link, measure.what, now, most, Status.WARN, "the adapter and its slot")
            for link in links
            if (now := of(link.now)) and (most := _supported(link, of)) and now < most
        ]
    wanted = int(expected.value)
    able = [link for link in links if (of(link.adapter) or wanted) >= wanted] or links
    low = [link for link in able if (now := of(link.now)) and now < wanted]
    count = context.profile.nic_count
    if count is not None and len(able) - len(low) >= count.value:
        return []
    source = f"profile {context.profile.name}: {expected.source}"
    findings = []
    for link in low:
        now, slot = of(link.now) or 0, of(link.port)
        finding = _finding(link, measure.what, now, wanted, Status.FAIL, source)
        if count is None and slot is not None and now >= slot:
            text = f"{finding.message}, and its slot has no more; if the board is made so, say in"
            text += f" nic_count how many adapters must have {wanted}"
            finding = replace(finding, status=Status.WARN, message=text)
        findings.append(finding)
    return findings


def _supported(link: NicPcieLink, of: Callable[[PcieCapability], int | None]) -> int | None:
    adapter, port = of(link.adapter), of(link.port)
    return None if adapter is None or port is None else min(adapter, port)


def _finding(
    link: NicPcieLink, what: str, now: int, expected: int, status: Status, source: str
) -> Finding:
    subject = Subject(_NAME, _entity(link), FailureClass.HOST_PCIE, what)
    text = f"{'/'.join(link.names)} ({link.address}): PCIe {what}: {now}, expected {expected}"
    return subject.compared(status, now, f">= {expected}", source, text)


def _entity(link: NicPcieLink) -> Entity:
    if link.guid is not None:
        return Entity(EntityKind.NIC, link.guid)
    return Entity(EntityKind.LINK, f"pci {link.address}")


def _summary(subject: Subject, links: Sequence[NicPcieLink]) -> Finding:
    widths = sorted({link.now.width for link in links if link.now.width})
    generations = sorted({link.now.generation for link in links if link.now.generation})
    text = (
        f"{len(links)} network adapters: {_listed(widths)} lanes, generation {_listed(generations)}"
    )
    return Finding(
        check=_NAME,
        entity=subject.entity,
        status=Status.PASS,
        value=widths[0] if widths else None,
        unit="lanes",
        message=text,
    )


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers)) or "?"


CHECK = Check(
    name=_NAME,
    about="the PCIe links of network adapters have full width and full speed",
    probe=Probe(
        "nic_pcie",
        NicPcieLinks,
        lambda machine, _budget_s: read_nic_pcie(machine.root),
        sources=(
            "/sys/class/{infiniband,net}/*/device/{current,max}_link_{speed,width}",
            "the same of the PCI port above",
        ),
    ),
    parameters=NoParameters,
    judge=judge,
)
