"""Boards with NVSwitches on the PCI bus, and what they need: fabric manager and GPUDirect RDMA.

NVIDIA's fabric manager runs where the driver ``nvidia-nvswitch`` has the switches: on bare metal,
in a virtual machine that was given GPUs and switches, and in the service machine of the shared
model (Fabric Manager User Guide, "Virtualization Models"). A guest that was given GPUs alone has no
switch, nor has a board of NVLink 5, whose switches are no PCI devices of NVIDIA.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.pci.aer import kind_of_device
from gpuops.host.sysfs import driver_of
from gpuops.host.trust import entries_of, number_of, text_of

_DRIVER = "nvidia-nvswitch"
# The kernel keeps 15 bytes of nv-fabricmanager.
_FABRIC_MANAGER = "nv-fabricmanage"
# linux include/linux/proc_ns.h: PROC_PID_INIT_INO. In another namespace some processes are hidden.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_PEERMEM = ("nvidia_peermem", "nv_peer_mem")
_MELLANOX = 0x15B3
_DISABLED = re.compile(r"^NvLinkDisable:\s*1\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvSwitchBoard:
    """What such a board shows. ``switches``: how many the driver has, 0 if there is no such board.

    ``models`` are their PCI device ids. ``fabric_manager``: whether it runs, None if not all
    processes are visible. ``divided``: a GPU is divided (MIG). ``nvlink_off``: a setting of the
    driver turns NVLink off. ``adapters``: those of NVIDIA (Mellanox) with an RDMA driver.
    ``peermem``: the module is loaded. ``open_driver``: the flavour of the GPU driver, None if
    unknown.
    """

    switches: int = 0
    models: tuple[int, ...] = ()
    fabric_manager: bool | None = None
    divided: bool = False
    nvlink_off: bool = False
    adapters: int = 0
    peermem: bool = False
    open_driver: bool | None = None


def read_nvswitch_board(root: Path = Path("/")) -> NvSwitchBoard:
    """Return what the board shows; processes are looked through only where there is one."""
    switches = [
        device
        for device in entries_of(root / "sys/bus/pci/devices")
        if kind_of_device(device) == "NVSwitch" and driver_of(device) == _DRIVER
    ]
    if not switches:
        return NvSwitchBoard()
    models = {number_of(device / "device", 16) for device in switches}
    driver = root / "proc/driver/nvidia"
    version = text_of(driver / "version")
    return NvSwitchBoard(
        switches=len(switches),
        models=tuple(sorted(model for model in models if model is not None)),
        fabric_manager=_runs(root / "proc", _FABRIC_MANAGER),
        divided=any((driver / "capabilities").glob("gpu*/mig/gi*")),
        nvlink_off=_DISABLED.search(text_of(driver / "params") or "") is not None,
        adapters=sum(
            number_of(item / "device/vendor", 16) == _MELLANOX
            for item in entries_of(root / "sys/class/infiniband")
        ),
        peermem=any((root / "sys/module" / name).is_dir() for name in _PEERMEM),
        open_driver="Open Kernel Module" in version if version and "NVRM" in version else None,
    )


def _runs(proc: Path, name: str) -> bool | None:
    """Return whether a process called *name* runs; None if some processes are hidden."""
    try:
        found = [entry for entry in proc.iterdir() if entry.name.isdecimal()]
        namespace = str((proc / "self/ns/pid").readlink())
    except OSError:
        return None
    if any(text_of(entry / "comm") == name for entry in found):
        return True
    # hidepid of proc(5) hides process 1, too.
    all_seen = namespace == _FIRST_PID_NAMESPACE and (proc / "1/comm").exists()
    return False if all_seen else None
