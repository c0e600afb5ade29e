"""The checks of a node, one a file. A check is known by being listed here, on purpose.

`check_named` imports a check when a suite asks for it; the prolog pays for what it runs.
"""

import importlib
from typing import TypeGuard

from gpuops.checks.protocol import AnyCheck, Check

NAMES = (
    "memory",
    "disk_space",
    "mount_alive",
    "clock_sync",
    "load",
    "kernel_log",
    "gpu_xid",
    "nvswitch_sxid",
    "gpu_driver",
    "gpu_count",
    "gpu_pci",
    "strikes",
    "gpu_lost",
    "gpu_recovery_action",
    "gpu_row_remap",
    "gpu_retired_pages",
    "gpu_ecc",
    "gpu_ecc_corrected",
    "gpu_inforom",
    "gpu_temperature",
    "gpu_throttle",
    "gpu_power",
    "gpu_clocks",
    "gpu_pcie_link",
    "gpu_pcie_replays",
    "nvlink",
    "nvlink_errors",
    "gpu_fabric",
    "gpu_modes",
    "gpu_versions",
    "gpu_processes",
    "memory_size",
    "dimms",
    "edac",
    "cpu_count",
    "cpu_governor",
    "clock_source",
    "swap",
    "mount_state",
    "mount_writable",
    "nvme_smart",
    "md_raid",
    "processes",
    "kernel_modules",
    "kernel_taint",
    "services",
    "munge",
    "container_runtime",
    "ib_ports",
    "ib_errors",
    "pci_aer",
    "dcgm_diag",
)


def is_check(name: object) -> TypeGuard[str]:
    """Say whether *name* is one of `NAMES`, or that of a site's own check (``site/…``)."""
    return name in NAMES or (isinstance(name, str) and name.startswith("site/"))


def check_named(name: str) -> AnyCheck:
    """Return the check called *name*, for which `is_check` holds.

    Raises:
        ConfigError: A site's check whose name cannot be that of a file.
    """
    assert is_check(name), name
    if name not in NAMES:
        from gpuops.checks.site import site_check

        return site_check(name)
    check = importlib.import_module(f"gpuops.checks.{name}").CHECK
    assert isinstance(check, Check)
    assert check.name == name
    return check
