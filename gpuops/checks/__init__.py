"""The checks of a node, one a file. Every check is listed here.

`check_named` imports a check only when a suite needs it, so that the prolog stays fast.
"""

import importlib
from typing import TypeGuard

from gpuops.checks.core.check import AnyCheck, Check

_PACKAGES = {
    "memory": "host",
    "disk_space": "storage",
    "mount_alive": "storage",
    "clock_sync": "host",
    "load": "host",
    "kernel_log": "host",
    "gpu_xid": "gpu",
    "nvswitch_sxid": "fabric",
    "gpu_driver": "gpu",
    "gpu_count": "gpu",
    "gpu_pci": "gpu",
    "strikes": "host",
    "gpu_lost": "gpu",
    "gpu_recovery_action": "gpu",
    "gpu_row_remap": "gpu",
    "gpu_retired_pages": "gpu",
    "gpu_ecc": "gpu",
    "gpu_ecc_corrected": "gpu",
    "gpu_inforom": "gpu",
    "gpu_temperature": "gpu",
    "gpu_throttle": "gpu",
    "gpu_power": "gpu",
    "gpu_clocks": "gpu",
    "gpu_pcie_link": "gpu",
    "gpu_pcie_replays": "gpu",
    "nvlink": "fabric",
    "nvlink_errors": "fabric",
    "nvlink_ber": "fabric",
    "gpu_fabric": "gpu",
    "fabric_manager": "fabric",
    "gpu_modes": "gpu",
    "gpu_versions": "gpu",
    "gpu_processes": "gpu",
    "memory_size": "host",
    "dimms": "host",
    "edac": "host",
    "cpu_count": "host",
    "cpu_governor": "host",
    "clock_source": "host",
    "swap": "host",
    "shmem_huge_pages": "host",
    "mount_state": "storage",
    "mount_writable": "storage",
    "nvme_smart": "storage",
    "md_raid": "storage",
    "processes": "host",
    "kernel_modules": "host",
    "kernel_taint": "host",
    "services": "host",
    "munge": "host",
    "user_lookup": "host",
    "container_runtime": "host",
    "bmc_events": "host",
    "power_supplies": "host",
    "ib_ports": "nic",
    "ib_errors": "nic",
    "ib_pkeys": "nic",
    "nic_pcie_link": "nic",
    "interfaces": "nic",
    "pci_aer": "nic",
    "pcie_acs": "nic",
    "iommu": "nic",
    "gpudirect_rdma": "nic",
    "dcgm_diag": "gpu",
}
NAMES = tuple(_PACKAGES)


def is_check(name: object) -> TypeGuard[str]:
    """Return whether *name* is one of `NAMES`, or that of a site's own check (``site/…``)."""
    return name in NAMES or (isinstance(name, str) and name.startswith("site/"))


def check_named(name: str) -> AnyCheck:
    """Return the check called *name*, for which `is_check` holds.

    Raises:
        ConfigError: A site's check whose name is not a valid name of a file.
    """
    assert is_check(name), name
    if name not in NAMES:
        from gpuops.checks.core.site import site_check

        return site_check(name)
    check = importlib.import_module(f"gpuops.checks.{_PACKAGES[name]}.{name}").CHECK
    assert isinstance(check, Check)
    assert check.name == name
    return check
