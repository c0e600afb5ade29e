"""How much waits in a spool, and how far each of its segments has been sent."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.store.segments import Segment, find_segments, open_segment

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Backlog:
    """What no store has taken yet. ``oldest_us`` is when the oldest of it was last written to."""

    segments: int = 0
    lines: int = 0
    bytes: int = 0
    oldest_us: int | None = None


def measure(spool: Path) -> Backlog:
    """Return what waits in *spool*.

    Raises:
        SpoolError: The directory cannot be read.
    """
    return measure_segments(find_segments(spool))


def measure_segments(segments: Sequence[Segment]) -> Backlog:
    """Return what waits in *segments*."""
    lines = size = waiting = 0
    oldest_us: int | None = None
    for segment in segments:
        fd = open_segment(segment)
        if fd is None:
            continue
        try:
            offset = read_mark(segment)
            left = count_lines(fd, offset)
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if left:
            waiting += 1
            lines += left
            size += max(found.st_size - offset, 0)
            changed_us = found.st_mtime_ns // 1000
            oldest_us = changed_us if oldest_us is None else min(oldest_us, changed_us)
    return Backlog(waiting, lines, size, oldest_us)


def count_lines(fd: int, offset: int) -> int:
    """Return the number of ended lines in an open file from *offset* on."""
    count = 0
    while chunk := os.pread(fd, _CHUNK_BYTES, offset):
        count += chunk.count(b"\n")
        offset += len(chunk)
    return count


def store_tag(url: str) -> str:
    """Return a short name for the store at *url* (without its password)."""
    return hashlib.sha256(url.encode("utf-8")).hexdigest()[:16]


def read_mark(segment: Segment, tag: str | None = None) -> int:
    """Return the offset up to which the store called *tag* (None: any) has *segment*."""
    try:
        offset, found = segment.mark.read_text(encoding="ascii").split()
        return int(offset) if tag in (None, found) and int(offset) > 0 else 0
    except (OSError, ValueError):
        return 0  # nothing was sent, or it is not known: sending again does no harm


def write_mark(segment: Segment, offset: int, tag: str) -> None:
    """Remember that the store called *tag* has *segment* up to *offset*.

    Raises:
        OSError: It cannot be written; then it will be sent again.
    """
    partial = segment.mark.with_suffix(".sent.new")
    partial.write_text(f"{offset} {tag}\n", encoding="ascii")
    partial.rename(segment.mark)
