"""The files of a spool directory: who owns it, which segments wait, how large they are.

Layout: ``<spool>/<origin>/<number>.open`` while its writer appends (it holds a flock on it),
``.ready`` once complete, ``<number>.sent`` beside it for how much of it a store already has;
``<spool>/rejected/`` for lines that no store can take.
"""

import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import SpoolError
from gpuops.host.directories import why_not_ours
from gpuops.store.lines import ORIGIN

# A file takes at least one block, so that many tiny segments count too.
BLOCK_BYTES = 4096
REJECTED = "rejected"
_SEGMENT = re.compile(r"(\d{8})\.(open|ready)")


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of one origin."""

    directory: Path
    origin: str
    number: int
    ready: bool

    @property
    def path(self) -> Path:
        return self.directory / f"{self.number:08d}.{'ready' if self.ready else 'open'}"

    @property
    def mark(self) -> Path:
        """Return the file that says how much of it is sent."""
        return self.directory / f"{self.number:08d}.sent"


def own_directory(path: Path, *, private: bool) -> None:
    """Make *path* if need be and make sure that it is ours; *private*: for nobody else's eyes.

    Raises:
        SpoolError: Not a directory, another user's, open to others, or not writable.
    """
    problem = why_not_ours(path, private=private)
    if problem is not None:
        raise spool_error(path, problem)


def spool_error(path: Path, reason: str) -> SpoolError:
    """Return the one clear line about a spool that cannot be written."""
    return SpoolError(
        f"cannot write the spool {path}: {reason}; "
        "point spool.dir (GPUOPS_SPOOL) at a directory of your own with free space"
    )


def find_segments(spool: Path) -> list[Segment]:
    """Return every segment below *spool*, oldest first; none where there is no spool.

    Anything that is not named as a writer names it is left alone.

    Raises:
        SpoolError: The directory cannot be read.
    """
    found: list[tuple[int, str, int, Segment]] = []
    for origin in _entries(spool):
        if not ORIGIN.fullmatch(origin.name) or not origin.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(Path(origin.path)):
            match = _SEGMENT.fullmatch(entry.name)
            changed_ns = _changed_ns(entry) if match else None
            if match is None or changed_ns is None:
                continue
            number = int(match[1])
            segment = Segment(Path(origin.path), origin.name, number, match[2] == "ready")
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


def _changed_ns(entry: "os.DirEntry[str]") -> int | None:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return None


def open_segment(segment: Segment) -> int | None:
    """Return a descriptor to read *segment*, or None where it has gone or is no plain file."""
    try:
        fd = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return fd


def writer_lives(segment: Segment, fd: int) -> bool:
    """Say whether *segment*'s writer may still append; if not, *fd* keeps others from judging.

    A file system without locks answers "lives": lines may be sent again, which is harmless, but
    none is deleted under a writer.
    """
    if segment.ready:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def remove(segment: Segment) -> None:
    """Delete *segment* and, when it was the last of its origin, the origin's directory."""
    for path in (segment.path, segment.mark):
        path.unlink(missing_ok=True)
    try:
        segment.directory.rmdir()
    except OSError:
        return  # other segments are in it


def drop_oldest(spool: Path, *, bytes_max: int, segments_max: int) -> tuple[int, int]:
    """Delete whole segments, oldest first, until *spool* is within its bounds.

    Segments whose writer lives stay. Returns the number of lines and of bytes dropped.
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
            if writer_lives(segment, fd):
                continue
            lines += sum(1 for _ in file)
            remove(segment)
        total, count, dropped = total - size, count - 1, dropped + size
    return lines, dropped


def changed_us(segment: Segment) -> int:
    """Return when *segment* was last written to, 0 where it has gone."""
    try:
        return segment.path.stat().st_mtime_ns // 1000
    except OSError:
        return 0


def _size(segment: Segment) -> int:
    try:
        return max(segment.path.stat().st_size, BLOCK_BYTES)
    except OSError:
        return 0
