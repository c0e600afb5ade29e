"""One beat per optimizer step and at each change of phase, into the rank's memory-mapped ring.

The hook makes no system call but reading the clock and starts no thread. With several optimizers
every call of any of them is a beat (the process is alive), and the step is the highest that any of
them has reached, so that it never decreases within an attempt. Where none of them advances for a
while, the step is reported as unknown instead of repeated for ever. Where none has a step at all,
the calls of the busiest one are counted, and the beat says that it is a count. The step of a
Checkpointer takes precedence where it differs or is the only one; the step that the script itself
reports takes precedence over all.

A beat with a new step, or without one, says what was needed since the last such beat: the time in
optimizers, and in torch's data loader. Beats that repeat a step say nothing of it, so that whoever
leaves them out has the sums.
"""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import ref

from gpuops.wire.ring import (
    RING_BYTES,
    STEP_UNKNOWN,
    AgentRequest,
    Beat,
    RingHeader,
    StepSource,
    WorkerFlag,
    WorkerPhase,
    raise_flag,
    read_request,
    write_beat,
    write_flags,
    write_header,
)
from gpuops.worker.optimizer_hook import PATIENCE, LoaderTime, StepReader, only_makes_state

# A script may install its own handlers at any time; checking ours costs a third of a beat.
CHECK_EVERY = 16
_BEGUN_MAX = 1024  # optimizers whose steps have begun; more than that many have raised
_UNKNOWN = (STEP_UNKNOWN, StepSource.UNKNOWN)
_BETWEEN_STEPS = (WorkerPhase.RESUMED, "")
_HANDLERS = WorkerFlag.HANDLES_SIGTERM | WorkerFlag.HANDLES_SIGUSR1 | WorkerFlag.HANDLES_SIGUSR2


def create_ring(path: Path, header: RingHeader) -> mmap.mmap:
    """Return the mapping of a new, empty ring at *path*; the file appears complete.

    Raises:
        OSError: No space, no permission, no such directory.
    """
    partial = path.with_name(f".{path.name}.{header.pid}")
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Not ftruncate: a hole in a full tmpfs would cause SIGBUS at the first beat.
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


