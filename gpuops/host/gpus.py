"""The GPUs of this machine from both sides: the PCI bus and NVML."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.host.nvml.facts import NvmlSnapshot
from gpuops.host.nvml.reader import read_nvml
from gpuops.host.process.probe import STOP_S
from gpuops.host.sysfs import PciGpu, read_pci_gpus

_MARGIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Gpus:
    """The PCI view outlives an NVML that hangs."""

    pci: tuple[PciGpu, ...]
    nvml: NvmlSnapshot


def read_gpus(root: Path, budget_s: float) -> Gpus:
    """Return both views within *budget_s* seconds."""
    pci = read_pci_gpus(root)
    return Gpus(pci, read_nvml(max(budget_s - STOP_S - _MARGIN_S, 0.1), root))
