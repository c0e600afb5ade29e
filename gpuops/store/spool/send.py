"""Send a spool to the store: in batches, exactly once in effect, within a deadline.

Lines of many small segments share a batch. After its commit, segments that were read to the end and
have no live writer are deleted; of the others the offset is recorded. Lines of a failed batch are
sent again, and the store identifies each event by its number. One flusher works on a spool at a
time.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from gpuops.errors import SpoolError, StoreError
from gpuops.host.clock import Clock
from gpuops.store.backends import parse_url, redacted
from gpuops.store.engine import IncidentStore, open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.ingest.projections.registry import project_event
from gpuops.store.spool.folders import open_folder, open_to_append
from gpuops.store.spool.format import SpoolLine, SpoolLineError
from gpuops.store.spool.read import (
    REJECTED_BYTES_MAX,
    BadLine,
    RejectedLine,
    SpoolEntry,
    quarantine,
    read_lines,
    rejection_event_line,
)
from gpuops.store.spool.segments import (
    SpoolSegment,
    find_segments,
    has_live_writer,
    measure_segments,
    open_segment,
    read_offset,
    remove_segment,
    spool_error,
    store_tag,
    write_offset,
)

BATCH_LINES = 500
BATCH_BYTES = 4 * 2**20
BATCH_SEGMENTS = 200
_CONFLICT = "its number or its id is that of another event"


@dataclass(slots=True)
class FlushReport:
    """What a flush did so far. Everything but ``note`` counts lines.

    Attributes:
        sent: New in the store.
        already_there: Sent before, and known by the store.
        refused: Well-formed lines that the store does not accept; quarantined.
        corrupt: Damaged lines; quarantined.
        remaining: Left in the spool for the next flush.
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


class PendingLine(NamedTuple):
    """A line to send: its segment, the offset after it, its event and its bytes."""

    segment: SpoolSegment
    end: int
    envelope: EventEnvelope
    raw: bytes


@dataclass(slots=True)
class _Batch:
    """Lines read but not yet sent; the descriptors hold the locks of dead writers' segments."""

    pending: list[PendingLine] = field(default_factory=list)
    rejected: list[RejectedLine] = field(default_factory=list)
    marks: dict[SpoolSegment, int] = field(default_factory=dict)
    inodes: dict[SpoolSegment, int] = field(default_factory=dict)
    done: list[SpoolSegment] = field(default_factory=list)
    size: int = 0
    descriptors: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return (
            len(self.pending) >= BATCH_LINES
            or self.size >= BATCH_BYTES
            or len(self.descriptors) >= BATCH_SEGMENTS
        )


