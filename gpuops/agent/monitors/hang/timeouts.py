"""How long a rank may be silent: a limit for each kind of phase, learned from this run.

A single timeout is either too long for a step or too short for a checkpoint. Learned limits last
for the run, across restarts. Times are seconds.

The floors: a step takes seconds and a stall of a shared file system under a minute, hence 60 s;
compilation, loading and evaluation take minutes, and torch's own timeout of a gloo or NCCL
collective ends a hang in them after 10 to 30 minutes, hence 600 s. The first step keeps that floor
after a restart, however short the first step of a fresh start was: that one loaded no checkpoint
and skipped no data.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuops.wire.ring import WorkerPhase

STEP_FLOOR_S = 60.0
PHASE_FLOOR_S = 600.0
P99_FACTOR = 5.0
LONGEST_FACTOR = 3.0
STEPS_MIN = 5
# The first gaps between steps hold compilation, autotuning, lazy initialisation.
WARM_UP = 2
KEPT = 1024
# torchft repairs its groups in the process, which takes as long as its own timeouts.
TORCHFT_FACTOR = 10.0

FIRST_STEP = "first step"
STEP = "step"


@dataclass(slots=True)
class BeatGaps:
    """The times between the steps of one rank: the newest, and the longest of all."""

    seen: int = 0
    longest_s: float = 0.0
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _p99_s: float = 0.0
    _p99_of: int = 0

    def add(self, gap_s: float) -> None:
        """Take in the next gap."""
        self.seen += 1
        if self.seen <= WARM_UP:
            return
        self.longest_s = max(self.longest_s, gap_s)
        self._newest.append(gap_s)

    @property
    def suffice(self) -> bool:
        """Return whether there are enough for a limit."""
        return self.seen >= STEPS_MIN

    @property
    def p99_s(self) -> float:
        """Return the 99th percentile of the newest; recomputed after each 5 % more of them."""
        if self.seen - self._p99_of > 0.05 * len(self._newest):
            ordered = sorted(self._newest)
            self._p99_s = ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0
            self._p99_of = self.seen
        return self._p99_s


@dataclass(slots=True)
class HangTimeouts:
    """The limits of one run.

    ``asked_s`` is the limit for a step that the user has set, None to learn it; *factor* scales
    the learned limits and the floors.
    """

    asked_s: float | None = None
    factor: float = 1.0
    _first_step_s: float | None = None
    _first_step_now_s: float = 0.0
    _steps: dict[int, BeatGaps] = field(default_factory=dict)
    _phases: dict[tuple[WorkerPhase, str], float] = field(default_factory=dict)

    def begin_attempt(self) -> None:
        """Use the first steps of the last attempt from now on: all ranks have made theirs."""
        if self._first_step_now_s > 0:
            self._first_step_s = max(self._first_step_s or 0.0, self._first_step_now_s)
            self._first_step_now_s = 0.0

    def learn_first_step(self, took_s: float) -> None:
        """Take in how long a first step took, from the start of its worker."""
        self._first_step_now_s = max(self._first_step_now_s, took_s)

    def learn_step(self, rank: int, gap_s: float) -> None:
        """Take in the time between two consecutive steps of *rank*."""
        self._steps.setdefault(rank, BeatGaps()).add(gap_s)

    def learn_phase(self, phase: WorkerPhase, name: str, took_s: float) -> None:
        """Take in how long a phase took."""
        key = phase, name
        self._phases[key] = max(self._phases.get(key, 0.0), took_s)

    def first_step(self) -> float:
        """Return the limit from a worker's start to its first step."""
        return max(self.factor * PHASE_FLOOR_S, self._second_step())

    def _second_step(self) -> float:
        """Return the limit of the steps after the first, while they may still compile."""
        floor_s = PHASE_FLOOR_S
        if self._first_step_s is not None:
            floor_s = max(STEP_FLOOR_S, LONGEST_FACTOR * self._first_step_s)
        return max(self.factor * floor_s, self.asked_s or 0.0)

    def step(self, rank: int, made: int) -> float:
        """Return the limit for a step of *rank*, which has *made* some in this generation.

        A rank that has made few may still be compiling, however many earlier steps are known.
        """
        if self.asked_s is not None:
            return self.asked_s
        own = self._steps.get(rank)
        known = [own] if own is not None and own.suffice else list(self._steps.values())
        known = [gaps for gaps in known if gaps.suffice]
        if not known:
            return self._second_step()
        learned_s = max(
            max(P99_FACTOR * gaps.p99_s, LONGEST_FACTOR * gaps.longest_s) for gaps in known
        )
        limit_s = self.factor * max(STEP_FLOOR_S, learned_s)
        return limit_s if made >= STEPS_MIN else max(limit_s, self._second_step())

    def phase(self, phase: WorkerPhase, name: str) -> float:
        """Return the limit for a phase."""
        longest_s = self._phases.get((phase, name), 0.0)
        learned_s = self.factor * max(PHASE_FLOOR_S, LONGEST_FACTOR * longest_s)
        return max(learned_s, self.asked_s or 0.0)

    def end(self) -> float:
        """Return the limit for a worker's exit after an uncaught exception."""
        return max(self.factor * STEP_FLOOR_S, self.asked_s or 0.0)


def limits_for(asked_s: float | None, env: Mapping[str, str]) -> HangTimeouts:
    """Return the initial limits of a run; *asked_s* is ``--hang-timeout``, if given."""
    factor = TORCHFT_FACTOR if env.get("TORCHFT_LIGHTHOUSE") else 1.0
    return HangTimeouts(asked_s, factor)
