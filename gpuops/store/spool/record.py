"""Record events from code that must not fail, and keep a copy with the run.

A run directory alone is enough for a report, even without spool and store.

A recorder never raises and never waits for a database. If the spool cannot be written it logs that
once, counts lost events, and records the count as soon as it can write again. A shared file system
may block a writer for minutes: `QueuedRecorder` writes from its own thread, from a bounded queue.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gpuops.errors import SpoolError
from gpuops.host.clock import Clock
from gpuops.model import Event, Severity
from gpuops.store.events import lost_events_event
from gpuops.store.spool.format import LineEncoder
from gpuops.store.spool.users import USER_BYTES_MAX, own_user_spool
from gpuops.store.spool.write import SpoolWriter

JOURNAL_SUFFIX = ".jsonl"


class JournalFile:
    """Appends lines to ``<directory>/<origin>.jsonl``. Every method raises OSError."""

    def __init__(self, directory: Path, origin: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(directory / f"{origin}{JOURNAL_SUFFIX}", flags, 0o600)
        self._size = os.fstat(self._fd).st_size

    def append_lines(self, lines: Sequence[bytes], *, sync: bool) -> None:
        data = b"".join(lines)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            if sync:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)


_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records events; neither method raises."""

    def record(self, *events: Event) -> None: ...

    def close(self) -> None: ...


class NullRecorder:
    """Discards all events."""

    def record(self, *events: Event) -> None:
        pass

    def close(self) -> None:
        pass


class _LineSink(Protocol):
    def append_lines(self, lines: Sequence[bytes], *, sync: bool) -> None: ...

    def close(self) -> None: ...


