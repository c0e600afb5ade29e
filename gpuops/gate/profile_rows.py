"""How a captured profile fills in each key: a row a key, from the facts of one check.

A new check that judges another key needs one row here.
"""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuops.checks.gpu.gpu_modes import COMPUTE_MODES
from gpuops.host.gpu_names import Gpus
from gpuops.host.infiniband import RdmaPorts
from gpuops.host.net.interfaces import Interfaces
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.host.pci.nic_link import NicPcieLinks
from gpuops.host.storage.mounts import Filesystems, MountAnswer, is_ignored

T = TypeVar("T", bound=Hashable)
Value = float | bool | tuple[str, ...] | tuple[float, ...] | None

# Kernel and firmware keep a share of the memory that differs by version and setting; one module of
# 32 is more than twice as much.
_MEMORY_SHARE = 0.985
_RUNNING = frozenset({"active", "reloading", "refreshing"})
# Removable media, containers, users' and the system's own: no job needs them.
_NOT_REQUIRED: tuple[str, ...] = (
    "/",
    "/boot*",
    "/media/*",
    "/run/*",
    "/snap/*",
    "/mnt/cdrom*",
    "/var/lib/docker/*",
    "/var/lib/containers/*",
    "/var/lib/kubelet/*",
    "/etc/*",
)
# systemd.net-naming-scheme(7): the name of an interface by its hardware address.
_NAMED_BY_ADDRESS = re.compile(r"(en|ib|sl|wl|ww)x[0-9a-f]{12}")
_NOT_DISKS = ("/dev/loop*", "/dev/sr*", "/dev/fuse")


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """How one key is filled in: by the facts of ``check``; ``value`` returns None for "nothing"."""

    key: str
    check: str
    value: Callable[[Any], Value]


