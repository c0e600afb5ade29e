"""One beat per optimizer step, into the rank's memory-mapped ring.

The hook does no system call but reading the clock and starts no thread. With several optimizers
every call of any of them is a beat (the process is alive), and the step is the highest that any
of them has reached, so that it never runs backwards within an attempt. Where none of them gets
further for a while, the step is said to be unknown rather than repeated for ever.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

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
from gpuops.worker.steps import PATIENCE, StepReader


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
        self._readers: dict[int, tuple[ref[Any], StepReader]] = {}
        self._beats = 0
        self._rose_at = 0
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
        known = self._readers.get(id(optimizer))
        reader = self._new_reader(optimizer) if known is None else known[1]
        step = reader.read(optimizer)
        self._beats += 1
        if step > self._highest:
            self._highest, self._rose_at = step, self._beats
        # Each of many optimizers may have its turn before the first of them gets further.
        stalled = self._beats - self._rose_at > PATIENCE * len(self._readers)
        step = STEP_UNKNOWN if stalled else self._highest
        write_beat(
            self._ring,
            Beat(
                self._beats,
                step,
                self._mono_ns(),
                Phase.STEPPING,
                StepSource.UNKNOWN if step == STEP_UNKNOWN else StepSource.OPTIMIZER_STATE,
                self._beats,
            ),
        )

    def _new_reader(self, optimizer: Any) -> StepReader:  # noqa: ANN401
        key, readers, reader = id(optimizer), self._readers, StepReader()

        def forget(_gone: object) -> None:
            # Called before the id can be used again.
            readers.pop(key, None)

        readers[key] = ref(optimizer, forget), reader
        return reader
