"""Read the heartbeat ring that one rank writes; outlives the rank."""

import mmap
import os
from pathlib import Path

from gpuops.wire import RING_BYTES, SLOTS_MAX, Beat, read_beats

_BYTES_MAX = RING_BYTES + SLOTS_MAX * 64


class RingReader:
    """Returns each beat once. A ring that is not there yet, or is damaged, has no beats."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_seq = 0
        self._ring: mmap.mmap | None = None
        self._is_damaged = False

    def poll(self) -> list[Beat]:
        """Return the beats since the last call, oldest first; the ring holds the newest 1024."""
        if self._ring is None:
            self._open()
        if self._ring is None or self._is_damaged:
            return []
        try:
            beats = read_beats(memoryview(self._ring), self.last_seq)
        except ValueError:  # RingError, or a number that is none of ours
            self._is_damaged = True
            return []
        if beats:
            self.last_seq = beats[-1].seq
        return beats

    def close(self) -> None:
        """Let go of the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _open(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            if 0 < os.fstat(fd).st_size <= _BYTES_MAX:
                self._ring = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            self._is_damaged = True
        finally:
            os.close(fd)
