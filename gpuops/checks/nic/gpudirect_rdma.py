"""Can adapters reach GPU memory directly on a board with NVSwitches?"""

from gpuops.checks.core.check import (
    Check,
    JudgeContext,
    NoParameters,
    Subject,
    skipped,
)
from gpuops.checks.fabric.fabric_manager import PROBE
from gpuops.host.pci.nvswitch import NvSwitchBoard
from gpuops.model import FailureClass, Finding, Status

_SOURCE = "NVIDIA GPU Operator: GPUDirect RDMA, prerequisites"
_THRESHOLD = "nvidia_peermem, or DMA-BUF by the open kernel modules"


def judge(facts: NvSwitchBoard, _parameters: NoParameters, context: JudgeContext) -> list[Finding]:
    """Return one finding; it warns where neither of the two ways exists.

    One is the module ``nvidia_peermem``, the other DMA-BUF, which only the open flavour of the GPU
    driver has, so that there the module may be absent. Boards without NVSwitches are not judged:
    their adapters may serve storage alone.
    """
    subject = Subject("gpudirect_rdma", context.node, FailureClass.HOST_CONFIG)
    if not facts.switches or not facts.adapters:
        return [skipped(subject, "not a board with NVSwitches and NVIDIA's RDMA adapters")]
    if facts.peermem:
        return [_found(subject, Status.PASS, "peermem", "nvidia_peermem is loaded")]
    if facts.open_driver is None:
        return [skipped(subject, "the GPU driver does not tell its flavour")]
    if facts.open_driver:
        text = "the open GPU driver offers DMA-BUF; nvidia_peermem is not loaded"
        return [_found(subject, Status.PASS, "DMA-BUF", text)]
    text = "nvidia_peermem is not loaded, and this flavour of the GPU driver has no DMA-BUF"
    return [_found(subject, Status.WARN, "none", text)]


def _found(subject: Subject, status: Status, value: str, message: str) -> Finding:
    return subject.compared(status, value, _THRESHOLD, _SOURCE, message)


CHECK = Check(
    name="gpudirect_rdma",
    about="adapters reach GPU memory directly, by nvidia_peermem or DMA-BUF",
    probe=PROBE,
    parameters=NoParameters,
    judge=judge,
)
