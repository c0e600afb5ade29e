"""Read a spool: every line is treated as hostile, none can block the others.

A torn last line is the result of a crash: skipped and counted. A bad line in the middle is damage
or malice: reported, for `quarantine`.

A quarantined line is one JSON object: its position, the reason, its first bytes. The directory is
bounded; lines above the bound are only counted, a byte for each in the file `DROPPED_FILE`.
"""

import json
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpuops.model import Event, Severity
from gpuops.store.spool.format import LINE_BYTES_MAX, SpoolLine, SpoolLineError, decode_line
from gpuops.store.spool.segments import REJECTED_DIR, SpoolSegment, modified_us

BAD_LINE_BYTES_MAX = 8192
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be delivered: why, and its first bytes."""

    reason: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One line read: *end* is the offset after it; exactly one of the others is set."""

    end: int
    line: SpoolLine | None = None
    bad_line: BadLine | None = None
    is_torn: bool = False


def read_lines(
    fd: int, *, origin: str, offset: int = 0, is_closed: bool = True
) -> Iterator[SpoolEntry]:
    """Yield the lines of an open segment from *offset* on.

    Args:
        fd: Stays open.
        origin: The only writer whose lines it may contain.
        offset: The start of a line.
        is_closed: It has no writer any more, so that a last line without a newline is torn; else
            that line is incomplete and left for the next call.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(offset)
        position = offset
        while raw := file.readline(LINE_BYTES_MAX + 1):
            position += len(raw)
            has_newline = raw.endswith(b"\n")
            if not has_newline and len(raw) > LINE_BYTES_MAX:
                skipped, has_newline = _skip_line(file)
                position += skipped
                if not has_newline and not is_closed:
                    return
                reason = f"longer than {LINE_BYTES_MAX} bytes"
                yield SpoolEntry(position, bad_line=BadLine(reason, raw[:BAD_LINE_BYTES_MAX]))
            elif not has_newline and not is_closed:
                return
            else:
                yield _decode_entry(raw, position, origin, has_newline=has_newline)


def _skip_line(file: BinaryIO) -> tuple[int, bool]:
    skipped = 0
    while chunk := file.readline(_CHUNK_BYTES):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            return skipped, True
    return skipped, False


def _decode_entry(raw: bytes, end: int, origin: str, *, has_newline: bool) -> SpoolEntry:
    try:
        line = decode_line(raw)
    except SpoolLineError as exc:
        if not has_newline:
            return SpoolEntry(end, is_torn=True)
        return SpoolEntry(end, bad_line=BadLine(str(exc), raw[:BAD_LINE_BYTES_MAX]))
    if line.origin != origin:
        return SpoolEntry(
            end, bad_line=BadLine(f"it claims the origin {line.origin}", raw[:BAD_LINE_BYTES_MAX])
        )
    return SpoolEntry(end, line=line)


REJECTED_BYTES_MAX = 16 * 2**20
DROPPED_FILE = "dropped"
_NAMESPACE = uuid.UUID("8a4f9b52-6b1c-5d53-9f0e-70c1b0a7c8d2")


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """One refused line of a segment, which ends at offset *end*."""

    segment: SpoolSegment
    end: int
    bad_line: BadLine


def quarantine(spool: Path, rejected: Iterable[RejectedLine]) -> None:
    """Append *rejected* to files named after their segments.

    Raises:
        OSError: They cannot be written; then the segment must stay.
    """
    directory = spool / REJECTED_DIR
    directory.mkdir(mode=0o700, exist_ok=True)
    bytes_left = REJECTED_BYTES_MAX - _size_bytes(directory)
    for item in rejected:
        entry = {
            "origin": item.segment.origin,
            "segment": item.segment.number,
            "end": item.end,
            "reason": item.bad_line.reason,
            "raw": item.bad_line.raw.decode("utf-8", "backslashreplace"),
        }
        data = json.dumps(entry).encode("ascii") + b"\n"
        if len(data) > bytes_left:
            _append(directory / DROPPED_FILE, b".")
            continue
        bytes_left -= len(data)
        _append(directory / f"{item.segment.origin}-{item.segment.number:08d}.jsonl", data)


def _append(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def count_rejected(spool: Path) -> int:
    """Return how many lines are quarantined below *spool*."""
    count = 0
    for path in _files(spool / REJECTED_DIR):
        with path.open("rb") as file:
            count += sum(1 for _ in file)
    return count


def count_dropped(spool: Path) -> int:
    """Return how many refused lines exceeded the bound below *spool* and were dropped."""
    try:
        return (spool / REJECTED_DIR / DROPPED_FILE).lstat().st_size
    except OSError:
        return 0


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in _files(directory))


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [p for p in sorted(directory.glob("*.jsonl")) if stat.S_ISREG(p.lstat().st_mode)]


def rejection_event_line(rejected: RejectedLine, *, node: str) -> SpoolLine:
    """Return the event that reports the first refused line of a segment.

    The event depends only on the segment, however often it is read; its time is the segment's.
    """
    segment = rejected.segment
    name = f"{segment.origin}/{segment.number:08d}"
    event = Event(
        id=str(uuid.uuid5(_NAMESPACE, name)),
        kind="tool.failed",
        t_us=modified_us(segment),
        node=node,
        severity=Severity.WARNING,
        payload={
            "what": "spool",
            "error": f"spool segment {name} has refused lines, the first ending at byte "
            f"{rejected.end}: {rejected.bad_line.reason}; they are kept in {REJECTED_DIR}/",
            "traceback": None,
        },
    )
    # A separate boot id, so that the report cannot take the number of an event.
    return SpoolLine(segment.origin, "rejected", segment.number, event)
