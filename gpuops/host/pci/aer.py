"""PCI Express errors of GPUs, NVSwitches, network adapters and the ports above them.

From ``/sys/bus/pci/devices/*/aer_dev_*`` (Documentation/ABI/testing/sysfs-bus-pci-devices-aer).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.host.sysfs import NVIDIA, PCI_ADDRESS
from gpuops.host.trust import entries_of, is_there, number_of, text_of

_DISPLAY, _BRIDGE_OTHER = 0x03, 0x0680
_ETHERNET, _INFINIBAND = 0x0200, 0x0207
_MELLANOX = 0x15B3
_LEVELS_MAX = 8
SEVERITIES = ("correctable", "nonfatal", "fatal")


@dataclass(frozen=True, slots=True, kw_only=True)
class AerDevice:
    """One PCI function: ``what`` it is, and its errors since it was enumerated.

    ``totals`` by severity (`SEVERITIES`), without those that the device does not report; ``kinds``:
    counts by error (``RxErr``, ``BadTLP``).
    """

    address: str
    what: str
    totals: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AerBus:
    """The devices that report errors; ``watched`` counts those that were read."""

    devices: tuple[AerDevice, ...] = ()
    watched: int = 0


def read_aer(root: Path = Path("/")) -> AerBus:
    """Return the error counts; no device without a PCI bus or error reporting."""
    watched: dict[str, tuple[str, Path]] = {}
    for device in entries_of(root / "sys/bus/pci/devices"):
        what = kind_of_device(device)
        if what is None:
            continue
        watched[device.name] = what, device
        for above in ports_above(device):
            watched.setdefault(above.name, ("port", above))
    found = (_device(address, *watched[address]) for address in sorted(watched))
    return AerBus(tuple(item for item in found if item is not None), len(watched))


def kind_of_device(device: Path) -> str | None:
    """Return what the PCI function *device* is; None if it is none of those that matter here."""
    vendor, kind = number_of(device / "vendor", 16), number_of(device / "class", 16)
    if kind is None or is_there(device / "physfn"):
        return None
    if vendor == NVIDIA and kind >> 16 == _DISPLAY:
        return "GPU"
    if vendor == NVIDIA and kind >> 8 == _BRIDGE_OTHER:
        return "NVSwitch"
    if kind >> 8 == _INFINIBAND or (kind >> 8 == _ETHERNET and vendor == _MELLANOX):
        return "NIC"
    return None


def ports_above(device: Path) -> list[Path]:
    """Return the ports between *device* and the root of the bus, the nearest first."""
    try:
        parents = list(device.resolve().parents)[:_LEVELS_MAX]
    except OSError:
        return []
    ports = []
    for parent in parents:
        if not PCI_ADDRESS.fullmatch(parent.name):
            break
        ports.append(parent)
    return ports


def _device(address: str, what: str, folder: Path) -> AerDevice | None:
    totals, kinds = {}, {}
    for severity in SEVERITIES:
        text = text_of(folder / f"aer_dev_{severity}")
        if text is None:
            continue
        total, counted = parse_aer(text)
        if total is not None:
            totals[severity] = total
            kinds.update(counted)
    if not totals:
        return None
    return AerDevice(address=address, what=what, totals=totals, kinds=kinds)


def parse_aer(text: str) -> tuple[int | None, dict[str, int]]:
    """Return the total of one ``aer_dev_*`` file and its errors above zero by name."""
    total, counted = None, {}
    for line in text.splitlines():
        name, _, count = line.rpartition(" ")
        if not count.isdecimal():
            continue
        if name.startswith("TOTAL_ERR"):
            total = int(count)
        elif int(count):
            counted[name] = int(count)
    return total, counted
