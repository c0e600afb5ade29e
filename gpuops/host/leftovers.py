"""Left-over processes: zombies, and those of users that belong to no job.

From ``/proc`` (proc(5)). A process of a Slurm job is recognised by its cgroup, which slurmstepd
names ``…/job_ID/…`` (cgroup/v1 and v2 plug-ins).
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.procfs import parse_stat
from gpuops.host.trust import text_of

# login.defs: users have 1000 to 60000; above are nobody, containers' and systemd's dynamic ids.
UID_MIN, UID_MAX = 1000, 60000
LISTED_MAX = 100
_IN_JOB = re.compile(r"/job_\d+(/|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class UserProcess:
    """One process of a user; ``age_s`` since its start."""

    pid: int
    name: str
    uid: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The number of zombies, and users' processes outside of jobs: the first and their number.

    ``hidden``: other users' processes are not visible (``hidepid`` of proc(5)).
    """

    zombies: int = 0
    count: int = 0
    processes: tuple[UserProcess, ...] = ()
    hidden: bool = False


def read_leftovers(root: Path = Path("/")) -> Leftovers:
    """Return the left-over processes, without those that end meanwhile."""
    uptime_s = _uptime_s(root)
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    zombies, found = 0, []
    for folder in _folders(root / "proc"):
        text = text_of(folder / "stat")
        process = parse_stat(text) if text else None
        if process is None:
            continue
        if process.state in "ZX":
            zombies += 1
            continue
        uid = _uid(folder)
        if uid is None or not UID_MIN <= uid <= UID_MAX or _in_job(folder):
            continue
        age_s = max(uptime_s - process.start_ticks / ticks_per_s, 0.0)
        found.append(UserProcess(process.pid, process.name, uid, round(age_s, 1)))
    found.sort(key=lambda item: item.pid)
    return Leftovers(zombies, len(found), tuple(found[:LISTED_MAX]), _hidden(root))


def _folders(proc: Path) -> list[Path]:
    try:
        return [entry for entry in proc.iterdir() if entry.name.isdecimal()]
    except OSError:
        return []


def _uid(folder: Path) -> int | None:
    """Return the real user id, from ``status``: a fake root's files all belong to us."""
    for line in (text_of(folder / "status") or "").splitlines():
        if line.startswith("Uid:"):
            fields = line.split()
            return int(fields[1]) if len(fields) > 1 and fields[1].isdecimal() else None
    return None


def _in_job(folder: Path) -> bool:
    return _IN_JOB.search(text_of(folder / "cgroup") or "") is not None


def _uptime_s(root: Path) -> float:
    try:
        return float((text_of(root / "proc/uptime") or "0").split()[0])
    except (ValueError, IndexError):
        return 0.0


def _hidden(root: Path) -> bool:
    # Process 1 always exists; if it is hidden, all other users' processes are.
    return not (root / "proc/1/stat").exists()
