"""GPUs on the PCI bus, from ``/sys/bus/pci/devices`` (Documentation/ABI/testing/sysfs-bus-pci).

Also whether this machine is virtual, which decides how far the bus can be believed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.trust import entries_of, number_of, text_of

NVIDIA = 0x10DE
_AMD = 0x1002
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DISPLAY = 0x03
# pci.ids: a processing accelerator, as some of AMD's GPUs call themselves.
_ACCELERATOR = 0x12
# linux arch/x86: the bit that hypervisors set for their guests (CPUID.1:ECX[31]).
_GUEST_FLAG = re.compile(r"^flags\s*:.*\bhypervisor\b", re.MULTILINE)
# By the firmware, as in systemd's src/basic/virt.c. Without x86 there is no such bit; with it, the
# firmware only gives the name: Amazon's metal instances have the vendor of its virtual ones.
_VENDORS = (
    "QEMU",
    "KVM",
    "KubeVirt",
    "OpenStack",
    "Amazon EC2",
    "Google Compute Engine",
    "VMware",
    "VirtualBox",
    "Xen",
    "Hyper-V",
    "Parallels",
    "BHYVE",
)
_DMI = ("product_name", "sys_vendor", "bios_vendor")


@dataclass(frozen=True, slots=True)
class PciGpu:
    """One NVIDIA display controller.

    ``answers`` is False if its configuration space reads as all ones, which the bus returns when no
    device claims the read (PCI Express Base Specification, §2.3.2 completion rules); None if it
    could not be read. ``driver`` is the bound kernel driver.
    """

    address: str
    answers: bool | None
    driver: str | None


def read_pci_gpus(root: Path = Path("/")) -> tuple[PciGpu, ...]:
    """Return the NVIDIA GPUs on the bus by address; none without a PCI bus."""
    devices = root / "sys/bus/pci/devices"
    try:
        found = sorted(devices.iterdir())
    except OSError:
        return ()
    return tuple(_gpu(device) for device in found if _is_gpu(device))


def count_amd_gpus(root: Path = Path("/")) -> int:
    """Return how many GPUs of AMD are on the bus, which no check looks at."""
    return sum(
        number_of(device / "vendor", 16) == _AMD
        and (number_of(device / "class", 16) or 0) >> 16 in {_DISPLAY, _ACCELERATOR}
        for device in entries_of(root / "sys/bus/pci/devices")
    )


def _is_gpu(device: Path) -> bool:
    # sysfs keeps vendor and class from the bus scan, so they are readable for a lost device.
    return (
        number_of(device / "vendor", 16) == NVIDIA
        and (number_of(device / "class", 16) or 0) >> 16 == _DISPLAY
    )


def _gpu(device: Path) -> PciGpu:
    return PciGpu(device.name, _answers(device / "config"), driver_of(device))


def _answers(config: Path) -> bool | None:
    try:
        with config.open("rb") as file:
            vendor = file.read(2)
    except OSError:
        return None
    return vendor != b"\xff\xff" if len(vendor) == 2 else None


def driver_of(device: Path) -> str | None:
    """Return the kernel driver that is bound to *device*."""
    try:
        return (device / "driver").readlink().name
    except OSError:
        return None


def sysfs_address(nvml_bus_id: str) -> str:
    """Return ``"0000:1b:00.0"`` for NVML's ``"00000000:1B:00.0"``, other text in lower case."""
    domain, colon, rest = nvml_bus_id.strip().lower().partition(":")
    try:
        return f"{int(domain, 16):04x}{colon}{rest}"
    except ValueError:
        return nvml_bus_id.strip().lower()


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of the loaded NVIDIA driver, None if there is none."""
    try:
        return (root / "sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def hypervisor(root: Path = Path("/")) -> str | None:
    """Return what this virtual machine runs on, None on a physical machine."""
    cpuinfo = text_of(root / "proc/cpuinfo") or ""
    by_firmware = _vendor(root)
    if _GUEST_FLAG.search(cpuinfo):
        return by_firmware or "unknown hypervisor"
    is_x86 = re.search(r"^flags\s*:", cpuinfo, re.MULTILINE) is not None
    return None if is_x86 else by_firmware


def _vendor(root: Path) -> str | None:
    texts = [text_of(root / "sys/class/dmi/id" / name) or "" for name in _DMI]
    found = (vendor for text in texts for vendor in _VENDORS if text.startswith(vendor))
    # The firmware of Azure's and of other Hyper-V guests (not of Microsoft's own computers).
    is_hyper_v = texts[0] == "Virtual Machine" and texts[1].startswith("Microsoft")
    return next(found, "Hyper-V" if is_hyper_v else None)
