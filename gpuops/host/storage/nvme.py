"""md arrays, and NVMe drives: their state from sysfs, and their log from nvme-cli if installed."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuops.errors import ProbeError
from gpuops.host.process.abandoned import abandoned
from gpuops.host.process.command import ask, find
from gpuops.host.trust import entries_of, text_of

_HEAD = re.compile(r"^(md\S*) : (\S+)(.*)$")
_MEMBERS = re.compile(r"\[(\d+)/(\d+)\] \[[U_]+\]")
_FAILED = re.compile(r"(\S+?)\[\d+\]\(F\)")
# The shared metadata of firmware arrays (Intel VROC, DDF) is a separate md array, which is never
# started: mdadm(8), CONTAINER. Their members name it as ``external:/md127/0``.
_CONTAINER = re.compile(r"\bsuper external:[^/\s-]")
_WORK = re.compile(r"(resync|recovery|reshape|check) *= *([0-9.]+%)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array.

    ``state`` is ``active``, ``inactive`` or ``broken``. ``wanted`` and ``working`` count its
    members, None for levels without redundancy; ``failed`` names those that the kernel removed and
    ``work`` the operation in progress (``recovery 12.6%``).
    """

    name: str
    state: str
    level: str | None = None
    wanted: int | None = None
    working: int | None = None
    failed: tuple[str, ...] = ()
    work: str | None = None


@dataclass(frozen=True, slots=True)
class MdRaid:
    """All arrays."""

    arrays: tuple[Array, ...] = ()


def read_mdraid(root: Path = Path("/")) -> MdRaid:
    """Return the arrays; none if the kernel has no md driver."""
    try:
        text = (root / "proc/mdstat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return MdRaid()
    return parse_mdstat(text)


def parse_mdstat(text: str) -> MdRaid:
    """Return the arrays in ``/proc/mdstat``, without containers; other text is ignored."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            blocks.append([line])
        elif blocks and line.startswith(" "):
            blocks[-1].append(line)
    return MdRaid(tuple(_array(block) for block in blocks if not _is_container(block)))


def _is_container(block: list[str]) -> bool:
    return any(_CONTAINER.search(line) for line in block[1:])


def _array(block: list[str]) -> Array:
    head = _HEAD.match(block[0])
    assert head is not None
    rest = "\n".join(block[1:])
    words = head[3].split()
    members, work = _MEMBERS.search(rest), _WORK.search(rest)
    return Array(
        name=head[1],
        state=head[2],
        level=next((word for word in words if word.startswith(("raid", "linear"))), None),
        wanted=int(members[1]) if members else None,
        working=int(members[2]) if members else None,
        failed=tuple(_FAILED.findall(head[3])),
        work=f"{work[1]} {work[2]}" if work else None,
    )


_ONE_S = 2.0
_LEAST_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeDrive:
    """One drive; None: not reported.

    ``critical_warning`` is the bit mask, ``media_errors`` a count over the drive's life and
    ``used_percent`` the used part of its rated life: SMART / Health Information of the NVM Express
    Base Specification. ``trouble``: why that log could not be read.
    """

    name: str
    serial: str
    model: str | None = None
    state: str | None = None
    transport: str | None = None
    critical_warning: int | None = None
    media_errors: int | None = None
    used_percent: int | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Nvme:
    """All drives; ``tool``: nvme-cli was found and run."""

    drives: tuple[NvmeDrive, ...] = ()
    tool: bool = False


def read_nvme(root: Path, budget_s: float) -> Nvme:
    """Return the drives, with their logs, within *budget_s* seconds."""
    drives = [_drive(folder) for folder in entries_of(root / "sys/class/nvme")]
    tool = find(root, "nvme") if drives else None
    if tool is None:
        return Nvme(tuple(drives))
    end_s = time.monotonic() + budget_s
    asked = [_asked(tool, drive, end_s - time.monotonic()) for drive in drives]
    return Nvme(tuple(asked), tool=True)


def _drive(folder: Path) -> NvmeDrive:
    return NvmeDrive(
        name=folder.name,
        serial=text_of(folder / "serial") or folder.name,
        model=text_of(folder / "model") or None,
        state=text_of(folder / "state") or None,
        transport=text_of(folder / "transport") or None,
    )


def _asked(tool: Path, drive: NvmeDrive, left_s: float) -> NvmeDrive:
    if left_s < _LEAST_S:
        return replace(drive, trouble="no time was left to read it")
    argv: list[Path | str] = [tool, "smart-log", "-o", "json", f"/dev/{drive.name}"]
    try:
        answer = ask(argv, min(_ONE_S, left_s), left=abandoned())
    except ProbeError as exc:
        return replace(drive, trouble=str(exc))
    if answer.exit_code != 0:
        return replace(drive, trouble=f"nvme {answer.ending}: {answer.first_line()}".rstrip(": "))
    return with_smart_log(drive, answer.output)


def with_smart_log(drive: NvmeDrive, text: str) -> NvmeDrive:
    """Return *drive* with nvme-cli's JSON *text*; versions 1 and 2 name a key differently."""
    try:
        log = json.loads(text)
    except (ValueError, RecursionError):
        log = None
    if not isinstance(log, dict) or "critical_warning" not in log:
        return replace(drive, trouble="nvme smart-log printed no log")
    return replace(
        drive,
        critical_warning=_whole(log["critical_warning"]),
        media_errors=_whole(log.get("media_errors")),
        used_percent=_whole(log.get("percent_used", log.get("percentage_used"))),
    )


def _whole(value: Any) -> int | None:  # noqa: ANN401 JSON of another program
    """Return the number in *value*: large ones are written as strings, verbose ones as tables."""
    if isinstance(value, Mapping):
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(float(value)) if isinstance(value, float) else int(value)
    except (ValueError, OverflowError):
        return None
