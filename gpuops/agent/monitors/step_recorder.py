"""Writes down each step of this node's ranks, with ``gpuops run --record-steps``.

One file a generation and node in the folder of the generation, ``steps-RANK.jsonl.gz`` with the
lowest rank; `gpuops.detect.step_trace` says what its lines are. Each write is a whole member of
gzip: what was written can be read whatever ends the agent.
"""

import gzip
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.detect.step_trace import SCHEMA
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.units import NS_PER_S
from gpuops.wire.ring import STEP_UNKNOWN, Beat, WorkerPhase

log = logging.getLogger(__name__)

BYTES_MAX = 64 * 2**20  # of all nodes of a run together
WRITE_S = 30.0
_LINES_MAX = 200_000  # while the file system does not answer
_CLOSE_S = 10.0


class StepRecorder(Monitor):
    """Records steps and what monitors publish; where it cannot, it says so once and stops."""

    name = "step-recorder"

    def __init__(self, clock: Clock, slow_after_s: float) -> None:
        self._clock = clock
        self._slow_after_s = slow_after_s
        self._path: Path | None = None
        self._lines: list[str] = []
        self._last: dict[int | str, object] = {}  # step by rank, what was published by monitor
        self._wall_us = 0  # wall clock less monotonic clock
        self._bytes_left: int | None = None
        self._next_ns = 0
        self._writer = threading.Thread()

    def begin(self, watched: MonitoredAttempt) -> None:
        """Begin the file of a generation; what is left of the one before is still written."""
        self._write()
        ranks = sorted(worker.rank for worker in watched.workers)
        if self._bytes_left is None:
            self._bytes_left = BYTES_MAX * len(ranks) // max(watched.world_size or 0, len(ranks), 1)
        self._path = watched.folder / f"steps-{ranks[0]}.jsonl.gz" if ranks else None
        self._last.clear()
        self._wall_us = self._clock.now_us() - self._clock.mono_ns() // 1000
        head = {"schema": SCHEMA, "generation": watched.generation, "node": watched.node}
        self._add({**head, "ranks": ranks, "slow_after_s": self._slow_after_s})

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Record the steps in *beats*; one that repeats a step ends none."""
        for rank, found in beats.items():
            for beat in found:
                step = beat.step if beat.counted is None else beat.counted
                if beat.phase is WorkerPhase.STEPPING and self._is_new(rank, step):
                    times = {"data_us": beat.data_us, "optimizer_us": beat.optimizer_us}
                    known = {k: v for k, v in {**times, "tokens": beat.tokens}.items() if v}
                    time_us = beat.mono_ns // 1000 + self._wall_us
                    self._add({"rank": rank, "step": step, "time_us": time_us, **known})
        if self._clock.mono_ns() >= self._next_ns and not self._writer.is_alive():
            self._next_ns = self._clock.mono_ns() + round(WRITE_S * NS_PER_S)
            self._write()

    def published(self, name: str, body: Json) -> None:
        """Record what the monitor *name* publishes, if it is not what it published before."""
        if self._is_new(name, body):
            self._add({"monitor": name, "time_us": self._clock.now_us(), "published": body})

    def close(self) -> None:
        """Write what is left, unless the file system does not answer for `_CLOSE_S`."""
        self._write()
        if self._writer.ident is not None:
            self._writer.join(_CLOSE_S)

    def _is_new(self, key: int | str, value: object) -> bool:
        before, self._last[key] = self._last.get(key, STEP_UNKNOWN), value
        return value not in (before, STEP_UNKNOWN)

    def _add(self, line: Json) -> None:
        if len(self._lines) >= _LINES_MAX:
            self._stop("the file system does not answer")
        if self._path is not None and self._bytes_left:
            self._lines.append(json.dumps(line, separators=(",", ":")) + "\n")

    def _write(self) -> None:
        lines, self._lines = self._lines, []
        if self._path is not None and lines:
            args = (self._writer, self._path, "".join(lines))
            self._writer = threading.Thread(target=self._append, args=args, daemon=True)
            self._writer.start()

    def _append(self, before: threading.Thread, path: Path, text: str) -> None:
        if before.ident is not None:
            before.join()
        data, left = gzip.compress(text.encode()), self._bytes_left or 0
        if len(data) > left:
            self._stop(f"the traces of a run have at most {BYTES_MAX >> 20} MiB")
            return
        self._bytes_left = left - len(data)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(data)
        except OSError as exc:
            self._stop(f"{path}: {exc.strerror}")

    def _stop(self, why: str) -> None:
        if self._bytes_left:
            log.warning("the steps of this node are no longer recorded: %s", why)
        self._bytes_left = 0
        self._lines.clear()