class SpoolSender:
    """Sends segments to one open store until all are sent or the deadline passes.

    Refused lines are kept in the directory *records*.
    """

    rejected_bytes_max = REJECTED_BYTES_MAX

    def __init__(
        self, records: Path, store: IncidentStore, *, cluster: str, clock: Clock, end_ns: int
    ) -> None:
        self.counts = FlushReport()
        self.records = records
        self._store = store
        self._tag = store_tag(redacted(store.url))
        self._cluster = cluster
        self._clock = clock
        self._end_ns = end_ns
        self._batch = _Batch()
        self._is_dry_run = False

    @property
    def remaining_s(self) -> float:
        """Return the seconds until the deadline, negative after it."""
        return (self._end_ns - self._clock.mono_ns()) / 1e9

    def send(self, segments: Sequence[SpoolSegment]) -> bool:
        """Send *segments*; return False if the deadline passed first.

        Raises:
            StoreError: The store was lost; lines that it has not committed stay.
            SpoolError: Refused lines cannot be quarantined; their segments stay.
        """
        try:
            return all(self._read_segment(segment) for segment in segments) and self._commit_batch()
        finally:
            self._close_descriptors()

    def resend(self, lines: Sequence[SpoolLine], uid: int, *, dry_run: bool) -> dict[int, str]:
        """Send kept *lines* of *uid* again; return the index of each that is refused, and why.

        With *dry_run* the store rolls them back.

        Raises:
            StoreError: The store was lost; some of *lines* may be in it.
        """
        self._batch, self._is_dry_run = _Batch(), dry_run
        # No segment any more: the index of a line takes the place of its offset.
        nowhere = SpoolSegment(self.records, "", 0, is_ready=True, uid=uid, records=self.records)
        self._deliver(
            [
                PendingLine(nowhere, index, EventEnvelope(line, self._cluster, uid), b"")
                for index, line in enumerate(lines)
            ]
        )
        return {item.end: item.bad_line.reason for item in self._batch.rejected}

    def _close_descriptors(self, keep_fd: int | None = None) -> None:
        for fd in self._batch.descriptors:
            if fd != keep_fd:
                os.close(fd)
        self._batch.descriptors = [] if keep_fd is None else [keep_fd]

    def _read_segment(self, segment: SpoolSegment) -> bool:
        fd = open_segment(segment)
        if fd is None:
            return True
        self._batch.descriptors.append(fd)
        has_writer = has_live_writer(segment, fd)
        file = os.fstat(fd)
        offset = read_offset(segment, file.st_ino, self._tag)
        for entry in self._entries(segment, fd, offset, is_closed=not has_writer):
            self._batch.size += entry.end - offset
            offset = entry.end
            self._batch.inodes[segment] = file.st_ino
            self._add_entry(segment, entry, file.st_uid)
            if self._batch.is_full and not self._commit_batch(keep_fd=fd):
                return False
        if not has_writer:
            self._batch.done.append(segment)
        return not self._batch.is_full or self._commit_batch()

    def _entries(
        self, segment: SpoolSegment, fd: int, offset: int, *, is_closed: bool
    ) -> Iterator[SpoolEntry]:
        return read_lines(fd, origin=segment.origin, offset=offset, is_closed=is_closed)

    def _add_entry(self, segment: SpoolSegment, entry: SpoolEntry, uid: int) -> None:
        batch = self._batch
        batch.marks[segment] = entry.end
        if entry.line is not None:
            envelope = EventEnvelope(entry.line, self._cluster, uid)
            batch.pending.append(PendingLine(segment, entry.end, envelope, entry.raw))
        elif entry.bad_line is not None:
            self.counts.corrupt += 1
            batch.rejected.append(RejectedLine(segment, entry.end, entry.bad_line))
        elif entry.is_torn:
            self.counts.torn += 1

    def _commit_batch(self, keep_fd: int | None = None) -> bool:
        """Send the batch, then release its segments; *keep_fd* is still read from."""
        if self.remaining_s <= 0:
            return False
        batch = self._batch
        self._deliver(batch.pending)
        self._quarantine_rejected(batch)
        self._release_segments(batch)
        self._close_descriptors(keep_fd)
        self._batch = _Batch(descriptors=batch.descriptors)
        return True

    def _deliver(self, pending: Sequence[PendingLine], *, retry: bool = True) -> None:
        """Ingest *pending*; refuse lines that cannot be ingested, however few among many.

        With *retry* a failed batch is tried once more first: two writers that report the same new
        entity at once can collide in an index that ``ON CONFLICT`` does not name.
        """
        if not pending:
            return
        try:
            self._ingest(pending)
        except SpoolLineError:
            self._deliver([item for item in pending if self._is_valid(item)])
        except DBAPIError as exc:
            if retry:
                self._deliver(pending, retry=False)
                return
            if len(pending) == 1:
                self._reject(pending[0], " ".join(str(exc.orig).split())[:300])
                return
            middle = len(pending) // 2
            self._deliver(pending[:middle])
            self._deliver(pending[middle:])

    def _ingest(self, pending: Sequence[PendingLine]) -> None:
        with self._store.begin(deadline_s=max(self.remaining_s, 0.1)) as connection:
            refused = self._refused(connection, [item.envelope for item in pending])
            envelopes = [i.envelope for i in pending if id(i.envelope) not in refused]
            counts = ingest(connection, envelopes, self._clock.now_us())
            if self._is_dry_run:
                connection.rollback()
        self.counts.sent += counts.new
        self.counts.already_there += counts.already_there
        refused |= dict.fromkeys(map(id, counts.conflicting), _CONFLICT)
        for item in pending:
            if id(item.envelope) in refused:
                self._reject(item, refused[id(item.envelope)])

    def _refused(
        self,
        connection: Connection,  # noqa: ARG002 for the spools of users
        envelopes: Sequence[EventEnvelope],  # noqa: ARG002
    ) -> dict[int, str]:
        """Return why the store must not take some of *envelopes*, by their `id`."""
        return {}

    def _is_valid(self, pending_line: PendingLine) -> bool:
        try:
            project_event(pending_line.envelope)
        except SpoolLineError as exc:
            self._reject(pending_line, str(exc))
            return False
        return True

    def _reject(self, pending_line: PendingLine, reason: str) -> None:
        self.counts.refused += 1
        bad_line = BadLine(reason, pending_line.raw)
        self._batch.rejected.append(RejectedLine(pending_line.segment, pending_line.end, bad_line))

    def _quarantine_rejected(self, batch: _Batch) -> None:
        if not batch.rejected:
            return
        batch.rejected.sort(key=lambda item: item.end)  # as they were written
        try:
            quarantine(self.records, batch.rejected, bytes_max=self.rejected_bytes_max)
        except OSError as exc:
            raise spool_error(self.records, exc.strerror or str(exc)) from exc
        with self._store.begin(deadline_s=max(self.remaining_s, 0.1)) as connection:
            reports = [
                EventEnvelope(line, self._cluster, os.geteuid())
                for line in self._reports(batch.rejected)
            ]
            ingest(connection, reports, self._clock.now_us())

    def _reports(self, rejected: Sequence[RejectedLine]) -> list[SpoolLine]:
        """Return the events that report *rejected*."""
        first = {item.segment: item for item in reversed(rejected)}
        return [self._report(item) for item in first.values()]

    def _report(self, item: RejectedLine) -> SpoolLine:
        origin = item.segment.origin
        nodes = (i.envelope.event.node for i in self._batch.pending if i.segment.origin == origin)
        return rejection_event_line(item, node=next(nodes, origin.rpartition(".")[0]))

    def _release_segments(self, batch: _Batch) -> None:
        for segment in batch.done:
            remove_segment(segment)
        for segment, offset in batch.marks.items():
            if segment not in batch.done:
                # Without the offset, lines are sent again, which is harmless.
                with contextlib.suppress(OSError):
                    write_offset(segment, batch.inodes[segment], offset, self._tag)


