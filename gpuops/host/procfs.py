"""Memory, load and processes, from ``/proc`` (proc(5))."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.trust import reason_of, text_of
from gpuops.model import UnknownReason

_MEMINFO = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
_CPU = re.compile(r"^cpu\d+ ", re.MULTILINE)
_BTIME = re.compile(r"^btime (\d+)$", re.MULTILINE)
_CONFIRM_S = 0.2
# Kernel functions and modules of clients (linux fs: nfs, smb, ceph, fuse, 9p, and net/sunrpc;
# Lustre, GPFS, BeeGFS, WekaFS). Those of a server (nfsd_, svc_) wait for this node's own disks.
_NETWORK_WAIT = re.compile(
    r"\b(?:nfs[34]?_|__nfs|rpc_|__rpc_|xprt_|cifs_|smb2_|ceph_|fuse_|request_wait_answer|v9fs_|p9_)"
    r"|\[(?:nfs|nfsv[34]|lustre|ptlrpc|lov|osc|mdc|obdclass|lnet|fuse|cifs|ceph|9p|beegfs|mmfs26"
    r"|mmfslinux|wekafs\w*)\]"
)
# TASK_COMM_LEN of linux/sched.h without the final zero: the kernel truncates longer names.
_NAME_MAX = 15


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory: total, and available to a new program without swapping."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process; ``start_ticks`` distinguishes it from a later one with the same pid."""

    pid: int
    name: str
    state: str
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Load:
    """Load averages over 1, 5 and 15 minutes, the CPUs, and processes stuck in the kernel.

    ``blocked`` are those in state D in two samples 0.2 s apart: ordinary disk waits are shorter.
    ``on_network``: how many more wait for a network file system or a FUSE program.
    """

    load1: float
    load5: float
    load15: float
    cpus: int
    blocked: tuple[Process, ...] = ()
    on_network: int = 0


def read_text(path: Path) -> str:
    """Return the content of *path*.

    Raises:
        ProbeError: It cannot be read; says why.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ProbeError(f"cannot read {path}: {exc.strerror}", reason_of(exc)) from exc


def parse_meminfo(text: str) -> Memory:
    """Return the memory in ``/proc/meminfo``.

    Raises:
        ProbeError: It has no ``MemTotal`` above zero or no ``MemAvailable`` (Linux before 3.14).
    """
    amounts = {name: int(kib) * 1024 for name, kib in _MEMINFO.findall(text)}
    if not amounts.get("MemTotal") or "MemAvailable" not in amounts:
        raise ProbeError(
            "/proc/meminfo lacks MemTotal or MemAvailable", UnknownReason.NOT_SUPPORTED
        )
    return Memory(amounts["MemTotal"], amounts["MemAvailable"])


def read_memory(root: Path = Path("/")) -> Memory:
    """Return this machine's memory.

    Raises:
        ProbeError: ``/proc/meminfo`` cannot be read or lacks a field.
    """
    return parse_meminfo(read_text(root / "proc/meminfo"))


def parse_loadavg(text: str) -> tuple[float, float, float]:
    """Return the three averages in ``/proc/loadavg``.

    Raises:
        ProbeError: It has another form.
    """
    try:
        one, five, fifteen = (float(word) for word in text.split()[:3])
    except ValueError as exc:
        raise ProbeError(f"/proc/loadavg reads {text[:60]!r}", UnknownReason.NOT_SUPPORTED) from exc
    return one, five, fifteen


def parse_stat(text: str) -> Process | None:
    """Return the process of one ``/proc/PID/stat``, None for malformed text.

    The name may hold spaces and parentheses: it ends at the last one.
    """
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    if not pid.isdecimal() or len(fields) < 20 or not fields[19].isdecimal():
        return None
    return Process(int(pid), name, fields[0], int(fields[19]))


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of *patterns* matches *name*, which the kernel may have truncated."""
    truncated = len(name) == _NAME_MAX
    return any(
        fnmatchcase(name, pattern) or (truncated and fnmatchcase(name, pattern[:_NAME_MAX]))
        for pattern in patterns
    )


def process(pid: int, root: Path = Path("/")) -> Process | None:
    """Return the process *pid*, None if it has ended."""
    try:
        text = (root / f"proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return parse_stat(text)


def processes(root: Path = Path("/")) -> list[Process]:
    """Return all processes, without those that end meanwhile."""
    found = (process(pid, root) for pid in _numbers(root / "proc"))
    return [item for item in found if item is not None]


def _numbers(proc: Path) -> list[int]:
    try:
        return [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]
    except OSError:
        return []


def read_load(root: Path = Path("/"), *, confirm_s: float = _CONFIRM_S) -> Load:
    """Return load and blocked processes; takes *confirm_s* if a process is in state D.

    Raises:
        ProbeError: ``/proc/loadavg`` or ``/proc/stat`` cannot be read.
    """
    one, five, fifteen = parse_loadavg(read_text(root / "proc/loadavg"))
    cpus = len(_CPU.findall(read_text(root / "proc/stat"))) or 1
    blocked = _blocked(processes(root))
    if blocked:
        time.sleep(confirm_s)
        again = set(_blocked(processes(root)))
        blocked = [process for process in blocked if process in again]
    local = [process for process in blocked if not _waits_on_network(process.pid, root)]
    return Load(one, five, fifteen, cpus, tuple(local), len(blocked) - len(local))


def _waits_on_network(pid: int, root: Path) -> bool:
    """Return whether *pid* waits for a server; ``stack`` is for root only, ``wchan`` for all."""
    where = (text_of(root / f"proc/{pid}/{name}") or "" for name in ("wchan", "stack"))
    return any(_NETWORK_WAIT.search(text) is not None for text in where)


def _blocked(found: Sequence[Process]) -> list[Process]:
    return [process for process in found if process.state == "D"]


def boot_us(root: Path = Path("/")) -> int | None:
    """Return when this machine booted, in epoch µs (full seconds), None if it is unknown."""
    try:
        match = _BTIME.search(read_text(root / "proc/stat"))
    except ProbeError:
        return None
    return None if match is None else int(match[1]) * 1_000_000
