"""Who this machine is: its name for Slurm, and its current boot."""

import socket
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
