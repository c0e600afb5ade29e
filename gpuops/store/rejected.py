"""Lines that no store can take: kept aside in ``<spool>/rejected/``, and reported.

Each is one JSON object: where it stood, why it was refused, its first bytes. The directory is
bounded; lines above the bound are only counted, a byte for each in the file `DROPPED`.
"""

import json
import os
import stat
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuops.model import Event, Severity
from gpuops.store.lines import Line
from gpuops.store.segments import REJECTED, Segment, changed_us
from gpuops.store.spool_reader import Bad

BYTES_MAX = 16 * 2**20
DROPPED = "dropped"
_NAMESPACE = uuid.UUID("8a4f9b52-6b1c-5d53-9f0e-70c1b0a7c8d2")


@dataclass(frozen=True, slots=True)
class Rejected:
    """One refused line of a segment, which ends at *end* in it."""

    segment: Segment
    end: int
    bad: Bad


def keep_aside(spool: Path, rejected: Iterable[Rejected]) -> None:
    """Append *rejected* to files named after their segments.

    Raises:
        OSError: They cannot be kept; then the segment must stay.
    """
    directory = spool / REJECTED
    directory.mkdir(mode=0o700, exist_ok=True)
    room = BYTES_MAX - _size_bytes(directory)
    for item in rejected:
        entry = {
            "origin": item.segment.origin,
            "segment": item.segment.number,
            "end": item.end,
            "reason": item.bad.reason,
            "raw": item.bad.raw.decode("utf-8", "backslashreplace"),
        }
        data = json.dumps(entry).encode("ascii") + b"\n"
        if len(data) > room:
            _append(directory / DROPPED, b".")
            continue
        room -= len(data)
        _append(directory / f"{item.segment.origin}-{item.segment.number:08d}.jsonl", data)


def _append(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def count_rejected(spool: Path) -> int:
    """Return how many lines are kept aside below *spool*."""
    count = 0
    for path in _files(spool / REJECTED):
        with path.open("rb") as file:
            count += sum(1 for _ in file)
    return count


def count_dropped(spool: Path) -> int:
    """Return how many refused lines did not fit below *spool* and are gone."""
    try:
        return (spool / REJECTED / DROPPED).lstat().st_size
    except OSError:
        return 0


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in _files(directory))


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [p for p in sorted(directory.glob("*.jsonl")) if stat.S_ISREG(p.lstat().st_mode)]


def report_of(rejected: Rejected, *, node: str) -> Line:
    """Return the event that reports the first refused line of a segment.

    The same segment makes the same event, however often it is read; its time is the segment's.
    """
    segment = rejected.segment
    name = f"{segment.origin}/{segment.number:08d}"
    event = Event(
        id=str(uuid.uuid5(_NAMESPACE, name)),
        kind="tool.failed",
        t_us=changed_us(segment),
        node=node,
        severity=Severity.WARNING,
        payload={
            "what": "spool",
            "error": f"spool segment {name} has refused lines, the first ending at byte "
            f"{rejected.end}: {rejected.bad.reason}; they are kept in {REJECTED}/",
            "traceback": None,
        },
    )
    # A boot of its own, so that the report cannot take the number of an event.
    return Line(segment.origin, "rejected", segment.number, event)
