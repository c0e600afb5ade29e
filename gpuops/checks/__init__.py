"""The checks of a node, one a file. A check is known by being listed here, on purpose.

`check_named` imports a check when a suite asks for it; the prolog pays for what it runs.
"""

import importlib

from gpuops.checks.protocol import AnyCheck, Check

NAMES = (
    "memory",
    "disk_space",
    "mount_alive",
    "clock_sync",
    "load",
    "kernel_log",
    "gpu_count",
    "gpu_pci",
)


def check_named(name: str) -> AnyCheck:
    """Return the check called *name*, one of `NAMES`."""
    assert name in NAMES, name
    check = importlib.import_module(f"gpuops.checks.{name}").CHECK
    assert isinstance(check, Check)
    assert check.name == name
    return check
