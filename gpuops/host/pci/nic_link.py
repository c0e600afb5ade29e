"""PCI Express links of network adapters, from sysfs.

``current_link_*`` and ``max_link_*`` of a PCI device (Documentation/ABI/testing/sysfs-bus-pci) need
no privilege. The link runs at the lower capability of the adapter and of the port above it, so that
an adapter in a slower slot is not degraded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.sysfs import PCI_ADDRESS
from gpuops.host.trust import entries_of, is_there, number_of, text_of

# PCI Express Base Specification, link capabilities: GT/s of each generation, and the link widths.
# A device that does not answer, and a virtual function, report others.
_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6, "128": 7}
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieCapability:
    """Generation and lanes; None: not reported."""

    generation: int | None = None
    width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPcieLink:
    """The link of one adapter: what it has now, what the adapter and the port above it support.

    ``names`` are its RDMA devices and network interfaces, and the bonds of these; ``guid`` is the
    node GUID, None without RDMA.
    """

    address: str
    names: tuple[str, ...]
    guid: str | None = None
    now: PcieCapability = PcieCapability()
    adapter: PcieCapability = PcieCapability()
    port: PcieCapability = PcieCapability()


@dataclass(frozen=True, slots=True)
class NicPcieLinks:
    """The links of all adapters by address, without virtual functions."""

    links: tuple[NicPcieLink, ...] = ()


def read_nic_pcie(root: Path = Path("/")) -> NicPcieLinks:
    """Return the links; none without adapters on a PCI bus."""
    names: dict[Path, list[str]] = {}
    guids: dict[Path, str] = {}
    for folder in ("infiniband", "net"):
        for name, device in _devices(root / "sys/class" / folder):
            names.setdefault(device, []).append(name)
            if folder == "infiniband":
                guids.setdefault(
                    device, text_of(root / f"sys/class/infiniband/{name}/node_guid") or name
                )
    return NicPcieLinks(
        tuple(
            _link(device, names[device], guids.get(device))
            for device in sorted(names, key=lambda path: path.name)
        )
    )


def _devices(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of the PCI function of each entry of *folder*, and of its bond."""
    for entry in entries_of(folder):
        try:
            device = (entry / "device").resolve(strict=True)
        except (OSError, RuntimeError):
            continue
        # A virtual function has no link of its own.
        if not PCI_ADDRESS.fullmatch(device.name) or is_there(device / "physfn"):
            continue
        yield entry.name, device
        try:
            yield (entry / "master").readlink().name, device
        except OSError:
            continue


def _link(device: Path, names: list[str], guid: str | None) -> NicPcieLink:
    above = device.parent
    is_port = PCI_ADDRESS.fullmatch(above.name) is not None
    return NicPcieLink(
        address=device.name,
        names=tuple(names),
        guid=guid,
        now=_capability(device, "current"),
        adapter=_capability(device, "max"),
        port=_capability(above, "max") if is_port else PcieCapability(),
    )


def _capability(device: Path, prefix: str) -> PcieCapability:
    # "32.0 GT/s PCIe"; kernels before 5.13 write "8 GT/s" for whole numbers.
    speed = (text_of(device / f"{prefix}_link_speed") or "").partition(" GT/s")[0]
    width = number_of(device / f"{prefix}_link_width")
    return PcieCapability(
        generation=_GENERATIONS.get(speed.removesuffix(".0")),
        width=width if width in _WIDTHS else None,
    )
