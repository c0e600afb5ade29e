"""Has the kernel take the pages of a slot from the NUMA node of the GPU that copies into it."""

import ctypes
import platform
from pathlib import Path
from typing import Any

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.host.trust import number_of

_MBIND = {"x86_64": 237, "aarch64": 235}  # mbind(2)
_MPOL_PREFERRED = 1  # linux/mempolicy.h: from other nodes once this one has no free memory
_MASK_BITS = 1024
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def numa_node_of(properties: Any, root: Path = Path("/")) -> int | None:  # noqa: ANN401 torch's
    """Return the NUMA node of the GPU with these device *properties*, None where it is unknown."""
    try:
        domain, bus, device = (
            int(getattr(properties, f"pci_{name}_id")) for name in ("domain", "bus", "device")
        )
    except AttributeError:  # an older torch
        return None
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    node = number_of(root / "sys/bus/pci/devices" / address / "numa_node")
    return node if node is not None and 0 <= node < _MASK_BITS else None  # -1: not known


def prefer_numa_node(memory: SharedBuffer, node: int) -> bool:
    """Have pages of *memory* that any process allocates from now on come from *node*.

    Returns whether the kernel accepts it; containers may not allow it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // _LONG_BITS))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    first = ctypes.c_char.from_buffer(memory.view)
    result = ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(ctypes.addressof(first)),
        ctypes.c_ulong(memory.nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),  # the kernel reads one bit less
        ctypes.c_uint(0),
    )
    return int(result) == 0
