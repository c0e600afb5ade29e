"""Does the IOMMU translate the addresses of GPUs and adapters on bare metal?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Subject, skipped
from gpuops.checks.nic.pcie_acs import PROBE, SOURCE, why_not_judged
from gpuops.host.pci.paths import PciPaths
from gpuops.model import FailureClass, Finding, Status


def judge(facts: PciPaths, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; translation warns.

    Translated traffic between devices takes the way through the processor, which costs bandwidth.
    Without an IOMMU, and in its passthrough mode (``identity``), the way is direct.
    """
    subject = Subject("iommu", context.node, FailureClass.HOST_CONFIG)
    why = why_not_judged(facts)
    if why is not None:
        return [skipped(subject, why)]
    modes, threshold = ", ".join(facts.modes) or "none", "off or identity (iommu=pt)"
    if not facts.translated:
        text = f"the IOMMU translates for no GPU and no adapter (mode: {modes})"
        return [subject.compared(Status.PASS, modes, threshold, SOURCE, text)]
    text = (
        f"the IOMMU translates addresses of {len(facts.translated)} of {len(facts.devices)} GPUs"
        f" and adapters (mode: {modes})"
    )
    return [subject.compared(Status.WARN, modes, threshold, SOURCE, text)]


CHECK = Check(
    name="iommu",
    about="the IOMMU does not translate addresses of GPUs and adapters on bare metal",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