FLUSH_DEADLINE_S = 10.0
_LOCK = ".flush.lock"
_LOCK_POLL_S = 0.02


def flush(
    spool_dir: Path,
    store_url: str,
    *,
    deadline_s: float = FLUSH_DEADLINE_S,
    cluster: str = "default",
    clock: Clock,
    root: Path = Path("/"),
) -> FlushReport:
    """Send the events in *spool_dir* to the store; if it cannot be used, ``note`` says why.

    Raises:
        UsageError: The store's URL is malformed or its driver is not installed.
        SpoolError: The spool directory cannot be read.
    """
    parse_url(store_url)
    segments = find_segments(spool_dir)
    if not segments:
        return FlushReport()
    end_ns = clock.mono_ns() + round(deadline_s * 1e9)
    with flush_lock(spool_dir, deadline_s) as has_lock:
        segments = _with_backlog(find_segments(spool_dir))
        report = FlushReport()
        if segments and not has_lock:
            report.note = f"another flusher is working on {spool_dir}"
        elif segments:
            left_s = max((end_ns - clock.mono_ns()) / 1e9, 0.1)
            try:
                with open_store(store_url, mode="write", root=root, deadline_s=left_s) as store:
                    sender = SpoolSender(
                        spool_dir, store, cluster=cluster, clock=clock, end_ns=end_ns
                    )
                    report = sender.counts
                    if not sender.send(segments):
                        report.note = f"the deadline of {deadline_s:g} s passed"
            except (StoreError, SpoolError) as exc:
                report.note = str(exc)
        if report.note:
            report.remaining = measure_segments(find_segments(spool_dir)).lines
        return report


def _with_backlog(segments: Sequence[SpoolSegment]) -> list[SpoolSegment]:
    """Return the *segments* with lines to send; remove empty ones of dead writers."""
    unsent = []
    for segment in segments:
        if measure_segments([segment]).bytes:
            unsent.append(segment)
        elif (fd := open_segment(segment)) is not None:
            try:
                if not has_live_writer(segment, fd):
                    remove_segment(segment)
            finally:
                os.close(fd)
    return unsent


@contextlib.contextmanager
def flush_lock(directory: Path, wait_s: float) -> Iterator[bool]:
    """Acquire the lock of *directory*, ours, within *wait_s*; yields whether it is held."""
    try:
        with open_folder(directory, uid=os.geteuid()) as folder:
            fd = open_to_append(folder, _LOCK)
    except OSError as exc:
        raise spool_error(directory, exc.strerror or str(exc)) from exc
    try:
        waiter = threading.Event()
        for _ in range(max(int(wait_s / _LOCK_POLL_S), 1)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiter.wait(_LOCK_POLL_S)
            else:
                yield True
                return
        yield False
    finally:
        os.close(fd)
