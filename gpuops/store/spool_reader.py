"""The reading end of a spool: every line treated as hostile, none able to stop the others.

A torn last line is what a crash leaves: skipped and counted. A bad line in the middle is damage
or malice: reported with what it was, for `rejected` to keep aside.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gpuops.store.lines import LINE_BYTES_MAX, Line, LineError, decode

KEEP_BYTES = 8192
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that cannot be delivered: why, and its first bytes."""

    reason: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """One line read: *end* is the offset after it; exactly one of the others is set."""

    end: int
    line: Line | None = None
    bad: Bad | None = None
    torn: bool = False


def read_lines(fd: int, *, origin: str, offset: int = 0, whole: bool = True) -> Iterator[Read]:
    """Yield the lines of an open segment from *offset* on.

    Args:
        fd: Stays open.
        origin: The only writer whose lines may stand in it.
        offset: Where a line starts.
        whole: Nobody writes to it any more, so that a last line without an end is torn; else it
            is not complete yet and left for the next time.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(offset)
        position = offset
        while raw := file.readline(LINE_BYTES_MAX + 1):
            position += len(raw)
            ended = raw.endswith(b"\n")
            if not ended and len(raw) > LINE_BYTES_MAX:
                skipped, ended = _skip_line(file)
                position += skipped
                if not ended and not whole:
                    return
                reason = f"longer than {LINE_BYTES_MAX} bytes"
                yield Read(position, bad=Bad(reason, raw[:KEEP_BYTES]))
            elif not ended and not whole:
                return
            else:
                yield _judge(raw, position, origin, ended=ended)


def _skip_line(file: BinaryIO) -> tuple[int, bool]:
    skipped = 0
    while chunk := file.readline(_CHUNK_BYTES):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            return skipped, True
    return skipped, False


def _judge(raw: bytes, end: int, origin: str, *, ended: bool) -> Read:
    try:
        line = decode(raw)
    except LineError as exc:
        if not ended:
            return Read(end, torn=True)
        return Read(end, bad=Bad(str(exc), raw[:KEEP_BYTES]))
    if line.origin != origin:
        return Read(end, bad=Bad(f"it says it is of origin {line.origin}", raw[:KEEP_BYTES]))
    return Read(end, line=line)
