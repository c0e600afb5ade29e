"""One pass of a flusher over the segments of a spool.

Lines of many small segments share a batch. After the batch's commit, segments that are read to
their end and have no living writer are deleted; of the others the offset is marked.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from gpuops.host.clock import Clock
from gpuops.store.backlog import read_mark, store_tag, write_mark
from gpuops.store.engine import Store
from gpuops.store.facts.envelope import Envelope
from gpuops.store.facts.kinds import facts_of
from gpuops.store.ingest import ingest
from gpuops.store.lines import Line, LineError, encode_line
from gpuops.store.rejected import Rejected, keep_aside, report_of
from gpuops.store.segments import Segment, open_segment, remove, spool_error, writer_lives
from gpuops.store.spool_reader import KEEP_BYTES, Bad, Read, read_lines
from gpuops.store.url import shown

BATCH_LINES = 500
BATCH_BYTES = 4 * 2**20
BATCH_SEGMENTS = 200


@dataclass(slots=True)
class Tally:
    """Lines counted so far."""

    sent: int = 0
    already_there: int = 0
    refused: int = 0
    corrupt: int = 0
    torn: int = 0


_Place = tuple[Segment, int, Envelope]


@dataclass(slots=True)
class _Batch:
    """What is read but not yet sent; its descriptors hold the locks of dead writers' segments."""

    places: list[_Place] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    marks: dict[Segment, int] = field(default_factory=dict)
    done: list[Segment] = field(default_factory=list)
    size: int = 0
    descriptors: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return (
            len(self.places) >= BATCH_LINES
            or self.size >= BATCH_BYTES
            or len(self.done) >= BATCH_SEGMENTS
        )


class Sender:
    """Sends segments to one open store until all are sent or the time is over."""

    def __init__(
        self, spool: Path, store: Store, *, cluster: str, clock: Clock, end_ns: int
    ) -> None:
        self.tally = Tally()
        self._spool = spool
        self._store = store
        self._tag = store_tag(shown(store.url))
        self._cluster = cluster
        self._clock = clock
        self._end_ns = end_ns
        self._batch = _Batch()

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline, negative after it."""
        return (self._end_ns - self._clock.mono_ns()) / 1e9

    def send(self, segments: Sequence[Segment]) -> bool:
        """Send *segments*; return False when the deadline came first.

        Raises:
            StoreError: The store went away; what it has not committed stays.
            SpoolError: Refused lines cannot be kept aside; their segments stay.
        """
        try:
            return all(self._read(segment) for segment in segments) and self._commit()
        finally:
            self._close()

    def _close(self, keep: int | None = None) -> None:
        for fd in self._batch.descriptors:
            if fd != keep:
                os.close(fd)
        self._batch.descriptors = [] if keep is None else [keep]

    def _read(self, segment: Segment) -> bool:
        fd = open_segment(segment)
        if fd is None:
            return True
        self._batch.descriptors.append(fd)
        lives = writer_lives(segment, fd)
        uid = os.fstat(fd).st_uid
        offset = read_mark(segment, self._tag)
        for read in read_lines(fd, origin=segment.origin, offset=offset, whole=not lives):
            self._batch.size += read.end - offset
            offset = read.end
            self._take(segment, read, uid)
            if self._batch.is_full and not self._commit(keep=fd):
                return False
        if not lives:
            self._batch.done.append(segment)
        return True

    def _take(self, segment: Segment, read: Read, uid: int) -> None:
        batch = self._batch
        batch.marks[segment] = read.end
        if read.line is not None:
            batch.places.append((segment, read.end, Envelope(read.line, self._cluster, uid)))
        elif read.bad is not None:
            self.tally.corrupt += 1
            batch.rejected.append(Rejected(segment, read.end, read.bad))
        elif read.torn:
            self.tally.torn += 1

    def _commit(self, keep: int | None = None) -> bool:
        """Send the batch, then let go of what is sent; *keep* is the descriptor still read from."""
        if self.left_s <= 0:
            return False
        batch = self._batch
        self._deliver(batch.places)
        self._set_aside(batch)
        self._let_go(batch)
        self._close(keep)
        self._batch = _Batch(descriptors=batch.descriptors)
        return True

    def _deliver(self, places: Sequence[_Place], *, again: bool = True) -> None:
        """Ingest *places*; refuse those that cannot be, however few they are among many.

        What is refused is tried *again* first: two writers that are the first to tell of one
        thing at once can collide in an index that ``ON CONFLICT`` does not name.
        """
        if not places:
            return
        try:
            self._ingest(places)
        except LineError:
            self._deliver([place for place in places if self._is_fit(place)])
        except DBAPIError as exc:
            if again:
                self._deliver(places, again=False)
                return
            if len(places) == 1:
                self._refuse(places[0], " ".join(str(exc.orig).split())[:300])
                return
            middle = len(places) // 2
            self._deliver(places[:middle])
            self._deliver(places[middle:])

    def _ingest(self, places: Sequence[_Place]) -> None:
        with self._store.begin(deadline_s=max(self.left_s, 0.1)) as connection:
            envelopes = [envelope for _, _, envelope in places]
            counts = ingest(connection, envelopes, self._clock.now_us())
        self.tally.sent += counts.new
        self.tally.already_there += counts.already_there
        clashing = set(map(id, counts.clashing))
        for place in places:
            if id(place[2]) in clashing:
                self._refuse(place, "its number or its id is that of another event")

    def _is_fit(self, place: _Place) -> bool:
        try:
            facts_of(place[2])
        except LineError as exc:
            self._refuse(place, str(exc))
            return False
        return True

    def _refuse(self, place: _Place, reason: str) -> None:
        segment, end, envelope = place
        self.tally.refused += 1
        raw = encode_line(envelope.line)[:KEEP_BYTES]
        self._batch.rejected.append(Rejected(segment, end, Bad(reason, raw)))

    def _set_aside(self, batch: _Batch) -> None:
        if not batch.rejected:
            return
        try:
            keep_aside(self._spool, batch.rejected)
        except OSError as exc:
            raise spool_error(self._spool, exc.strerror or str(exc)) from exc
        first = {item.segment: item for item in reversed(batch.rejected)}
        with self._store.begin(deadline_s=max(self.left_s, 0.1)) as connection:
            reports = [
                Envelope(self._report(item), self._cluster, os.geteuid()) for item in first.values()
            ]
            ingest(connection, reports, self._clock.now_us())

    def _report(self, item: Rejected) -> Line:
        origin = item.segment.origin
        nodes = (e.event.node for s, _, e in self._batch.places if s.origin == origin)
        return report_of(item, node=next(nodes, origin.rpartition(".")[0]))

    def _let_go(self, batch: _Batch) -> None:
        for segment in batch.done:
            remove(segment)
        for segment, offset in batch.marks.items():
            if segment not in batch.done:
                # Not remembered is only sent again.
                with contextlib.suppress(OSError):
                    write_mark(segment, offset, self._tag)