class SpoolRecorder:
    """Writes events to the spool and, if there is a run directory, to its journal.

    *open_spool* makes the writer for a line encoder; while it fails it is called again for each
    batch, so that a spool that becomes writable is used. ``lost`` counts events that were not
    written to a spool. *open_copy* makes the writer of a second copy, which root forwards, or None
    while there is nowhere to write one.
    """

    def __init__(  # noqa: PLR0913 all but one are keywords
        self,
        open_spool: Callable[[LineEncoder], SpoolWriter],
        *,
        node: str,
        boot_id: str,
        clock: Clock,
        randomness: Callable[[int], bytes] = os.urandom,
        journal: Path | None = None,
        open_copy: Callable[[LineEncoder], SpoolWriter | None] = lambda _source: None,
    ) -> None:
        self._open_spool = open_spool
        self._open_copy = open_copy
        self._copy: _LineSink | None = None
        self._source = LineEncoder(node=node, boot_id=boot_id, randomness=randomness)
        self._node = node
        self._clock = clock
        self._randomness = randomness
        self._journal_dir = journal
        self._journal: _LineSink | None = None
        self._spool: _LineSink | None = None
        self._warned: set[str] = set()
        self._unreported = 0
        self._lock = threading.Lock()
        self.lost = 0

    @property
    def origin(self) -> str:
        """Return the name under which this recorder numbers its events."""
        return self._source.origin

    def record(self, *events: Event) -> None:
        try:
            with self._lock:
                self._record(events)
        except Exception as exc:  # noqa: BLE001 boundary: recording must never stop what it records
            self._warn("recorder", f"cannot record events: {exc!r}")

    def _record(self, events: Sequence[Event]) -> None:
        sync = any(event.severity >= Severity.ERROR for event in events)
        lines = [self._source.encode(event) for event in events]
        # The spool first: it is local, while a journal's file system may block.
        self._to_spool(lines, sync=sync)
        self._to_copy(lines, sync=sync)
        if self._journal_dir is not None:
            self._to_journal(lines, sync=sync)

    def _to_spool(self, lines: Sequence[bytes], *, sync: bool) -> None:
        try:
            if self._spool is None:
                self._spool = self._open_spool(self._source)
            report = [self._source.encode(self._lost_event())] if self._unreported else []
            self._spool.append_lines([*report, *lines], sync=sync)
            self._unreported = 0
        except SpoolError as exc:
            self.lost += len(lines)
            self._unreported += len(lines)
            self._warn("spool", str(exc))

    def _to_copy(self, lines: Sequence[bytes], *, sync: bool) -> None:
        try:
            if self._copy is None:
                self._copy = self._open_copy(self._source)
            if self._copy is not None:
                self._copy.append_lines(lines, sync=sync)
        except SpoolError as exc:
            self._warn("copy", f"these events do not reach the fleet's store: {exc}")

    def _to_journal(self, lines: Sequence[bytes], *, sync: bool) -> None:
        assert self._journal_dir is not None
        try:
            if self._journal is None:
                self._journal = JournalFile(self._journal_dir, self._source.origin)
            self._journal.append_lines(lines, sync=sync)
        except OSError as exc:
            self._warn("journal", f"cannot write the journal {self._journal_dir}: {exc.strerror}")

    def close(self) -> None:
        with self._lock:
            for sink in (self._spool, self._copy, self._journal):
                try:
                    if sink is not None:
                        sink.close()
                except (SpoolError, OSError) as exc:
                    self._warn("close", f"cannot finish recording: {exc}")

    def _lost_event(self) -> Event:
        return lost_events_event(
            "spool",
            f"{self._unreported} events could not be written to the spool",
            self._unreported,
            node=self._node,
            clock=self._clock,
            randomness=self._randomness,
        )

    def _warn(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            _log.warning("%s", message)


def spool_recorder(  # noqa: PLR0913 all but one are keywords
    directory: Path,
    *,
    node: str,
    boot_id: str,
    bytes_max: int,
    clock: Clock,
    randomness: Callable[[int], bytes] = os.urandom,
    journal: Path | None = None,
    users_dir: Path | None = None,
) -> SpoolRecorder:
    """Return a recorder into the spool *directory* and, if given, the *journal* directory.

    *users_dir*: where this user may have a spool that root forwards (`gpuops.store.spool.users`).
    """

    def open_writer(source: LineEncoder, path: Path, size_max: int) -> SpoolWriter:
        return SpoolWriter(
            path,
            node=node,
            boot_id=boot_id,
            bytes_max=size_max,
            clock=clock,
            randomness=randomness,
            source=source,
        )

    def open_spool(source: LineEncoder) -> SpoolWriter:
        return open_writer(source, directory, bytes_max)

    def open_copy(source: LineEncoder) -> SpoolWriter | None:
        path = None if users_dir is None else own_user_spool(users_dir)
        return None if path is None else open_writer(source, path, min(bytes_max, USER_BYTES_MAX))

    return SpoolRecorder(
        open_spool,
        node=node,
        boot_id=boot_id,
        clock=clock,
        randomness=randomness,
        journal=journal,
        open_copy=open_copy,
    )


EVENTS_MAX = 8192  # a failure of 8 ranks with full log tails is about 12 events, 200 KB
CLOSE_TIMEOUT_S = 10.0


class QueuedRecorder:
    """Passes events to *inner* from its own thread. No method raises or waits for *inner*."""

    def __init__(
        self,
        inner: Recorder,
        *,
        node: str,
        clock: Clock,
        randomness: Callable[[int], bytes] = os.urandom,
        events_max: int = EVENTS_MAX,
    ) -> None:
        self._inner = inner
        self._node = node
        self._clock = clock
        self._randomness = randomness
        self._events_max = events_max
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._waiting = 0
        self._unreported = 0
        self._is_closing = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="gpuops-recorder", daemon=True)
        self._thread.start()

    def record(self, *events: Event) -> None:
        """Queue *events* as one batch; drop all of them if the queue is full or closed."""
        with self._changed:
            if not self._enqueue(len(events), lambda: self._inner.record(*events)):
                self._unreported += len(events)

    def call(self, action: Callable[[], None]) -> None:
        """Call *action* after the events recorded before; drop it if the queue is full."""
        with self._changed:
            self._enqueue(1, action)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the queue and close *inner*; after *timeout_s* give up and log it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            message = "%d events of this run are not written: the file system blocks"
            _log.warning(message, self._waiting)

    def _enqueue(self, size: int, action: Callable[[], None]) -> bool:
        if self._is_closed or self._waiting + size > self._events_max:
            return False
        self._queue.append((size, action))
        self._waiting += size
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        while (item := self._next()) is not None:
            size, action = item
            self._call_safely(action)
            with self._changed:
                self._waiting -= size
        self._call_safely(self._inner.close)

    def _next(self) -> tuple[int, Callable[[], None]] | None:
        """Return the next action and its size, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._unreported or self._is_closing)
            if self._queue:
                return self._queue.popleft()
            if self._unreported:
                lost = self._lost_event(self._unreported)
                self._unreported = 0
                return 0, lambda: self._inner.record(lost)
            self._is_closed = True
            return None

    def _call_safely(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # noqa: BLE001 boundary: the thread must survive any error of an action
            _log.warning("a write for this run failed", exc_info=True)

    def _lost_event(self, count: int) -> Event:
        return lost_events_event(
            "recorder",
            f"{count} events were dropped: writing could not keep up",
            count,
            node=self._node,
            clock=self._clock,
            randomness=self._randomness,
        )
