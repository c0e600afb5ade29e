"""What is mounted, and what fstab(5) wants mounted at boot; no mount itself is touched."""

from dataclasses import dataclass
from pathlib import Path

from gpuops.host.mounts import parse_mountinfo, unescape
from gpuops.host.procfs import read_text

_NOT_MOUNTED = frozenset({"swap", "none", "ignore"})


@dataclass(frozen=True, slots=True)
class MountTable:
    """Mount points: those there are, and those that fstab wants mounted at boot."""

    mounted: tuple[str, ...]
    in_fstab: tuple[str, ...] = ()


def read_mount_table(root: Path = Path("/")) -> MountTable:
    """Return the mount points of this machine.

    Raises:
        ProbeError: ``/proc/self/mountinfo`` cannot be read.
    """
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    try:
        fstab = (root / "etc/fstab").read_text(encoding="utf-8", errors="replace")
    except OSError:
        fstab = ""
    points = dict.fromkeys(mount.point for mount in mounts)
    return MountTable(tuple(points), wanted_at_boot(fstab))


def wanted_at_boot(text: str) -> tuple[str, ...]:
    """Return the mount points of fstab(5) that are mounted without being asked for."""
    wanted = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith("#"):
            continue
        options = set(fields[3].split(","))
        if fields[1].startswith("/") and fields[2] not in _NOT_MOUNTED and "noauto" not in options:
            wanted.append(unescape(fields[1]).rstrip("/") or "/")
    return tuple(dict.fromkeys(wanted))
