"""Do PCIe switches send traffic between GPUs and adapters through the processor?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Probe, Subject, skipped
from gpuops.host.pci.paths import PciPaths, read_pci_paths
from gpuops.model import FailureClass, Finding, Status

# linux pci_regs.h: PCI_ACS_RR and PCI_ACS_CR, redirect peer-to-peer requests and completions.
_REDIRECT = 0x04 | 0x08
_SHOWN_MAX = 4
SOURCE = "NVIDIA: NCCL troubleshooting, GPUDirect Storage best practices"

PROBE = Probe(
    "pci_paths",
    PciPaths,
    lambda machine, _budget_s: read_pci_paths(machine.root),
    sources=("/sys/bus/pci/devices/*/config", "/sys/bus/pci/devices/*/iommu_group/type"),
)


def why_not_judged(facts: PciPaths) -> str | None:
    """Return why the paths on this machine are not judged; None if they are.

    A virtual machine is isolated by these means, and a Grace processor needs its IOMMU (GPUDirect
    Storage Best Practices Guide).
    """
    if facts.bare_metal is None:
        return "judged on x86 processors only"
    if not facts.bare_metal:
        return "a virtual machine, which the host isolates by these means"
    return None if facts.devices else "no GPU and no adapter on the PCI bus"


def judge(facts: PciPaths, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; ports that redirect (access control services, ACS) warn.

    They cost bandwidth and break nothing. Only the ports of a switch with several devices below it
    count: other traffic goes through the processor anyhow.
    """
    subject = Subject("pcie_acs", context.node, FailureClass.HOST_CONFIG, unit="ports")
    why = why_not_judged(facts)
    if why is not None:
        return [skipped(subject, why)]
    redirecting = [port for port in facts.ports if port.acs & _REDIRECT]
    if redirecting:
        shown = ", ".join(f"{port.address} above {port.below}" for port in redirecting[:_SHOWN_MAX])
        more = f" and {len(redirecting) - _SHOWN_MAX} more" if redirecting[_SHOWN_MAX:] else ""
        text = f"ACS sends peer-to-peer traffic of these ports to the processor: {shown}{more}"
        return [subject.compared(Status.WARN, len(redirecting), "= 0", SOURCE, text)]
    if facts.unreadable:
        text = f"{facts.unreadable} ports do not show their capabilities: that needs root"
        return [skipped(subject, text)]
    if not facts.ports:
        return [skipped(subject, "no PCIe switch with several GPUs or adapters")]
    text = f"{len(facts.ports)} ports of PCIe switches pass peer-to-peer traffic"
    return [subject.compared(Status.PASS, 0, "= 0", SOURCE, text)]


CHECK = Check(
    name="pcie_acs",
    about="PCIe switches pass traffic between GPUs and adapters, without ACS redirection",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
