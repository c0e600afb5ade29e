"""Who this machine is: its name for Slurm, and its current boot."""

import socket
import time
from collections.abc import Mapping
from pathlib import Path


def node_name(env: Mapping[str, str]) -> str:
    """Return the name Slurm has for this machine, else its short host name."""
    return env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0] or "localhost"


def boot_id(root: Path = Path("/")) -> str:
    """Return the kernel's id of this boot, or ``"unknown"`` where it has none to give."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return "unknown"


def since_boot_s(root: Path = Path("/")) -> float:
    """Return the seconds since boot, of sleep as well, as CLOCK_BOOTTIME counts them.

    Under a fake root they are what its ``proc/uptime`` says, where it has one.
    """
    if root != Path("/"):
        try:
            return float((root / "proc/uptime").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            pass
    return time.clock_gettime(time.CLOCK_BOOTTIME)
