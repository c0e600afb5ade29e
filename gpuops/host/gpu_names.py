"""Which GPU has which PCI address, without asking its driver: a lost GPU answers no call.

From ``/proc/driver/nvidia/gpus``, one folder for each GPU that the driver has taken, and from
sysfs where that is missing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.sysfs import read_pci_gpus, sysfs_address

_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{8,40})\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuName:
    """One GPU. ``index``: its place by PCI address, which is NVML's order.

    ``uuid``: None where the driver has not read it yet.
    """

    index: int
    address: str
    uuid: str | None = None


def read_gpu_names(root: Path, told: Mapping[str, str]) -> tuple[GpuName, ...]:
    """Return the GPUs by address; *told* are UUIDs by address that the driver wrote elsewhere."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        found = {
            sysfs_address(entry.name): _uuid(entry / "information") for entry in folder.iterdir()
        }
    except OSError:
        found = {}
    if not found:
        found = {gpu.address: None for gpu in read_pci_gpus(root)}
    addresses = sorted({*found, *told})
    return tuple(
        GpuName(
            index=index,
            address=address,
            uuid=found.get(address) or told.get(address),
        )
        for index, address in enumerate(addresses)
    )


def _uuid(path: Path) -> str | None:
    try:
        match = _UUID.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match and match[1]
