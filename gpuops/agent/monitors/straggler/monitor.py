"""Reads the flight recorders of a node's ranks, and publishes how long each worked by itself.

A read costs each worker 0.1 s of a core, so reads are rare: after the first steps, in each ten
minutes, and when the job's steps became slower; each once more after the time for which a rank must
be slow to be suspected. They are due at multiples of 16 steps, so that the agents of a run read the
same steps without having talked about it.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.recorder.reader import read_recorders, recorder_paths
from gpuops.agent.monitors.straggler.signs import THROTTLED, HostSigns
from gpuops.detect.own_time import RankTrace, own_times, step_spans
from gpuops.detect.recorder_dump import RankDump
from gpuops.detect.step_summary import pack_summary
from gpuops.detect.step_time import StepTimeWatch
from gpuops.host.clock import Clock
from gpuops.model import Json
from gpuops.units import NS_PER_S
from gpuops.wire.ring import Beat

log = logging.getLogger(__name__)

# The first steps compile, allocate and load; the 16 after them are read.
WARM_UP_STEPS = 20
STEPS = 16
EVERY_S = 600.0
# The first read, one after a rise, and each once more.
READS_MAX, READ_AGAIN_S = 4, 200.0
READ_S = 5.0
# What a node publishes has 4 KiB: 100 bytes a rank, and up to 120 more with what is seen of it.
RANKS_MAX, RANKS_WITH_SIGNS_MAX = 36, 16
_BEATS_KEPT, _BEATS_BEFORE = 256, 4
_STEP_S_MIN = 1e-4
_CLOCK_STEP_NS = 10**6
_CLOCK_READ_NS = 10**5


class _Target(NamedTuple):
    rank: int
    pid: int
    recorder: Path
    groups: Path


@dataclass(slots=True)
class ReadSchedule:
    """When to read, by the number of steps since the first one, at most so often as is allowed."""

    hold_s: float
    due: int = WARM_UP_STEPS + STEPS
    allowed: float = READS_MAX
    _refilled_s: float | None = None
    _repeats: bool = False

    def rose(self, n_steps: int) -> None:
        """Read once the steps after a rise in the step time have been made."""
        self.due = min(self.due, _multiple(n_steps + STEPS))
        self._repeats = False

    def is_due(self, n_steps: int, step_s: float, now_s: float) -> bool:
        """Return whether to read now; if so, the next one is later."""
        since_s = 0.0 if self._refilled_s is None else now_s - self._refilled_s
        self.allowed = min(READS_MAX, self.allowed + since_s / READ_AGAIN_S)
        self._refilled_s = now_s
        if n_steps < self.due:
            return False
        if self.allowed < 1:
            self.due = _multiple(n_steps + 1)
            return False
        self.allowed -= 1
        self._repeats = not self._repeats
        wait = math.ceil((self.hold_s if self._repeats else EVERY_S) / max(step_s, _STEP_S_MIN))
        # A power of two: agents that differ in their step time still share every other read.
        blocks = 2 ** math.floor(math.log2(max(1.0, wait / 2 / STEPS)))
        self.due = _multiple(n_steps + max(wait, STEPS), blocks)
        return True


def _multiple(n_steps: int, blocks: int = 1) -> int:
    """Return the next step from *n_steps* on at which so many blocks of steps are complete."""
    size = STEPS * blocks
    return WARM_UP_STEPS + math.ceil((n_steps - WARM_UP_STEPS) / size) * size


@dataclass(slots=True)
class _Watched:
    attempt: MonitoredAttempt
    schedule: ReadSchedule
    rises: StepTimeWatch = field(default_factory=StepTimeWatch)
    beats: dict[int, deque[Beat]] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int = -1
    since_ns: int = 0  # when the wall clock was set last
    published: Json | None = None


class StragglerMonitor(Monitor):
    """Publishes the newest steps of each rank. *hold_s*: for how long a rank must be slow; 0: off.

    *gpus_of* returns the UUIDs of GPUs by local rank; *read* asks the workers; *signs* looks at
    their host, and *throttled* returns which GPUs are slowed down.
    """

    name = "straggler"

    def __init__(
        self,
        clock: Clock,
        hold_s: float,
        gpus_of: Callable[[Iterable[int]], Mapping[int, str]],
        signs: HostSigns,
        throttled: Callable[[], Collection[str]],
        read: Callable[[Sequence[_Target], float], Mapping[int, RankDump]] = read_recorders,
    ) -> None:
        self._clock = clock
        self._hold_s = hold_s
        self._gpus_of = gpus_of
        self._signs = signs
        self._throttled = throttled
        self._read = read
        self._offset_ns: int | None = None
        self._watched: _Watched | None = None
        self._reader: threading.Thread | None = None

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation."""
        self._watched = _Watched(watched, ReadSchedule(self._hold_s))
        if len(watched.workers) and self._hold_s:
            self._signs.look(_pids(watched), self._clock.mono_ns() / NS_PER_S)

    def feed(self, beats: Mapping[int, Sequence[Beat]]) -> None:
        """Keep the heartbeats, and begin to read the recorders if that is due."""
        watched = self._watched
        if watched is None or not self._hold_s:
            return
        self._follow_clock(watched)
        for rank, new in beats.items():
            watched.beats.setdefault(rank, deque(maxlen=_BEATS_KEPT)).extend(new)
        lead = min(watched.beats, default=None)
        is_reading = self._reader is not None and self._reader.is_alive()
        n_new = 0 if lead is None else len(beats.get(lead, ()))
        if lead is not None and n_new and self._is_due(watched, lead, n_new) and not is_reading:
            kept = {rank: tuple(each) for rank, each in watched.beats.items()}
            self._reader = threading.Thread(
                target=self._publish, args=(watched, kept), name="gpuops-straggler", daemon=True
            )
            self._reader.start()

    def publish(self) -> Json | None:
        """Return the summary of each rank at the last read, and why there may be none."""
        return None if self._watched is None else self._watched.published

    def _follow_clock(self, watched: _Watched) -> None:
        """Notice that the wall clock was set: calls before that have times of another clock."""
        before_ns, wall_us, now_ns = (
            self._clock.mono_ns(),
            self._clock.now_us(),
            self._clock.mono_ns(),
        )
        if now_ns - before_ns > _CLOCK_READ_NS:
            return  # interrupted between the two
        offset_ns = wall_us * 1000 - before_ns
        if self._offset_ns is None or abs(offset_ns - self._offset_ns) > _CLOCK_STEP_NS:
            watched.since_ns = 0 if self._offset_ns is None else now_ns
        self._offset_ns = offset_ns

    def _is_due(self, watched: _Watched, lead: int, n_new: int) -> bool:
        """Follow the steps of the rank *lead*; say whether it has come to one at which to read.

        Only its *n_new* beats and some before them are looked at: this is ten times a second.
        """
        newest = list(watched.beats[lead])[-n_new - _BEATS_BEFORE :]
        # The last one may go on with another optimizer.
        spans = [span for span in step_spans(newest)[:-1] if span.step > watched.last_step]
        if not spans:
            return False
        if watched.first_step is None:
            watched.first_step = spans[0].step
        watched.last_step = spans[-1].step
        n_steps = watched.last_step - watched.first_step
        for span in spans:
            rise = watched.rises.feed(span.seconds) if n_steps > WARM_UP_STEPS else None
            if rise is not None:
                log.info(
                    "the median time of a step rose from %.3g to %.3g s; looking for a slow rank",
                    *(rise.before_s, rise.since_s),
                )
                watched.schedule.rose(n_steps)
        now_s = self._clock.mono_ns() / NS_PER_S
        return watched.schedule.is_due(n_steps, spans[-1].seconds, now_s)

    def _publish(self, watched: _Watched, beats: Mapping[int, Sequence[Beat]]) -> None:
        try:
            watched.published = self._summaries(watched, beats) or watched.published
        except Exception:  # boundary: whatever is wrong with what was read, the run goes on
            log.warning("this node no longer looks for slow ranks", exc_info=True)
            self._hold_s = 0.0

    def _summaries(self, watched: _Watched, beats: Mapping[int, Sequence[Beat]]) -> Json | None:
        attempt, offset_ns = watched.attempt, self._offset_ns
        signs = self._signs.look(_pids(attempt), self._clock.mono_ns() / NS_PER_S)
        targets = [
            _Target(w.rank, w.pid, *recorder_paths(w.ring.path, w.rank)) for w in attempt.workers
        ]
        dumps = self._read(targets, READ_S)
        if offset_ns is None or watched.first_step is None:
            return None
        warm = watched.first_step + WARM_UP_STEPS
        traces = {
            rank: RankTrace(
                dump=dump,
                spans=[
                    span
                    for span in step_spans(beats[rank])
                    if span.step > warm and span.start_ns >= watched.since_ns
                ],
                wall_offset_ns=offset_ns,
            )
            for rank, dump in dumps.items()
            if rank in beats
        }
        gpus = self._gpus_of([w.local_rank for w in attempt.workers])
        throttled = self._throttled() if gpus else ()
        also: dict[int, Json] = {
            w.rank: {"gpu": uuid, THROTTLED: int(uuid in throttled)}
            for w in attempt.workers
            if (uuid := gpus.get(w.local_rank)) is not None
        }
        own, why = own_times(traces, attempt.world_size or 0)
        if len(own) > RANKS_MAX:
            own, why = {}, f"a node publishes the steps of {RANKS_MAX} ranks at most"
        if len(own) > RANKS_WITH_SIGNS_MAX:
            signs, also = {rank: {} for rank in signs}, {}
        return {
            "generation": attempt.generation,
            "is_whole": len(attempt.workers) == attempt.world_size,
            "why": why,
            "ranks": {
                str(rank): {
                    "steps": text,
                    "tokens": steps.tokens,
                    **signs[rank],
                    **also.get(rank, {}),
                }
                for rank, steps in own.items()
                if (text := pack_summary(steps))
            },
        }


def _pids(attempt: MonitoredAttempt) -> dict[int, int]:
    return {worker.rank: worker.pid for worker in attempt.workers}
