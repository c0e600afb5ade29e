"""How many more threads the system lets this process start (proc(5), setrlimit(2), cgroups(7))."""

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from gpuops.host.trust import text_of

_TASK_FILES = 2  # links of /proc/PID/task that are no threads


def room_for_threads(root: Path = Path("/")) -> float:
    """Return how many more may be started; infinity where no limit is known.

    Other processes count: limits are of the machine, of the user and of each control group.
    """
    return min((_of_machine(root), _of_user(root), *_of_groups(root)))


def _of_machine(root: Path) -> float:
    kernel, load = root / "proc/sys/kernel", text_of(root / "proc/loadavg") or ""
    total = load.partition("/")[2].partition(" ")[0]
    limit = min(_number(kernel / "threads-max"), _number(kernel / "pid_max"))
    return limit - int(total) if total.isdecimal() else math.inf


def _of_user(root: Path) -> float:
    limit, uid = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.geteuid()
    return math.inf if limit == resource.RLIM_INFINITY or not uid else limit - _threads(root, uid)


def _threads(root: Path, uid: int) -> int:
    """Return how many threads *uid* has."""
    n_threads = 0
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            found = (folder / "task").stat()
        except OSError:
            continue  # it has ended
        n_threads += found.st_nlink - _TASK_FILES if found.st_uid == uid else 0
    return n_threads


def _of_groups(root: Path) -> Iterator[float]:
    """Yield the room in this process's control group and in those above it, of either version."""
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "pids" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("pids" if controllers else "")
        for name in (path, *map(str, Path(path).parents)):
            group = base / name.lstrip("/")
            yield _number(group / "pids.max") - _number(group / "pids.current", 0)


def _number(path: Path, default: float = math.inf) -> float:
    text = text_of(path) or ""
    return int(text) if text.isdecimal() else default
