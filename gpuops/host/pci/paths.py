"""What stands between GPUs and network adapters on the PCI bus: access control, and the IOMMU.

From ``/sys/bus/pci/devices/*/config``, of which users without privileges read the first 64 bytes,
and ``iommu_group/type`` (Documentation/ABI/testing/sysfs-kernel-iommu_groups). Offsets and bits are
those of linux include/uapi/linux/pci_regs.h.
"""

import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gpuops.host.pci.aer import kind_of_device, ports_above
from gpuops.host.sysfs import driver_of, hypervisor
from gpuops.host.trust import entries_of, text_of

_CONFIG_BYTES = 4096
_HEADER_BYTES = 64
_STATUS, _HAS_CAPABILITIES = 0x06, 0x10
_FIRST, _CAPABILITIES_MAX = 0x34, 48
_PCI_EXPRESS, _DOWNSTREAM_PORT = 0x10, 0x6
_EXTENDED, _EXTENDED_MAX = 0x100, 128
_ACS, _ACS_CONTROL = 0x0D, 0x06
_X86 = re.compile(r"^flags\s*:", re.MULTILINE)
# Drivers of devices that a virtual machine uses: isolation is wanted there.
_GUESTS = frozenset({"vfio-pci", "nvgrace-gpu-vfio-pci", "mlx5_vfio_pci", "pciback"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPort:
    """A downstream port of a PCIe switch that has several devices below it.

    ``below``: one GPU or adapter under this port. ``acs``: its ACS control register, 0 without one.
    """

    address: str
    below: str
    acs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPaths:
    """The paths of this node's GPUs and adapters.

    ``bare_metal``: False in a virtual machine, None if the processor is not an x86. ``devices``
    are their addresses. ``unreadable`` ports did not show their capabilities. ``translated``: the
    devices whose DMA addresses the IOMMU translates; ``modes``: all modes of the devices' groups.
    """

    bare_metal: bool | None
    devices: tuple[str, ...] = ()
    ports: tuple[SwitchPort, ...] = ()
    unreadable: int = 0
    translated: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()


def read_pci_paths(root: Path = Path("/")) -> PciPaths:
    """Return the paths, without those of devices that are given to virtual machines."""
    devices = {
        device.name: device
        for device in entries_of(root / "sys/bus/pci/devices")
        if kind_of_device(device) in {"GPU", "NIC"} and driver_of(device) not in _GUESTS
    }
    modes = {name: text_of(device / "iommu_group/type") for name, device in devices.items()}
    ports, unreadable = _switch_ports(devices)
    return PciPaths(
        bare_metal=_is_bare_metal(root),
        devices=tuple(devices),
        ports=ports,
        unreadable=unreadable,
        # "DMA" or "DMA-FQ"; "identity" passes addresses through.
        translated=tuple(name for name, mode in modes.items() if (mode or "").startswith("DMA")),
        modes=tuple(sorted({mode for mode in modes.values() if mode})),
    )


def _is_bare_metal(root: Path) -> bool | None:
    is_x86 = _X86.search(text_of(root / "proc/cpuinfo") or "") is not None
    return hypervisor(root) is None if is_x86 else None


def _switch_ports(devices: dict[str, Path]) -> tuple[tuple[SwitchPort, ...], int]:
    """Return the ports of switches that lead to at least two devices, and how many did not say."""
    below: dict[str, str] = {}  # one device by its port
    seen: dict[Path, set[str]] = {}  # devices by bridge, without their functions
    above: dict[Path, Path] = {}
    for name, device in devices.items():
        chain = ports_above(device)
        for port, upper in pairwise(chain):
            below.setdefault(port.name, name)
            above[port] = upper
            seen.setdefault(upper, set()).add(name.rpartition(".")[0])
    found, unreadable = [], 0
    for port, upper in sorted(above.items()):
        if len(seen[upper]) < 2:
            continue
        config = _config(port)
        if config is None:
            unreadable += 1
        elif _port_type(config) == _DOWNSTREAM_PORT:
            control = acs_control(config)
            found.append(SwitchPort(address=port.name, below=below[port.name], acs=control))
    return tuple(found), unreadable


def _config(port: Path) -> bytes | None:
    """Return the configuration space; None if it cannot be read, or not beyond its header."""
    try:
        with (port / "config").open("rb") as file:
            config = file.read(_CONFIG_BYTES)
    except OSError:
        return None
    # All ones: no device claimed the read.
    is_answer = len(config) > _HEADER_BYTES and config[:2] != b"\xff\xff"
    return config if is_answer else None


def _port_type(config: bytes) -> int | None:
    """Return the type of a PCIe port; None if it is none."""
    if not config[_STATUS] & _HAS_CAPABILITIES:
        return None
    at = config[_FIRST] & 0xFC
    for _ in range(_CAPABILITIES_MAX):
        if at < _HEADER_BYTES or at + 4 > len(config):
            return None
        if config[at] == _PCI_EXPRESS:
            return config[at + 2] >> 4
        at = config[at + 1] & 0xFC
    return None


def acs_control(config: bytes) -> int:
    """Return the ACS control register in *config*; 0 without one, or in a broken list."""
    at = _EXTENDED
    for _ in range(_EXTENDED_MAX):
        if at < _EXTENDED or at + _ACS_CONTROL + 2 > len(config):
            return 0
        (header,) = struct.unpack_from("<I", config, at)
        if header in {0, 0xFFFFFFFF}:
            return 0
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + _ACS_CONTROL)
            return 0 if control == 0xFFFF else int(control)
        at = header >> 20 & 0xFFC
    return 0
