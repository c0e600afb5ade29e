"""How much memory a new program could use: of the machine, and of each enclosing cgroup."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gpuops.checkpoint.types import CheckpointError
from gpuops.errors import ProbeError
from gpuops.host.procfs import parse_meminfo, read_text
from gpuops.host.storage.mounts import Mount, parse_mountinfo
from gpuops.host.trust import number_of, text_of

_NEVER_OVERCOMMIT = 2  # vm.overcommit_memory, proc(5)
_COMMIT = ("CommitLimit", "Committed_AS")
_N_LEVELS_MAX = 64


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping and without the OOM killer.

    The least of ``MemAvailable``, of what strict overcommit leaves (proc(5), where it is on) and
    in this process's memory cgroup and each one above it, versions 1 and 2. Inactive page cache
    of a cgroup counts as available, as in Kubernetes' working set.

    Raises:
        CheckpointError: ``/proc/meminfo`` cannot be read.
    """
    try:
        meminfo = read_text(root / "proc/meminfo")
        headrooms = [parse_meminfo(meminfo).available_bytes]
    except ProbeError as exc:
        raise CheckpointError(f"cannot determine the available memory: {exc}") from exc
    headrooms += _overcommit_headroom(root, meminfo)
    headrooms += _cgroup_headroom(root)
    return max(0, min(headrooms))


def _overcommit_headroom(root: Path, meminfo: str) -> Iterator[int]:
    if number_of(root / "proc/sys/vm/overcommit_memory") == _NEVER_OVERCOMMIT:
        limit, used = (_match_int(meminfo, rf"{name}:\s+(\d+) kB") for name in _COMMIT)
        if limit is not None and used is not None:
            yield (limit - used) * 1024


def _cgroup_headroom(root: Path) -> Iterator[int]:
    memberships = (text_of(root / "proc/self/cgroup") or "").splitlines()
    try:
        mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    except ProbeError:
        return
    for line in memberships:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            for folder in _levels(root, path, [m for m in mounts if m.filesystem == "cgroup2"]):
                yield from _headroom_v2(folder)
        elif "memory" in controllers.split(","):
            v1 = [m for m in mounts if m.filesystem == "cgroup" and "memory" in m.options]
            for folder in _levels(root, path, v1):
                yield from _headroom_v1(folder)


def _levels(root: Path, path: str, mounts: list[Mount]) -> Iterator[Path]:
    """Yield the folders of the cgroup *path* and of those above it.

    In a container that has no cgroup namespace of its own, *path* is the host's and the mount
    shows the container's own cgroup as its top: levels that do not exist are skipped.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in {"/", ".."}]
    for mount in mounts:
        top = root / mount.point.lstrip("/")
        for depth in range(min(len(parts), _N_LEVELS_MAX), -1, -1):
            folder = top.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _headroom_v2(folder: Path) -> Iterator[int]:
    used = number_of(folder / "memory.current")
    limits = [number_of(folder / name) for name in ("memory.max", "memory.high")]  # "max": None
    cache = _match_int(text_of(folder / "memory.stat") or "", r"inactive_file (\d+)") or 0
    if used is not None:
        yield from (limit - used + cache for limit in limits if limit is not None)


def _headroom_v1(folder: Path) -> Iterator[int]:
    used = number_of(folder / "memory.usage_in_bytes")
    stat = text_of(folder / "memory.stat") or ""
    limits = [
        number_of(folder / "memory.limit_in_bytes"),
        _match_int(
            stat, r"hierarchical_memory_limit (\d+)"
        ),  # includes cgroups that are not visible
    ]
    cache = _match_int(stat, r"total_inactive_file (\d+)") or 0
    if used is not None:
        yield from (limit - used + cache for limit in limits if limit is not None)


def _match_int(text: str, pattern: str) -> int | None:
    match = re.search(rf"^{pattern}$", text, re.MULTILINE)
    return int(match[1]) if match else None
