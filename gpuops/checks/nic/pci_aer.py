"""Do GPUs, NVSwitches, network adapters or the ports above them report PCI Express errors?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuops.checks.core.check import Check, CheckLimit, JudgeContext, Probe, Subject, skipped
from gpuops.host.node_state import CounterGrowth
from gpuops.host.pci.aer import SEVERITIES, AerBus, AerDevice, read_aer
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Errors per hour of one device, by severity.

    Correctable ones cost bandwidth; after the others the transaction (nonfatal) or the link (fatal)
    is unreliable (PCI Express Base Specification, §6.2.2). They only warn as shipped: an intended
    reset of a GPU causes such errors, and `gpu_lost` and `gpu_xid` report those without recovery.
    """

    correctable_per_hour: CheckLimit
    nonfatal_per_hour: CheckLimit
    fatal_per_hour: CheckLimit

    def limit(self, severity: str) -> CheckLimit:
        """Return the limit for *severity*, one of `SEVERITIES`."""
        return {
            "correctable": self.correctable_per_hour,
            "nonfatal": self.nonfatal_per_hour,
            "fatal": self.fatal_per_hour,
        }[severity]


def judge(facts: AerBus, parameters: Parameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each device and severity that grows too fast, else one for all."""
    subject = Subject("pci_aer", context.node, FailureClass.HOST_PCIE)
    if not facts.devices:
        text = "does not report errors" if facts.watched else "has no GPU and no adapter on it"
        return [skipped(subject, f"the PCI bus {text}")]
    findings, compared = [], 0
    for device in facts.devices:
        for severity, total in device.totals.items():
            growth = context.counters.lately(_name(device, severity), total)
            if growth is None:
                continue
            compared += 1
            limit = parameters.limit(severity)
            about = replace(
                subject, entity=Entity(EntityKind.LINK, f"pci {device.address}"), unit="per hour"
            )
            text = _text(device, severity, growth)
            found = about.below(limit, growth.per_hour, text, digits=2, unit="per hour")
            if found.status is not Status.PASS:
                findings.append(found)
    if findings:
        return findings
    if not compared:
        return [skipped(subject, "no earlier count of this boot to compare with")]
    return [
        Finding(
            check="pci_aer",
            entity=context.node,
            status=Status.PASS,
            message=f"{len(facts.devices)} devices and ports report few new errors or none",
        )
    ]


def _name(device: AerDevice, severity: str) -> str:
    return f"pci_aer:{device.address}:{severity}"


def _text(device: AerDevice, severity: str, growth: CounterGrowth) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in device.kinds.items())
    since = f" (since it was found: {kinds})" if kinds else ""
    return (
        f"{device.what} {device.address}: {growth.grown:g} new {severity} errors"
        f" in {format_seconds(growth.elapsed_s)}{since}"
    )


def counters(facts: AerBus) -> Mapping[str, float]:
    """Return the totals of each device by severity."""
    return {
        _name(device, severity): device.totals[severity]
        for device in facts.devices
        for severity in SEVERITIES
        if severity in device.totals
    }


CHECK = Check(
    name="pci_aer",
    about="PCI Express errors of GPUs, NVSwitches, adapters and the ports above them, as rates",
    probe=Probe(
        "aer",
        AerBus,
        lambda machine, _budget_s: read_aer(machine.root),
        sources=("/sys/bus/pci/devices/*/aer_dev_*",),
    ),
    parameters=Parameters,
    judge=judge,
    counters=counters,
)
