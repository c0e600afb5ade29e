"""Sending a spool to the store: in batches, exactly once in effect, within a deadline.

What the store has taken is marked or deleted only after its commit; whatever goes wrong before
that is sent again, and the store knows each event by its number. One flusher works on a spool at
a time.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import SpoolError, StoreError
from gpuops.host.clock import Clock
from gpuops.store.backlog import measure_segments
from gpuops.store.engine import open_store
from gpuops.store.segments import (
    Segment,
    find_segments,
    open_segment,
    remove,
    spool_error,
    writer_lives,
)
from gpuops.store.sender import Sender, Tally
from gpuops.store.url import parse_url

DEADLINE_S = 10.0
_LOCK = ".flush.lock"
_LOCK_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush did. Everything but ``note`` counts lines.

    Attributes:
        sent: New in the store.
        already_there: Sent before, and known by the store.
        refused: Well-formed lines that the store cannot take; kept aside.
        corrupt: Damaged lines; kept aside.
        remaining: Left in the spool for the next time.
        note: Why something remains, or None.
        torn: Last lines cut short by a crash; skipped.
    """

    sent: int = 0
    already_there: int = 0
    refused: int = 0
    corrupt: int = 0
    remaining: int = 0
    note: str | None = None
    torn: int = 0


def flush(
    spool_dir: Path,
    store_url: str,
    *,
    deadline_s: float = DEADLINE_S,
    cluster: str = "default",
    clock: Clock,
    root: Path = Path("/"),
) -> FlushReport:
    """Send what waits in *spool_dir* to the store; a store that cannot be used is a note.

    Raises:
        UsageError: The store's URL is malformed or its driver is not installed.
        SpoolError: The spool directory cannot be read.
    """
    parse_url(store_url)
    segments = find_segments(spool_dir)
    if not segments:
        return FlushReport()
    end_ns = clock.mono_ns() + round(deadline_s * 1e9)
    with _only_flusher(spool_dir, deadline_s) as alone:
        segments = _waiting(find_segments(spool_dir))
        tally, note = Tally(), None
        if segments and not alone:
            note = f"another flusher is at work on {spool_dir}"
        elif segments:
            left_s = max((end_ns - clock.mono_ns()) / 1e9, 0.1)
            try:
                with open_store(store_url, mode="write", root=root, deadline_s=left_s) as store:
                    sender = Sender(spool_dir, store, cluster=cluster, clock=clock, end_ns=end_ns)
                    tally = sender.tally
                    if not sender.send(segments):
                        note = f"the deadline of {deadline_s:g} s came first"
            except (StoreError, SpoolError) as exc:
                note = str(exc)
        return _report(tally, note, spool_dir)


def _report(tally: Tally, note: str | None, spool_dir: Path) -> FlushReport:
    remaining = measure_segments(find_segments(spool_dir)).lines if note else 0
    return FlushReport(
        sent=tally.sent,
        already_there=tally.already_there,
        refused=tally.refused,
        corrupt=tally.corrupt,
        remaining=remaining,
        note=note,
        torn=tally.torn,
    )


def _waiting(segments: Sequence[Segment]) -> list[Segment]:
    """Return the *segments* with something to send; remove those that dead writers left empty."""
    waiting = []
    for segment in segments:
        if measure_segments([segment]).bytes:
            waiting.append(segment)
        elif (fd := open_segment(segment)) is not None:
            try:
                if not writer_lives(segment, fd):
                    remove(segment)
            finally:
                os.close(fd)
    return waiting


@contextlib.contextmanager
def _only_flusher(spool_dir: Path, wait_s: float) -> Iterator[bool]:
    """Hold the spool's lock, waiting for it at most *wait_s*; yields whether it is held."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(spool_dir / _LOCK, flags, 0o600)
    except OSError as exc:
        raise spool_error(spool_dir, exc.strerror or str(exc)) from exc
    try:
        pause = threading.Event()
        for _ in range(max(int(wait_s / _LOCK_POLL_S), 1)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pause.wait(_LOCK_POLL_S)
            else:
                yield True
                return
        yield False
    finally:
        os.close(fd)
