"""One beat per optimizer step, into the rank's memory-mapped ring.

The hook does no system call but reading the clock and starts no thread. With several optimizers
every call of any of them is a beat (the process is alive), and the step is the highest that any
of them has reached, so that it never runs backwards within an attempt.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuops.wire import (
    RING_BYTES,
    STEP_UNKNOWN,
    Beat,
    Phase,
    RingHeader,
    StepSource,
    write_beat,
    write_header,
)
from gpuops.worker.steps import StepReader


def create_ring(path: Path, header: RingHeader) -> mmap.mmap:
    """Return the mapping of a new, empty ring at *path*; it appears there complete.

    Raises:
        OSError: No space, no permission, no such directory.
    """
    partial = path.with_name(f".{path.name}.{header.pid}")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not ftruncate: a hole in a full tmpfs would be a SIGBUS at the first beat.
        os.posix_fallocate(fd, 0, RING_BYTES)
        ring = mmap.mmap(fd, RING_BYTES)
    except OSError:
        partial.unlink()
        raise
    finally:
        os.close(fd)
    write_header(memoryview(ring), header)
    partial.replace(path)
    return ring


class Heart:
    """The optimizer hook of this process; an exception in it ends the beats, never the training."""

    def __init__(
        self, ring: memoryview | bytearray, mono_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._ring = ring
        self._mono_ns = mono_ns
        self._readers: dict[int, StepReader] = {}
        self._beats = 0
        self._highest = STEP_UNKNOWN
        self._on = True

    def __call__(self, optimizer: Any, _args: object, _kwargs: object) -> None:  # noqa: ANN401
        """Beat; torch calls this after each ``step()`` of any optimizer."""
        if not self._on:
            return
        try:
            self._beat(optimizer)
        except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
            self._on = False

    def stop(self) -> None:
        """Beat no more; for a forked child, whose optimizer steps are not this rank's."""
        self._on = False

    def _beat(self, optimizer: Any) -> None:  # noqa: ANN401
        reader = self._readers.get(id(optimizer))
        if reader is None or not reader.is_of(optimizer):
            reader = self._readers[id(optimizer)] = StepReader(optimizer)
        self._highest = max(self._highest, reader.read(optimizer))
        self._beats += 1
        known = self._highest != STEP_UNKNOWN
        write_beat(
            self._ring,
            Beat(
                self._beats,
                self._highest,
                self._mono_ns(),
                Phase.STEPPING,
                StepSource.OPTIMIZER_STATE if known else StepSource.UNKNOWN,
                self._beats,
            ),
        )
