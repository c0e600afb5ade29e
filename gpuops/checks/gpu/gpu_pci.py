"""Does every GPU on the PCI bus respond, and does NVML list it?"""

from gpuops.checks.core.check import Check, JudgeContext, NoParameters, Subject
from gpuops.checks.gpu.gpus import PROBE
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlStatus
from gpuops.host.sysfs import PciGpu
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

_DRIVER = "nvidia"


def judge(facts: Gpus, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return a finding for each GPU that is off the bus or unknown to NVML, else one for all.

    A device that reads as all ones has left the bus, and fails. One that NVML does not list warns:
    a container or a job's cgroup may hide it.
    """
    if not facts.pci:
        text = "no NVIDIA GPU on the PCI bus"
        return [Finding(check="gpu_pci", entity=context.node, status=Status.SKIP, message=text)]
    uuids = {gpu.address: gpu.uuid for gpu in facts.nvml.gpus if gpu.address and gpu.uuid}
    lost = [_lost(gpu, uuids) for gpu in facts.pci if gpu.answers is False]
    hidden = _hidden(facts, context.node)
    if lost or hidden:
        return lost + hidden
    return [_summary(facts, context.node)]


def _lost(gpu: PciGpu, uuids: dict[str, str]) -> Finding:
    entity = Entity(EntityKind.GPU, uuids.get(gpu.address, f"PCI:{gpu.address}"))
    subject = Subject("gpu_pci", entity, FailureClass.GPU_FELL_OFF_BUS, hardware_reported=True)
    text = f"{gpu.address} no longer responds on the PCI bus: it has fallen off"
    source = "PCIe (reads as all ones)"
    return subject.compared(Status.FAIL, "0xffff", "vendor 0x10de", source, text)


def _hidden(facts: Gpus, node: Entity) -> list[Finding]:
    if facts.nvml.status is not NvmlStatus.OK:
        return []
    known = {gpu.address for gpu in facts.nvml.gpus}
    missing = [
        gpu.address
        for gpu in facts.pci
        if gpu.address not in known and gpu.driver == _DRIVER and gpu.answers is not False
    ]
    if not missing:
        return []
    subject = Subject("gpu_pci", node, FailureClass.GPU_MISSING, "GPUs")
    text = f"bound to the nvidia driver but not listed by NVML: {', '.join(missing)}"
    return [subject.compared(Status.WARN, len(missing), "= 0", "nvml", text)]


def _summary(facts: Gpus, node: Entity) -> Finding:
    bound = sum(gpu.driver == _DRIVER for gpu in facts.pci)
    unread = sum(gpu.answers is None for gpu in facts.pci)
    text = f"{len(facts.pci)} GPUs respond on the PCI bus, {bound} bound to the nvidia driver"
    if unread:
        text += f"; {unread} could not be read"
    subject = Subject("gpu_pci", node, FailureClass.GPU_MISSING, "GPUs")
    return subject.compared(Status.PASS, len(facts.pci), "each responds", "PCI bus", text)


CHECK = Check(
    name="gpu_pci",
    about="every GPU on the PCI bus responds and NVML lists it",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
