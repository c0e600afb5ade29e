"""Which GPU has which PCI address, without a driver call: a lost GPU answers none.

From ``/proc/driver/nvidia/gpus``, one folder for each GPU that the driver has bound, or from sysfs
if that is missing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.nvml.facts import NvmlSnapshot
from gpuops.host.nvml.session import read_nvml
from gpuops.host.process.probe import STOP_S
from gpuops.host.sysfs import PciGpu, count_amd_gpus, hypervisor, read_pci_gpus, sysfs_address
from gpuops.host.trust import text_of

_MARGIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs on the PCI bus and in NVML; the former are known even if NVML hangs.

    ``hypervisor``: what the node runs on if it is a virtual machine. ``amd``: how many GPUs of AMD
    are on the bus, counted where none is NVIDIA's.
    """

    pci: tuple[PciGpu, ...]
    nvml: NvmlSnapshot
    hypervisor: str | None = None
    amd: int = 0


def read_gpus(root: Path, budget_s: float) -> Gpus:
    """Return both views within *budget_s* seconds."""
    pci, runs_on = read_pci_gpus(root), hypervisor(root)
    nvml = read_nvml(max(budget_s - STOP_S - _MARGIN_S, 0.1), root)
    return Gpus(pci, nvml, runs_on, 0 if pci else count_amd_gpus(root))


_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{8,40})\s*$", re.MULTILINE)
_MINOR = re.compile(r"^Device Minor:\s*([0-9]{1,4})\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuName:
    """One GPU. ``index``: its position by PCI address, which is NVML's order.

    ``uuid``: None if the driver has not read it yet. ``minor``: of ``/dev/nvidia3``.
    """

    index: int
    address: str
    uuid: str | None = None
    minor: int | None = None


def read_gpu_names(root: Path, logged_uuids: Mapping[str, str]) -> tuple[GpuName, ...]:
    """Return the GPUs by address; *logged_uuids*: UUIDs by address from the kernel log."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        found: dict[str, str | None] = {
            sysfs_address(entry.name): text_of(entry / "information") for entry in folder.iterdir()
        }
    except OSError:
        found = {}
    if not found:
        found = {gpu.address: None for gpu in read_pci_gpus(root)}
    addresses = sorted({*found, *logged_uuids})
    return tuple(
        GpuName(
            index=index,
            address=address,
            uuid=_found(_UUID, found.get(address)) or logged_uuids.get(address),
            minor=None if (minor := _found(_MINOR, found.get(address))) is None else int(minor),
        )
        for index, address in enumerate(addresses)
    )


def _found(pattern: re.Pattern[str], text: str | None) -> str | None:
    match = pattern.search(text or "")
    return match and match[1]
