"""Make room in a spool that is full: the oldest events go first, those of incidents last."""

import contextlib
import os
from pathlib import Path

from gpuops.store.spool.segments import (
    SpoolSegment,
    find_segments,
    has_live_writer,
    open_segment,
    remove_segment,
)

# The least size of a file on disk, so that many tiny segments count too.
_BLOCK_BYTES = 4096
# What a report cannot do without, and what happens seldom.
SPARED = tuple(
    b'"kind":"%s"' % kind
    for kind in (
        b"incident.recorded",
        b"attempt.ended",
        b"run.ended",
        b"decision.made",
        b"node.drained",
        b"node.resumed",
        b"node.repaired",
    )
)


def drop_oldest(spool: Path, *, bytes_max: int, segments_max: int) -> tuple[int, int]:
    """Delete lines of complete segments, oldest first, until *spool* is within its bounds.

    First all but incidents, ends of runs and attempts, decisions, drains and repairs; if that is
    not enough, those as well. Segments with a live writer stay. Returns the number of lines and of
    bytes dropped.
    """
    sizes = {segment: _size(segment) for segment in find_segments(spool)}
    dropped_lines = dropped_bytes = 0
    for spared in (SPARED, ()):
        for segment in list(sizes):
            if sum(sizes.values()) <= bytes_max and len(sizes) <= segments_max:
                return dropped_lines, dropped_bytes
            lines = _drop_lines(segment, spared)
            dropped_lines += lines
            size = _size(segment) if segment.path.exists() else 0
            dropped_bytes += max(sizes[segment] - size, 0)
            sizes[segment] = size
            if not size:
                del sizes[segment]
    return dropped_lines, dropped_bytes


def _drop_lines(segment: SpoolSegment, spared: tuple[bytes, ...]) -> int:
    """Leave in *segment* only lines with one of *spared*; return how many went."""
    fd = open_segment(segment)
    if fd is None:
        return 0
    with os.fdopen(fd, "rb") as file:
        if has_live_writer(segment, fd):
            return 0
        lines = file.readlines()
        kept = [line for line in lines if any(word in line for word in spared)]
        if len(kept) == len(lines):
            return 0
        if kept:
            try:
                _replace(segment, kept, os.fstat(fd))
            except OSError:
                return 0  # a full disk: it goes whole, if nothing else makes room
        else:
            remove_segment(segment)
    return len(lines) - len(kept)


def _replace(segment: SpoolSegment, lines: list[bytes], found: os.stat_result) -> None:
    """Replace the content of *segment*, which stays as old as it is.

    What was sent of it is unknown then, and sent again, which is harmless.
    """
    partial = segment.directory / f".{segment.number:08d}.kept"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.utime(partial, ns=(found.st_atime_ns, found.st_mtime_ns))
        segment.offset_path.unlink(missing_ok=True)
        partial.rename(segment.path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _size(segment: SpoolSegment) -> int:
    try:
        return max(segment.path.stat().st_size, _BLOCK_BYTES)
    except OSError:
        return 0
