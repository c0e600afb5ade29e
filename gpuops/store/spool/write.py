"""Append events to local files, which are sent to a store later.

A writer never waits for a database. It appends checksummed lines (`gpuops.store.spool.format`) to
its own segment and syncs it at error severity, on rotation and on close, so that the last events
survive a crash of the machine.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuops.errors import SpoolError
from gpuops.host.clock import Clock
from gpuops.model import Event, Severity
from gpuops.store.events import lost_events_event
from gpuops.store.spool.format import LineEncoder
from gpuops.store.spool.rotate import drop_oldest
from gpuops.store.spool.segments import ensure_own_directory, spool_error

SEGMENT_BYTES = 4 * 2**20
SEGMENT_S = 60
# One hook every ten seconds makes this many in a day; more would make scans slow down the hooks.
SEGMENTS_MAX = 8192


class SpoolWriter:
    """Appends events to ``<directory>/<origin>/<number>.open``; threads may share it.

    Raises:
        SpoolError: The directory is not ours, not private or not writable.
    """

    def __init__(  # noqa: PLR0913 all but one are keywords
        self,
        directory: Path,
        *,
        node: str,
        boot_id: str,
        bytes_max: int,
        clock: Clock,
        randomness: Callable[[int], bytes] = os.urandom,
        private: bool = True,
        source: LineEncoder | None = None,
    ) -> None:
        ensure_own_directory(directory, private=private)
        self._spool = directory
        self._node = node
        self._bytes_max = bytes_max
        self._segment_bytes = min(SEGMENT_BYTES, max(bytes_max // 4, 1))
        self._clock = clock
        self._randomness = randomness
        self._source = source or LineEncoder(node=node, boot_id=boot_id, randomness=randomness)
        self._segment: _OpenSegment | None = None
        self._number = 0
        self._closed = False
        self._lock = threading.Lock()

    @property
    def origin(self) -> str:
        """Return the name under which this writer numbers its events."""
        return self._source.origin

    def append(self, events: Sequence[Event]) -> None:
        """Append *events*, and sync them to disk if one is an error.

        Raises:
            SpoolError: None of *events* may be assumed to be in the spool.
        """
        sync = any(event.severity >= Severity.ERROR for event in events)
        self.append_lines([self._source.encode(event) for event in events], sync=sync)

    def append_lines(self, lines: Sequence[bytes], *, sync: bool) -> None:
        """Append lines of this writer's encoder; *sync* them to disk before returning.

        Raises:
            SpoolError: As for `append`.
        """
        with self._lock:
            if self._closed:
                raise spool_error(self._spool, "this writer is closed")
            try:
                self._open_segment().write(b"".join(lines), sync=sync)
            except OSError as exc:
                # Lines after a partial one go to another file.
                with contextlib.suppress(SpoolError):
                    self._finish_segment()
                raise spool_error(self._spool, exc.strerror or str(exc)) from exc

    def close(self) -> None:
        """Sync the segment and mark it complete.

        Raises:
            SpoolError: It could not be synced.
        """
        with self._lock:
            self._closed = True
            self._finish_segment()

    def _open_segment(self) -> "_OpenSegment":
        if self._segment is not None and self._is_full(self._segment):
            self._finish_segment()
        if self._segment is None:
            lines, size = drop_oldest(
                self._spool,
                bytes_max=max(self._bytes_max - self._segment_bytes, 0),
                segments_max=SEGMENTS_MAX - 1,
            )
            self._number += 1
            directory = self._spool / self._source.origin
            self._segment = _OpenSegment(directory, self._number, self._clock.mono_ns())
            if lines:
                self._segment.write(
                    self._source.encode(self._dropped_event(lines, size)), sync=False
                )
        return self._segment

    def _is_full(self, segment: "_OpenSegment") -> bool:
        age_ns = self._clock.mono_ns() - segment.opened_ns
        return segment.size >= self._segment_bytes or age_ns >= SEGMENT_S * 1_000_000_000

    def _finish_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        try:
            segment.finish()
        except OSError as exc:
            raise spool_error(self._spool, exc.strerror or str(exc)) from exc

    def _dropped_event(self, lines: int, size_bytes: int) -> Event:
        return lost_events_event(
            "spool",
            f"the spool {self._spool} was above {self._bytes_max} bytes: "
            f"its oldest {lines} events ({size_bytes} bytes) were dropped",
            lines,
            node=self._node,
            clock=self._clock,
            randomness=self._randomness,
        )


class _OpenSegment:
    """The file that a writer appends to. Every method raises OSError."""

    def __init__(self, directory: Path, number: int, opened_ns: int) -> None:
        self.opened_ns = opened_ns
        self.size = 0
        self._open_path = directory / f"{number:08d}.open"
        self._ready_path = directory / f"{number:08d}.ready"
        self._fd = self._create(directory, number)
        self._entry_synced = False

    def _create(self, directory: Path, number: int) -> int:
        # Locked under a hidden name first: a flusher that gets the lock assumes a dead writer.
        hidden = directory / f".{number:08d}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(hidden, flags, 0o600)
        except FileNotFoundError:
            directory.mkdir(mode=0o700, exist_ok=True)  # a flusher removed it while it was empty
            fd = os.open(hidden, flags, 0o600)
        except OSError:
            _remove_if_empty(directory)
            raise
        try:
            with contextlib.suppress(OSError):  # a file system without locks: see has_live_writer
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(self._open_path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def write(self, data: bytes, *, sync: bool) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            if sync:
                self._sync()
        except OSError:
            # A partial line in the middle would corrupt the next one as well.
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def finish(self) -> None:
        try:
            self._sync()
            # Without working locks a flusher may have sent and removed it.
            with contextlib.suppress(FileNotFoundError):
                if self.size:
                    self._open_path.rename(self._ready_path)
                else:
                    self._open_path.unlink()
                    _remove_if_empty(self._open_path.parent)
        finally:
            os.close(self._fd)

    def _sync(self) -> None:
        os.fsync(self._fd)
        if not self._entry_synced:
            _sync_directory(self._open_path.parent)
            _sync_directory(self._open_path.parent.parent)
            self._entry_synced = True


def _remove_if_empty(directory: Path) -> None:
    """Remove *directory* if it is empty: on a full disk each run would leave one more."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
