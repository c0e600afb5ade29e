"""GPUs on the PCI bus, from ``/sys/bus/pci/devices`` (Documentation/ABI/testing/sysfs-bus-pci)."""

import re
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.trust import number_of

NVIDIA = 0x10DE
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_DISPLAY = 0x03


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


def _is_gpu(device: Path) -> bool:
    # sysfs keeps vendor and class from the bus scan, so they are readable for a lost device.
    return (
        number_of(device / "vendor", 16) == NVIDIA
        and (number_of(device / "class", 16) or 0) >> 16 == _DISPLAY
    )


def _gpu(device: Path) -> PciGpu:
    return PciGpu(device.name, _answers(device / "config"), _driver(device / "driver"))


def _answers(config: Path) -> bool | None:
    try:
        with config.open("rb") as file:
            vendor = file.read(2)
    except OSError:
        return None
    return vendor != b"\xff\xff" if len(vendor) == 2 else None


def _driver(link: Path) -> str | None:
    try:
        return link.readlink().name
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