def _same(values: Iterable[T | None]) -> T | None:
    """Return the one value that all have, None if they differ or one is unknown."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _least(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return min((item for item in known if item is not None), default=None)


def _of_gpus(value: Callable[[NvmlGpu], Any]) -> Callable[[Gpus], Any]:
    return lambda facts: _same(value(gpu) for gpu in facts.nvml.gpus)


def _texts(values: Iterable[str | None]) -> tuple[str, ...] | None:
    return tuple(sorted({item for item in values if item})) or None


def _nvlinks(gpu: NvmlGpu) -> int | None:
    return None if gpu.nvlinks is None else sum(link.active is True for link in gpu.nvlinks)


def _clock(gpu: NvmlGpu) -> int | None:
    application = gpu.clocks.sm_application_mhz
    return gpu.clocks.sm_max_mhz if application is None else application


def _joined(gpu: NvmlGpu) -> bool | None:
    # nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED.
    return True if gpu.fabric is not None and gpu.fabric.state == 3 else None


def _compute(facts: Gpus) -> Value:
    mode = COMPUTE_MODES.get(_of_gpus(lambda gpu: gpu.modes.compute)(facts))
    return None if mode is None else (mode,)


def _adapters(facts: RdmaPorts) -> int | None:
    return len({port.guid for port in facts.ports if port.is_active}) or None


def _rates(facts: RdmaPorts) -> Value:
    """Return the rate of each adapter in use, the fastest first; one number if all have the same.

    The least of them would hide a fast one that fell to the rate of a slow one.
    """
    rates: dict[str, float] = {}
    for port in facts.ports:
        if port.is_active:
            rates[port.guid] = max(port.rate_gbs or 0.0, rates.get(port.guid, 0.0))
    if len(set(rates.values())) < 2:
        return _same(rates.values()) or None
    return tuple(sorted(rates.values(), reverse=True))


def _interfaces(facts: Interfaces) -> Value:
    """Return those with a link; not those whose name has an address, which no other node has.

    Nor those on USB: there the BMC shows an interface, which goes when it restarts. A bond stands
    for its slaves, one of which may be lost.
    """
    slaves = {name for bond in facts.bonds for name in bond.slaves}
    bonds = {bond.name for bond in facts.bonds if bond.slaves}
    return _texts(
        item.name
        for item in facts.interfaces
        if (item.name in bonds or (item.is_physical and item.name not in slaves))
        and item.has_link
        and not item.is_usb
        and not _NAMED_BY_ADDRESS.fullmatch(item.name)
    )


def _nic_link(of: str) -> Callable[[NicPcieLinks], float | None]:
    """Return what all RDMA adapters have; the least of several would hide a degraded one.

    None too if another adapter has less than it supports, which the profile would then fail.
    """

    def value(facts: NicPcieLinks) -> float | None:
        common: int | None = _same(
            getattr(link.now, of) for link in facts.links if link.guid is not None
        )
        if common is None:
            return None
        links = [(getattr(link.now, of), getattr(link.adapter, of)) for link in facts.links]
        is_slower = any(now and now < common <= (most or common) for now, most in links)
        return None if is_slower else common

    return value


def _mounts(facts: Filesystems) -> Value:
    return _texts(item.mount.point for item in facts.answers if _is_required(item))


def _is_required(answer: MountAnswer) -> bool:
    mount = answer.mount
    is_disk = mount.source.startswith("/dev/") or mount.filesystem == "zfs"
    if answer.space is None or answer.is_a_users(()) or not (is_disk or mount.is_network):
        return False
    return not is_ignored(mount.point, _NOT_REQUIRED) and not is_ignored(mount.source, _NOT_DISKS)


ROWS = (
    CaptureRow("gpu_count", "gpu_count", lambda facts: len(facts.nvml.gpus) or None),
    CaptureRow("nvlink_count", "nvlink", _of_gpus(_nvlinks)),
    CaptureRow("pcie_generation", "gpu_pcie_link", _of_gpus(lambda gpu: gpu.pcie.generation_max)),
    CaptureRow("pcie_width", "gpu_pcie_link", _of_gpus(lambda gpu: gpu.pcie.width)),
    CaptureRow("power_limit_w", "gpu_power", _of_gpus(lambda gpu: gpu.power.limit_w)),
    CaptureRow("sm_clock_mhz_min", "gpu_clocks", _of_gpus(_clock)),
    CaptureRow("driver", "gpu_versions", lambda facts: _texts([facts.nvml.driver])),
    CaptureRow("vbios", "gpu_versions", lambda facts: _texts(gpu.vbios for gpu in facts.nvml.gpus)),
    CaptureRow("ecc", "gpu_modes", _of_gpus(lambda gpu: gpu.modes.ecc)),
    CaptureRow("mig", "gpu_modes", _of_gpus(lambda gpu: gpu.modes.mig)),
    CaptureRow("persistence", "gpu_modes", _of_gpus(lambda gpu: gpu.modes.persistence)),
    CaptureRow("compute_mode", "gpu_modes", _compute),
    CaptureRow("fabric", "gpu_fabric", _of_gpus(_joined)),
    CaptureRow("nic_count", "ib_ports", _adapters),
    CaptureRow("nic_rate_gbs", "ib_ports", _rates),
    CaptureRow(
        "nic_firmware", "ib_ports", lambda facts: _texts(port.firmware for port in facts.ports)
    ),
    CaptureRow("nic_pcie_width", "nic_pcie_link", _nic_link("width")),
    CaptureRow("nic_pcie_generation", "nic_pcie_link", _nic_link("generation")),
    CaptureRow("interfaces", "interfaces", _interfaces),
    CaptureRow(
        "memory_bytes_min", "memory_size", lambda facts: int(facts.total_bytes * _MEMORY_SHARE)
    ),
    CaptureRow(
        "dimm_count",
        "dimms",
        lambda facts: sum(bool(slot.size_bytes) for slot in facts.slots) or None,
    ),
    CaptureRow(
        "dimm_bytes", "dimms", lambda facts: _least(slot.size_bytes or None for slot in facts.slots)
    ),
    CaptureRow("cpu_count", "cpu_count", lambda facts: facts.online),
    CaptureRow("cpu_governor", "cpu_governor", lambda facts: _texts(facts.governors)),
    CaptureRow("clock_source", "clock_source", lambda facts: _texts([facts.clock_source])),
    CaptureRow("swap", "swap", lambda facts: bool(facts.areas)),
    CaptureRow(
        "nvme_count",
        "nvme_smart",
        lambda facts: sum(drive.transport in {None, "pcie"} for drive in facts.drives) or None,
    ),
    CaptureRow(
        "services",
        "services",
        lambda facts: _texts(unit.name for unit in facts.units if unit.active in _RUNNING),
    ),
    CaptureRow("mounts", "mount_alive", _mounts),
    CaptureRow("kernel_modules", "kernel_modules", lambda facts: facts.present or None),
)