class Heartbeat:
    """The heartbeat of this process; an exception in it ends the beats, never the training.

    *handlers* returns which signal handlers are still ours. Beats may come from any thread and from
    within a signal handler of the script.
    """

    def __init__(
        self,
        ring: memoryview | bytearray,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        handlers: Callable[[], WorkerFlag] = lambda: WorkerFlag(0),
    ) -> None:
        self._ring = ring
        self._mono_ns = mono_ns
        self._handlers = handlers
        self._lock = RLock()  # re-entered by the script's signal handlers
        self._readers: dict[int, tuple[ref[Any], StepReader]] = {}
        self._beats = 0
        self._calls = 0
        self._rose_at = 0
        self._highest = STEP_UNKNOWN
        self._counted = 0
        self._reported: int | None = None
        self._named: int | None = None  # by a Checkpointer, where the optimizers report another one
        self._named_at = 0
        self._restored: int | None = None  # until a step follows
        self._phase = (WorkerPhase.STARTING, "")
        self._on = True
        self.loader = LoaderTime()
        self._begun_ns: dict[int, int] = {}  # by optimizer, within its step
        self._stepped_ns = 0  # the end of the last step of an optimizer
        self._optimizer_ns = 0
        self._tokens = 0
        self._beat_step = STEP_UNKNOWN

    def begin_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:  # noqa: ANN401
        """Record when a step begins; torch calls this before each ``step()`` of any optimizer."""
        # A step that raises leaves its entry until the next one of that optimizer.
        if self._on:
            if len(self._begun_ns) >= _BEGUN_MAX:
                self._begun_ns.clear()
            self._begun_ns[id(optimizer)] = self._mono_ns()

    def __call__(self, optimizer: Any, _args: object, _kwargs: object) -> None:  # noqa: ANN401
        """Beat; torch calls this after each ``step()`` of any optimizer."""
        if not self._on:
            return
        try:
            with self._lock:
                self._step(optimizer)
        except Exception:  # noqa: BLE001 boundary: our bug must not stop the user's training
            self._on = False

    def progress(self, step: int, tokens: int = 0) -> None:
        """Beat with the script's own *step*, which all later beats repeat, and its *tokens*."""
        with self._lock:
            self._reported = step
            self._tokens += tokens
            self._beat(step, StepSource.REPORTED)

    def named(self, step: int) -> None:
        """Record *step* of a Checkpointer; beat if the optimizers did not report it."""
        with self._lock:
            if self._reported is not None or (self._named is None and self._highest == step):
                return
            self._named, self._named_at, self._restored = step, self._calls, None
            self._beat(step, StepSource.REPORTED)

    def restored(self, step: int) -> None:
        """Record that the script goes on from *step* of a Checkpointer; this is no beat."""
        with self._lock:
            self._restored = step

    def enter(self, phase: WorkerPhase, name: str = "") -> tuple[WorkerPhase, str]:
        """Beat at the start of *phase* and return the phase until now."""
        with self._lock:
            before, self._phase = self._phase, (phase, name)
            self._beat(*self._last_step(), phase, name)
            if self._on:
                write_flags(self._ring, self._handlers(), _HANDLERS)
        return before

    @property
    def step(self) -> int:
        """Return the highest known step, or the one that the script reported."""
        step, source = self._last_step()
        return STEP_UNKNOWN if source is StepSource.COUNTED else step

    @property
    def is_on(self) -> bool:
        """Return whether this process still beats."""
        return self._on

    def request(self) -> tuple[AgentRequest, int]:
        """Return the agent's request to this worker, and from which step on."""
        return read_request(self._ring)

    def flag(self, flag: WorkerFlag) -> None:
        """Set *flag* for the agent, permanently; safe within a signal handler."""
        raise_flag(self._ring, flag)

    def stop(self) -> None:
        """Stop beating; for a forked child, whose optimizer steps are not this rank's."""
        self._on = False

    def _step(self, optimizer: Any) -> None:  # noqa: ANN401
        if only_makes_state(optimizer):
            return
        self._calls += 1
        begun_ns = self._begun_ns.pop(id(optimizer), None)
        if begun_ns is not None:
            # An optimizer may step another one, whose time is counted already.
            before_ns, self._stepped_ns = self._stepped_ns, self._mono_ns()
            self._optimizer_ns += self._stepped_ns - max(begun_ns, before_ns)
        if self._reported is not None:
            self._beat(self._reported, StepSource.REPORTED)
            return
        known = self._readers.get(id(optimizer))
        reader = self._new_reader(optimizer) if known is None else known[1]
        step = reader.read(optimizer)
        self._counted = max(self._counted, reader.calls)
        if step > self._highest:
            self._highest, self._rose_at = step, self._calls
        # Of an optimizer that left steps out (a GradScaler's), or has no number, the next one would
        # look like one made again.
        if self._restored is not None and self._highest != self._restored + 1:
            self._named, self._named_at = self._restored + 1, self._calls
        self._restored = None
        # Each of several optimizers may step before the first of them advances.
        patience = PATIENCE * len(self._readers)
        if self._named is not None and self._calls - self._named_at > patience:
            self._named = None
        has_stalled = self._highest != STEP_UNKNOWN and self._calls - self._rose_at > patience
        if self._named is None and has_stalled:
            self._beat(*_UNKNOWN)
        else:
            self._beat(*self._last_step())

    def _last_step(self) -> tuple[int, StepSource]:
        if self._reported is not None:
            return self._reported, StepSource.REPORTED
        if self._named is not None:
            return self._named, StepSource.REPORTED
        if self._highest == STEP_UNKNOWN:
            known = self._counted > 0
            return (self._counted, StepSource.COUNTED) if known else _UNKNOWN
        return self._highest, StepSource.OPTIMIZER_STATE

    def _beat(
        self,
        step: int,
        source: StepSource,
        phase: WorkerPhase = WorkerPhase.STEPPING,
        name: str = "",
    ) -> None:
        if not self._on:
            return
        self._beats = seq = self._beats + 1
        counted, took = None, (0, 0, 0)
        if source is StepSource.COUNTED:
            step, counted = STEP_UNKNOWN, step
        if phase is not WorkerPhase.STEPPING:
            self.loader.ns = 0  # what an evaluation reads is not of the next step
        else:
            self._phase = _BETWEEN_STEPS
            if step == STEP_UNKNOWN or step != self._beat_step:
                took = self.loader.ns // 1000, self._optimizer_ns // 1000, self._tokens
                self.loader.ns = self._optimizer_ns = self._tokens = 0
        self._beat_step = step
        now_ns = self._mono_ns()
        beat = Beat(seq, step, now_ns, phase, source, self._calls, name, counted, *took)
        write_beat(self._ring, beat)
        if seq % CHECK_EVERY == 1:
            write_flags(self._ring, self._handlers(), _HANDLERS)

    def _new_reader(self, optimizer: Any) -> StepReader:  # noqa: ANN401
        key, readers, reader = id(optimizer), self._readers, StepReader()

        def forget(_gone: object) -> None:
            # Called before the id can be used again.
            readers.pop(key, None)

        readers[key] = ref(optimizer, forget), reader
        return reader
