"""The files of a spool directory, their backlog, and the offset up to which each was sent.

Layout: ``<spool>/<origin>/<number>.open`` while its writer appends (it holds a flock on it),
``.ready`` once complete, ``<number>.sent`` next to it with the offset that a store already has;
``<spool>/rejected/`` for lines that no store accepts.
"""

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import SpoolError
from gpuops.host.trust import why_not_ours
from gpuops.store.spool.format import ORIGIN_PATTERN

# The least size of a file on disk, so that many tiny segments count too.
BLOCK_BYTES = 4096
REJECTED_DIR = "rejected"
_SEGMENT = re.compile(r"(\d{8})\.(open|ready)")


@dataclass(frozen=True, slots=True)
class SpoolSegment:
    """One file of one origin."""

    directory: Path
    origin: str
    number: int
    is_ready: bool

    @property
    def path(self) -> Path:
        return self.directory / f"{self.number:08d}.{'ready' if self.is_ready else 'open'}"

    @property
    def offset_path(self) -> Path:
        """Return the file with the offset up to which it was sent."""
        return self.directory / f"{self.number:08d}.sent"


def ensure_own_directory(path: Path, *, private: bool) -> None:
    """Create *path* if missing and check that it is ours; *private*: not accessible to others.

    Raises:
        SpoolError: Not a directory, another user's, open to others, or not writable.
    """
    problem = why_not_ours(path, private=private)
    if problem is not None:
        raise spool_error(path, problem)


def spool_error(path: Path, reason: str) -> SpoolError:
    """Return the one-line error for a spool that cannot be written."""
    return SpoolError(
        f"cannot write the spool {path}: {reason}; "
        "point spool.dir (GPUOPS_SPOOL) at a directory of your own with free space"
    )


def find_segments(spool: Path) -> list[SpoolSegment]:
    """Return every segment below *spool*, oldest first; none if there is no spool.

    Files with other names are ignored.

    Raises:
        SpoolError: The directory cannot be read.
    """
    found: list[tuple[int, str, int, SpoolSegment]] = []
    for origin in _entries(spool):
        if not ORIGIN_PATTERN.fullmatch(origin.name) or not origin.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(Path(origin.path)):
            match = _SEGMENT.fullmatch(entry.name)
            changed_ns = _modified_ns(entry) if match else None
            if match is None or changed_ns is None:
                continue
            number = int(match[1])
            segment = SpoolSegment(Path(origin.path), origin.name, number, match[2] == "ready")
            found.append((changed_ns, origin.name, number, segment))
    return [segment for *_, segment in sorted(found, key=lambda item: item[:3])]


def _entries(path: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []  # never made, or emptied by a flusher in between
    except OSError as exc:
        raise SpoolError(f"cannot read the spool {path}: {exc.strerror}") from exc


def _modified_ns(entry: "os.DirEntry[str]") -> int | None:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return None


def open_segment(segment: SpoolSegment) -> int | None:
    """Return a descriptor to read *segment*, or None if it is gone or no regular file."""
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd


def has_live_writer(segment: SpoolSegment, fd: int) -> bool:
    """Return whether *segment*'s writer may still append; if not, *fd* now holds its lock.

    True on a file system without locks: lines may be sent again, which is harmless, but none is
    deleted under a writer.
    """
    if segment.is_ready:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def remove_segment(segment: SpoolSegment) -> None:
    """Delete *segment* and, when it was the last of its origin, the origin's directory."""
    for path in (segment.path, segment.offset_path):
        path.unlink(missing_ok=True)
    try:
        segment.directory.rmdir()
    except OSError:
        return  # other segments are in it


def drop_oldest(spool: Path, *, bytes_max: int, segments_max: int) -> tuple[int, int]:
    """Delete complete segments, oldest first, until *spool* is within its bounds.

    Segments with a live writer stay. Returns the number of lines and of bytes dropped.
    """
    sized = [(segment, _size(segment)) for segment in find_segments(spool)]
    total, count = sum(size for _, size in sized), len(sized)
    lines = dropped = 0
    for segment, size in sized:
        if total <= bytes_max and count <= segments_max:
            break
        fd = open_segment(segment)
        if fd is None:
            continue
        with os.fdopen(fd, "rb") as file:
            if has_live_writer(segment, fd):
                continue
            lines += sum(1 for _ in file)
            remove_segment(segment)
        total, count, dropped = total - size, count - 1, dropped + size
    return lines, dropped


def modified_us(segment: SpoolSegment) -> int:
    """Return when *segment* was last written to, 0 if it is gone."""
    try:
        return segment.path.stat().st_mtime_ns // 1000
    except OSError:
        return 0


def _size(segment: SpoolSegment) -> int:
    try:
        return max(segment.path.stat().st_size, BLOCK_BYTES)
    except OSError:
        return 0


_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SpoolBacklog:
    """Lines that no store has yet. ``oldest_us``: the last write to the oldest segment of them."""

    segments: int = 0
    lines: int = 0
    bytes: int = 0
    oldest_us: int | None = None


def measure_spool(spool: Path) -> SpoolBacklog:
    """Return the backlog of *spool*.

    Raises:
        SpoolError: The directory cannot be read.
    """
    return measure_segments(find_segments(spool))


def measure_segments(segments: Sequence[SpoolSegment]) -> SpoolBacklog:
    """Return the backlog of *segments*."""
    lines = size = waiting = 0
    oldest_us: int | None = None
    for segment in segments:
        fd = open_segment(segment)
        if fd is None:
            continue
        try:
            offset = read_offset(segment)
            n_lines = count_lines(fd, offset)
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if n_lines:
            waiting += 1
            lines += n_lines
            size += max(found.st_size - offset, 0)
            changed_us = found.st_mtime_ns // 1000
            oldest_us = changed_us if oldest_us is None else min(oldest_us, changed_us)
    return SpoolBacklog(waiting, lines, size, oldest_us)


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


def read_offset(segment: SpoolSegment, tag: str | None = None) -> int:
    """Return the offset up to which the store called *tag* (None: any) has *segment*."""
    try:
        offset, found_tag = segment.offset_path.read_text(encoding="ascii").split()
        return int(offset) if tag in (None, found_tag) and int(offset) > 0 else 0
    except (OSError, ValueError):
        return 0  # nothing was sent, or it is unknown: sending again is harmless


def write_offset(segment: SpoolSegment, offset: int, tag: str) -> None:
    """Record that the store called *tag* has *segment* up to *offset*.

    Raises:
        OSError: It cannot be written; then it will be sent again.
    """
    partial = segment.offset_path.with_suffix(".sent.new")
    partial.write_text(f"{offset} {tag}\n", encoding="ascii")
    partial.rename(segment.offset_path)
