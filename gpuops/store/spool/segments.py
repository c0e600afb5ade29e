"""The files of a spool directory, their backlog, and the offset up to which each was sent.

Layout: ``<spool>/<origin>/<number>.open`` while its writer appends (it holds a flock on it),
``.ready`` once complete, ``<number>.sent`` next to it with the offset that a store already has;
``<spool>/rejected/`` for lines that no store accepts. Offsets and refused lines of another user's
spool are in a directory of ours, called records here (`gpuops.store.spool.users`).
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gpuops.errors import SpoolError
from gpuops.host.trust import why_not_ours
from gpuops.store.spool.folders import ensure_folder, open_file, open_folder, replace_file
from gpuops.store.spool.format import ORIGIN_PATTERN

_OFFSET_BYTES_MAX = 256
REJECTED_DIR = "rejected"
_SEGMENT = re.compile(r"(\d{8})\.(open|ready)")


@dataclass(frozen=True, slots=True)
class SpoolSegment:
    """One file of one origin in the spool of *uid*; *records*: where its offset is written."""

    spool: Path
    origin: str
    number: int
    is_ready: bool
    uid: int
    records: Path

    @property
    def name(self) -> str:
        return f"{self.number:08d}.{'ready' if self.is_ready else 'open'}"

    @property
    def offset_name(self) -> str:
        """Return the name of the file with the offset up to which it was sent."""
        return f"{self.number:08d}.sent"

    @property
    def directory(self) -> Path:
        return self.spool / self.origin

    @property
    def path(self) -> Path:
        return self.directory / self.name

    @property
    def offset_path(self) -> Path:
        return self.records / self.origin / self.offset_name


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
        SpoolError: The directory cannot be read, or is another user's.
    """
    uid = os.geteuid()
    found: list[tuple[int, SpoolSegment]] = []
    try:
        with open_folder(spool, uid=uid) as top:
            for segment in list_segments(top, spool, uid=uid, records=spool):
                # A segment that a flusher removes in between has no time, and is left out.
                with contextlib.suppress(OSError):
                    found.append((segment.path.lstat().st_mtime_ns, segment))
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise _unreadable(spool, exc) from exc
    found.sort(key=lambda item: (item[0], item[1].origin, item[1].number))
    return [segment for _, segment in found]


def _unreadable(spool: Path, error: OSError) -> SpoolError:
    advice = "; root forwards the spools in spool.users_dir" if error.errno == errno.EPERM else ""
    return SpoolError(f"cannot read the spool {spool}: {error.strerror}{advice}")


def list_segments(
    top: int, spool: Path, *, uid: int, records: Path, entries_max: int | None = None
) -> Iterator[SpoolSegment]:
    """Yield the segments below the open spool *top*, unordered; at most *entries_max* a directory.

    No entry is opened or asked for its status but directories of origins, which must be *uid*'s.

    Raises:
        OSError: *top* cannot be read.
    """
    for origin in _names(top, entries_max):
        if not ORIGIN_PATTERN.fullmatch(origin):
            continue
        try:
            with open_folder(spool, origin, uid=uid) as folder:
                names = _names(folder, entries_max)
        except OSError:
            continue  # emptied by a flusher in between, or not to be trusted
        for match in filter(None, map(_SEGMENT.fullmatch, names)):
            yield SpoolSegment(spool, origin, int(match[1]), match[2] == "ready", uid, records)


def _names(folder: int, entries_max: int | None) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, entries_max)]


def open_segment(segment: SpoolSegment) -> int | None:
    """Return a descriptor to read *segment*, or None if it is gone, no file, or another user's."""
    try:
        with open_folder(segment.spool, segment.origin, uid=segment.uid) as folder:
            return open_file(folder, segment.name, uid=segment.uid)
    except OSError:
        return None


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
    _remove_files(segment.spool, segment, segment.uid, (segment.name, segment.offset_name))
    if segment.records != segment.spool:
        _remove_files(segment.records, segment, os.geteuid(), (segment.offset_name,))


def _remove_files(top: Path, segment: SpoolSegment, uid: int, names: Sequence[str]) -> None:
    # Gone, or not to be trusted; a directory stays if other segments are in it.
    with contextlib.suppress(OSError), open_folder(top, uid=uid) as spool:
        with open_folder(top, segment.origin, uid=uid) as folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        os.rmdir(segment.origin, dir_fd=spool)


def remove_marks(records: Path, segments: Sequence[SpoolSegment]) -> None:
    """Delete the offsets in *records* of other segments than these.

    Raises:
        OSError: They cannot be deleted.
    """
    uid, known = os.geteuid(), {(item.origin, item.offset_name) for item in segments}
    with open_folder(records, uid=uid) as top:
        for origin in filter(ORIGIN_PATTERN.fullmatch, _names(top, None)):
            with open_folder(records, origin, uid=uid) as folder:
                names = _names(folder, None)
                gone = [name for name in names if (origin, name) not in known]
                for name in gone:
                    os.unlink(name, dir_fd=folder)
            if len(gone) == len(names):
                os.rmdir(origin, dir_fd=top)


def modified_us(segment: SpoolSegment) -> int:
    """Return when *segment* was last written to, 0 if it is gone."""
    try:
        return segment.path.stat().st_mtime_ns // 1000
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
            found = os.fstat(fd)
            offset = read_offset(segment, found.st_ino)
            n_lines = count_lines(fd, offset)
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


def read_offset(segment: SpoolSegment, inode: int, tag: str | None = None) -> int:
    """Return the offset up to which the store called *tag* (None: any) has *segment*.

    0 if it was written for a file other than *inode*: a full spool has dropped lines since.
    """
    uid = os.geteuid()
    try:
        with open_folder(segment.records, segment.origin, uid=uid) as folder:
            fd = open_file(folder, segment.offset_name, uid=uid)
        with os.fdopen(fd, "rb") as file:
            offset, found_tag, of = file.read(_OFFSET_BYTES_MAX).decode("ascii").split()
        is_it = tag in (None, found_tag) and int(of) == inode
        return int(offset) if is_it and int(offset) > 0 else 0
    except (OSError, ValueError):
        return 0  # nothing was sent, or it is unknown: sending again is harmless


def write_offset(segment: SpoolSegment, inode: int, offset: int, tag: str) -> None:
    """Record that the store called *tag* has *segment*, the file *inode*, up to *offset*.

    Raises:
        OSError: It cannot be written; then it will be sent again.
    """
    uid = os.geteuid()
    with open_folder(segment.records, uid=uid) as records:
        if segment.records != segment.spool:
            ensure_folder(records, segment.origin)
        with open_folder(segment.records, segment.origin, uid=uid) as folder:
            replace_file(folder, segment.offset_name, f"{offset} {tag} {inode}\n".encode("ascii"))
