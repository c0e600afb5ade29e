"""Mounted file systems, those that fstab(5) lists, and their free space."""

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from gpuops.errors import ProbeError
from gpuops.host.process import probe
from gpuops.host.process.abandoned import AbandonedProbes, abandoned
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
_FUSE = ("fuse", "fuseblk")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo.

    ``options`` joins those of the mount and of its file system. ``turned_read_only``: the mount is
    writable but its file system is not, because the kernel stopped writing after an error (a
    read-only bind mount is the reverse). ``device`` is ``major:minor``; mounts that share it show
    the same file system.
    """

    point: str
    filesystem: str
    source: str
    options: frozenset[str]
    turned_read_only: bool = False
    device: str = ""

    @property
    def is_network(self) -> bool:
        """Return whether another machine serves it: POSIX locks and mmap are unreliable."""
        return self.filesystem in NETWORK_FILESYSTEMS or self.filesystem.startswith("fuse.")

    def is_a_users(self, in_fstab: bool, required: Collection[str]) -> bool:
        """Return whether it may be a user's own FUSE mount, which the user's program serves.

        It is not if it is among the *required* mount points, or root mounted it and it is
        *in_fstab*. ``user_id`` is the user who mounted it, by the kernel (mount.fuse(8)); it proves
        nothing for root, as not all of them have it.
        """
        if self.filesystem not in _FUSE and not self.filesystem.startswith("fuse."):
            return False
        if self.point in required:
            return False
        users = [text for text in self.options if text.startswith("user_id=")]
        return not in_fstab or any(text != "user_id=0" for text in users)


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts in *text*, in kernel order; malformed lines are ignored."""
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
    """Return the mount of *path* (absolute); of several on one point the last counts."""
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
    """Return this machine's mounts; none if ``/proc`` cannot be read."""
    try:
        return parse_mountinfo((root / "proc/self/mountinfo").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return []


_NOT_MOUNTED = frozenset({"swap", "none", "ignore"})


@dataclass(frozen=True, slots=True)
class MountTable:
    """Mount points: mounted, and listed in fstab to be mounted at boot."""

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
    """Return the mount points of fstab(5) that are mounted at boot."""
    wanted = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith("#"):
            continue
        options = set(fields[3].split(","))
        if fields[1].startswith("/") and fields[2] not in _NOT_MOUNTED and "noauto" not in options:
            wanted.append(unescape(fields[1]).rstrip("/") or "/")
    return tuple(dict.fromkeys(wanted))


ASKED_MAX = 512
# A user may mount 1000 (mount_max of fuse.conf), and each that never answers keeps a process.
USERS_ASKED_MAX = 32
_MARGIN_S = 0.1
_LOCAL = frozenset({"bcachefs", "btrfs", "overlay", "tmpfs", "zfs"})

Statvfs = Callable[[str], os.statvfs_result]


@dataclass(frozen=True, slots=True)
class Space:
    """The result of statvfs(3); ``available``: to unprivileged users."""

    total_bytes: int
    available_bytes: int
    inodes_total: int
    inodes_available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MountAnswer:
    """One mount and the result of statvfs(3).

    Exactly one of ``space``, ``error`` (the errno's name) and ``silent`` (why there is no answer;
    ``stuck`` if the calling process was inside the kernel) is set. ``writable_in_fstab`` is None if
    ``/etc/fstab`` does not list the mount.
    """

    mount: Mount
    elapsed_s: float
    space: Space | None = None
    error: str | None = None
    silent: str | None = None
    stuck: bool = False
    writable_in_fstab: bool | None = None

    def is_a_users(self, required: Collection[str]) -> bool:
        """Return whether it may be a user's own mount; see `Mount.is_a_users`."""
        return self.mount.is_a_users(self.writable_in_fstab is not None, required)


@dataclass(frozen=True, slots=True)
class Filesystems:
    """The results of the mounts, and how many exceeded `ASKED_MAX` or `USERS_ASKED_MAX`."""

    answers: tuple[MountAnswer, ...]
    not_asked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSelection:
    """Which mounts a check wants: patterns of mount points to ``ignore``, and those ``required``.

    Its text is an input of the probe, which checks with different selections share.
    """

    ignore: tuple[str, ...] = ()
    required: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as one input of a probe."""
        return json.dumps({"ignore": self.ignore, "required": self.required})

    @classmethod
    def parse(cls, text: str) -> "MountSelection":
        """Return the selection that `text` made."""
        body = json.loads(text)
        return cls(ignore=tuple(body["ignore"]), required=tuple(body["required"]))


def is_ignored(point: str, patterns: Iterable[str]) -> bool:
    """Return whether one of *patterns* excludes the mount point *point*."""
    return any(fnmatchcase(point, pattern) for pattern in patterns)


def _wanted(mounts: Iterable[Mount], selections: Sequence[MountSelection]) -> list[Mount]:
    """Return *mounts* without those that every selection ignores."""
    return [
        mount
        for mount in mounts
        if not selections
        or any(not is_ignored(mount.point, selection.ignore) for selection in selections)
    ]


def _asked(
    mounts: Iterable[Mount], in_fstab: Collection[str], required: Collection[str]
) -> list[Mount]:
    """Return the mounts to ask, those of users last."""
    users = [mount for mount in mounts if mount.is_a_users(mount.point in in_fstab, required)]
    others = [mount for mount in mounts if mount not in users]
    others.sort(key=lambda mount: mount.point not in required)
    return [*others[:ASKED_MAX], *users[:USERS_ASKED_MAX]]


def real_filesystems(mounts: Iterable[Mount]) -> list[Mount]:
    """Return one mount per real file system, without pseudo file systems and bind mounts.

    ``autofs`` is excluded because statvfs(3) would mount something.
    """
    at_point = {mount.point: mount for mount in mounts}
    kept: dict[str, Mount] = {}
    for mount in sorted(at_point.values(), key=lambda mount: (len(mount.point), mount.point)):
        real = mount.source.startswith("/dev/") or mount.filesystem in _LOCAL or mount.is_network
        if real:
            kept.setdefault(mount.device or mount.point, mount)
    return list(kept.values())


def parse_fstab(text: str) -> dict[str, bool]:
    """Return whether each mount point is writable by fstab(5)."""
    wanted = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4 and not fields[0].startswith("#"):
            wanted[unescape(fields[1]).rstrip("/") or "/"] = "ro" not in fields[3].split(",")
    return wanted


def read_filesystems(
    root: Path,
    budget_s: float,
    selections: Sequence[MountSelection] = (),
    *,
    statvfs: Statvfs = os.statvfs,
    left: AbandonedProbes | None = None,
) -> Filesystems:
    """Return the results of all mounts, read in parallel, within *budget_s* seconds.

    Mounts that all *selections* ignore are left out. Users' own are asked last, and a few only.
    *left* are children that earlier runs abandoned; default: those of this machine.
    """
    mounts, wanted = real_filesystems(_wanted(read_mounts(root), selections)), _fstab(root)
    required = {point for selection in selections for point in selection.required}
    asked = _asked(mounts, wanted, required)
    deadline_s = max(budget_s - probe.STOP_S - _MARGIN_S, 0.1)
    children: dict[int, Mount] = {}
    left = abandoned() if left is None else left
    started = []
    for mount in asked:
        child = probe.start_call(
            _question(root, mount, statvfs),
            deadline_s=deadline_s,
            question=f"mount {root} {mount.point} {mount.source}",
            left=left,
        )
        children[child.pid] = mount
        started.append(child)
    answers = [
        _answer(children[child.pid], outcome, wanted) for child, outcome in probe.watch(started)
    ]
    answers.sort(key=lambda answer: answer.mount.point)
    return Filesystems(tuple(answers), len(mounts) - len(asked))


def _fstab(root: Path) -> dict[str, bool]:
    try:
        return parse_fstab((root / "etc/fstab").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def _question(root: Path, mount: Mount, statvfs: Statvfs) -> Callable[[], dict[str, object]]:
    path = str(root / mount.point.lstrip("/"))

    def ask() -> dict[str, object]:
        try:
            result = statvfs(path)
        except OSError as exc:
            return {"error": errno.errorcode.get(exc.errno or 0, str(exc))}
        return {
            "space": {
                "total_bytes": result.f_blocks * result.f_frsize,
                "available_bytes": result.f_bavail * result.f_frsize,
                "inodes_total": result.f_files,
                "inodes_available": result.f_favail,
            }
        }

    return ask


def _answer(mount: Mount, outcome: probe.ProbeOutcome, wanted: dict[str, bool]) -> MountAnswer:
    silent, body = None, {}
    try:
        body = probe.answer(outcome)
    except ProbeError as exc:
        silent = str(exc)
    return MountAnswer(
        mount=mount,
        elapsed_s=outcome.elapsed_s,
        space=Space(**body["space"]) if "space" in body else None,
        error=body.get("error"),
        silent=silent,
        stuck=outcome.stuck,
        writable_in_fstab=wanted.get(mount.point),
    )
