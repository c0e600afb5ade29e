"""Whether mounted file systems answer, and how full they are: each asked in its own child."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.process import probe
from gpuops.host.process.abandoned import AbandonedProcess, abandoned
from gpuops.host.storage.mounts import Mount, read_mounts, unescape

ASKED_MAX = 512
_MARGIN_S = 0.1
_LOCAL = frozenset({"bcachefs", "btrfs", "overlay", "tmpfs", "zfs"})

Statvfs = Callable[[str], os.statvfs_result]


@dataclass(frozen=True, slots=True)
class Space:
    """What statvfs(3) says: for ``available`` read "to users without privilege"."""

    total_bytes: int
    available_bytes: int
    inodes_total: int
    inodes_available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MountAnswer:
    """One mount and what came of asking it.

    Exactly one of ``space``, ``error`` (the errno's name) and ``silent`` (why there is no answer;
    ``stuck`` where the asking process was inside the kernel) is set. ``writable_in_fstab`` is None
    where ``/etc/fstab`` does not name the mount.
    """

    mount: Mount
    elapsed_s: float
    space: Space | None = None
    error: str | None = None
    silent: str | None = None
    stuck: bool = False
    writable_in_fstab: bool | None = None


@dataclass(frozen=True, slots=True)
class Filesystems:
    """The answers of every mount that was asked, and how many were too many to ask."""

    answers: tuple[MountAnswer, ...]
    not_asked: int = 0


def worth_asking(mounts: Iterable[Mount]) -> list[Mount]:
    """Return one mount per real file system: pseudo file systems and bind mounts are left out.

    ``autofs`` is left out because asking it would mount something.
    """
    at_point = {mount.point: mount for mount in mounts}
    kept: dict[str, Mount] = {}
    for mount in sorted(at_point.values(), key=lambda mount: (len(mount.point), mount.point)):
        real = mount.source.startswith("/dev/") or mount.filesystem in _LOCAL or mount.is_network
        if real:
            kept.setdefault(mount.device or mount.point, mount)
    return list(kept.values())


def parse_fstab(text: str) -> dict[str, bool]:
    """Return whether fstab(5) wants each mount point writable."""
    wanted = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4 and not fields[0].startswith("#"):
            wanted[unescape(fields[1]).rstrip("/") or "/"] = "ro" not in fields[3].split(",")
    return wanted


def read_filesystems(
    root: Path,
    budget_s: float,
    *,
    statvfs: Statvfs = os.statvfs,
    left: Mapping[str, AbandonedProcess] | None = None,
) -> Filesystems:
    """Return the answers of all mounts, asked at the same time, within *budget_s* seconds.

    *left* are children that earlier runs left behind; this machine's where it is None.
    """
    mounts, wanted = worth_asking(read_mounts(root)), _fstab(root)
    deadline_s = max(budget_s - probe.STOP_S - _MARGIN_S, 0.1)
    children: dict[int, Mount] = {}
    left = abandoned() if left is None else left
    started = []
    for mount in mounts[:ASKED_MAX]:
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
    return Filesystems(tuple(answers), max(len(mounts) - ASKED_MAX, 0))


def _fstab(root: Path) -> dict[str, bool]:
    try:
        return parse_fstab((root / "etc/fstab").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def _question(root: Path, mount: Mount, statvfs: Statvfs) -> Callable[[], dict[str, object]]:
    path = str(root / mount.point.lstrip("/"))

    def ask() -> dict[str, object]:
        try:
            said = statvfs(path)
        except OSError as exc:
            return {"error": errno.errorcode.get(exc.errno or 0, str(exc))}
        return {
            "space": {
                "total_bytes": said.f_blocks * said.f_frsize,
                "available_bytes": said.f_bavail * said.f_frsize,
                "inodes_total": said.f_files,
                "inodes_available": said.f_favail,
            }
        }

    return ask


def _answer(mount: Mount, outcome: probe.ProbeOutcome, wanted: dict[str, bool]) -> MountAnswer:
    silent, said = None, {}
    try:
        said = probe.answer(outcome)
    except ProbeError as exc:
        silent = str(exc)
    return MountAnswer(
        mount=mount,
        elapsed_s=outcome.elapsed_s,
        space=Space(**said["space"]) if "space" in said else None,
        error=said.get("error"),
        silent=silent,
        stuck=outcome.ending is probe.ProbeEnd.HUNG or outcome.state == "D",
        writable_in_fstab=wanted.get(mount.point),
    )
