"""Mounted file systems, and what fstab(5) wants mounted; no mount itself is touched."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuops.host.procfs import read_text

NETWORK_FILESYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "virtiofs",
        "wekafs",
    }
)
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    ``options`` joins those of the mount and those of its file system. ``turned_read_only`` says
    that the mount is writable but its file system is not: the kernel gave up writing after an
    error (a read-only bind mount is the other way round). ``device`` is ``major:minor``; mounts
    that share it show the same file system.
    """

    point: str
    filesystem: str
    source: str
    options: frozenset[str]
    turned_read_only: bool = False
    device: str = ""

    @property
    def is_network(self) -> bool:
        """Say whether another machine serves it: POSIX locks and mmap are not to be trusted."""
        return self.filesystem in NETWORK_FILESYSTEMS or self.filesystem.startswith("fuse.")


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in *text*, in kernel order; lines of another form are left out."""
    mounts = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, rest = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 3:
            continue
        of_mount, of_filesystem = frozenset(fields[5].split(",")), frozenset(rest[2].split(","))
        mounts.append(
            Mount(
                point=unescape(fields[4]),
                filesystem=rest[0],
                source=unescape(rest[1]),
                options=of_mount | of_filesystem,
                turned_read_only="rw" in of_mount and "ro" in of_filesystem,
                device=fields[2],
            )
        )
    return mounts


def unescape(text: str) -> str:
    """Return *text* with the octal escapes of proc(5) and fstab(5) undone."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """Return the mount that *path* (absolute) lies on; of several on one point the last counts."""
    parts = PurePosixPath(path).parts
    best: Mount | None = None
    for mount in mounts:
        point = PurePosixPath(mount.point).parts
        if parts[: len(point)] == point and (
            best is None or len(point) >= len(PurePosixPath(best.point).parts)
        ):
            best = mount
    return best


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """Return this machine's mounts; none where ``/proc`` cannot be read."""
    try:
        return parse_mountinfo((root / "proc/self/mountinfo").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return []


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
