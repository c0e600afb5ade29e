"""Read a spool: every line is treated as hostile, none can block the others.

A torn last line is the result of a crash: skipped and counted. A bad line in the middle is damage
or malice: reported, for `quarantine`.

A quarantined line is one JSON object: its position, the reason and its bytes, which
`gpuops.store.spool.replay` sends again; of one that is too long only a head, without a newline. The
directory is bounded, a quarter of it for incidents and the like; lines above the bound are only
counted, a byte for each in the file `DROPPED_FILE`.
"""

import contextlib
import errno
import io
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpuops.model import Event, Severity
from gpuops.store.spool.folders import ensure_folder, open_file, open_folder, open_to_append
from gpuops.store.spool.format import LINE_BYTES_MAX, SpoolLine, SpoolLineError, decode_line
from gpuops.store.spool.rotate import SPARED
from gpuops.store.spool.segments import REJECTED_DIR, SpoolSegment, modified_us

HEAD_BYTES = 8192
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be delivered: why, and its bytes; of one too long, its head."""

    reason: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One line read: *end* is the offset after it; exactly one of *line* to *is_torn* is set."""

    end: int
    line: SpoolLine | None = None
    bad_line: BadLine | None = None
    is_torn: bool = False
    raw: bytes = b""


def read_lines(
    fd: int,
    *,
    origin: str,
    offset: int = 0,
    is_closed: bool = True,
    bytes_max: int | None = None,
) -> Iterator[SpoolEntry]:
    """Yield the lines of an open segment from *offset* on.

    Args:
        fd: Stays open.
        origin: The only writer whose lines it may contain.
        offset: The start of a line.
        is_closed: It has no writer any more, so that a last line without a newline is torn; else
            that line is incomplete and left for the next call.
        bytes_max: The file counts as ended after so many bytes from *offset* on: a hostile writer
            may extend it without end.
    """
    with _open_at(fd, offset, bytes_max) as file:
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
                yield SpoolEntry(position, bad_line=BadLine(reason, raw[:HEAD_BYTES]))
            elif not has_newline and not is_closed:
                return
            else:
                yield decode_entry(raw, position, origin, has_newline=has_newline)


def _open_at(fd: int, offset: int, bytes_max: int | None) -> BinaryIO:
    if bytes_max is not None:
        return io.BytesIO(os.pread(fd, bytes_max, offset))
    file = os.fdopen(os.dup(fd), "rb")
    file.seek(offset)
    return file


def _skip_line(file: BinaryIO) -> tuple[int, bool]:
    skipped = 0
    while chunk := file.readline(_CHUNK_BYTES):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            return skipped, True
    return skipped, False


def decode_entry(raw: bytes, end: int, origin: str, *, has_newline: bool) -> SpoolEntry:
    """Return the entry for the line *raw*, which only *origin* may have written."""
    try:
        line = decode_line(raw)
    except SpoolLineError as exc:
        if not has_newline:
            return SpoolEntry(end, is_torn=True)
        return SpoolEntry(end, bad_line=BadLine(str(exc), raw))
    if not has_newline:
        raw += b"\n"  # the line is complete: only a head is kept without
    if line.origin != origin:
        return SpoolEntry(end, bad_line=BadLine(f"it claims the origin {line.origin}", raw))
    return SpoolEntry(end, line=line, raw=raw)


REJECTED_BYTES_MAX = 16 * 2**20
DROPPED_FILE = "dropped"
_NAMESPACE = uuid.UUID("8a4f9b52-6b1c-5d53-9f0e-70c1b0a7c8d2")


@dataclass(frozen=True, slots=True)
class RejectedLine:
    """One refused line of a segment, which ends at offset *end*."""

    segment: SpoolSegment
    end: int
    bad_line: BadLine


def quarantine(
    records: Path, rejected: Iterable[RejectedLine], *, bytes_max: int = REJECTED_BYTES_MAX
) -> None:
    """Append *rejected* to files named after their segments, in a directory of *records*, ours.

    Raises:
        OSError: They cannot be written; then the segment must stay.
    """
    uid = os.geteuid()
    with open_folder(records, uid=uid) as top:
        ensure_folder(top, REJECTED_DIR)
    with open_folder(records, REJECTED_DIR, uid=uid) as folder:
        bytes_left = bytes_max - sum(_size_bytes(folder, name) for name in rejected_files(folder))
        for item in rejected:
            entry = {
                "origin": item.segment.origin,
                "segment": item.segment.number,
                "end": item.end,
                "reason": item.bad_line.reason,
                "raw": item.bad_line.raw.decode("utf-8", "surrogateescape"),
            }
            data = json.dumps(entry).encode("ascii") + b"\n"
            is_spared = any(word in item.bad_line.raw for word in SPARED)
            if len(data) > bytes_left - (0 if is_spared else bytes_max // 4):
                _append(folder, DROPPED_FILE, b".")
                continue
            bytes_left -= len(data)
            _append(folder, f"{item.segment.origin}-{item.segment.number:08d}.jsonl", data)


def _append(folder: int, name: str, data: bytes) -> None:
    fd = open_to_append(folder, name)
    try:
        size = os.fstat(fd).st_size
        if os.write(fd, data) != len(data):
            os.ftruncate(fd, size)  # half a record would spoil the next one as well
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def count_rejected(records: Path) -> int:
    """Return how many lines are quarantined below *records*."""
    count, uid = 0, os.geteuid()
    with contextlib.suppress(OSError), open_folder(records, REJECTED_DIR, uid=uid) as folder:
        for name in rejected_files(folder):
            with os.fdopen(open_file(folder, name, uid=uid), "rb") as file:
                count += sum(1 for _ in file)
    return count


def count_dropped(records: Path) -> int:
    """Return how many refused lines exceeded the bound below *records* and were dropped."""
    try:
        with open_folder(records, REJECTED_DIR, uid=os.geteuid()) as folder:
            return _size_bytes(folder, DROPPED_FILE)
    except OSError:
        return 0


def _size_bytes(folder: int, name: str) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size


def rejected_files(folder: int) -> list[str]:
    """Return the names of the files of refused lines in an open directory."""
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name.endswith(".jsonl") and entry.is_file(follow_symlinks=False)
        )


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
