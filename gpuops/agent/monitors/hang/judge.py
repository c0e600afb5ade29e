"""Is this node's part of the group hung? Judged from beats, phases and the time; pure.

The groups of a job wait for each other, so what counts is not which rank is silent (all are, soon)
but whether any of them still has a reason to be: one that evaluates, saves or makes its first step
within its own limit excuses the others, which may be waiting for it.

Times are this host's monotonic nanoseconds, as in the rings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuops.agent.monitors.hang.timeouts import FIRST_STEP, STEP, STEPS_MIN, HangTimeouts
from gpuops.wire.ring import STEP_UNKNOWN, Beat, WorkerPhase

NS = 10**9
# An agent that did not look for so long was itself stopped, and its workers with it: what they
# missed meanwhile is no silence of theirs.
ASLEEP_S = 5.0
# By then a job that beats at all has beaten; said once, because nothing else would say it.
BEATLESS_S = 600.0
_LABELLED = frozenset(
    {WorkerPhase.EVAL, WorkerPhase.CHECKPOINT, WorkerPhase.RESTORE, WorkerPhase.OTHER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """A node whose ranks make no progress.

    ``lagging`` are those that the beats alone name: behind the others by their steps, or silent
    while others beat; none where all stand at the same step. ``phase`` and the times are of the
    rank that has been silent for longest beyond its limit.
    """

    phase: str
    limit_s: float
    silent_s: float
    step: int | None
    lagging: tuple[int, ...]
    steps: Mapping[int, int | None]
    silences_s: Mapping[int, float]


@dataclass(slots=True)
class RankTimer:
    """What one rank has said in this generation."""

    started_ns: int
    heard_ns: int
    step: int | None = None
    steps_made: int = 0
    beats: int = 0
    phase: WorkerPhase = WorkerPhase.STARTING
    name: str = ""

    def hear(self, rank: int, beat: Beat, limits: HangTimeouts, awake_ns: int) -> None:
        """Take one beat in, and what it teaches: nothing, if all slept meanwhile."""
        if not self.heard_ns < awake_ns <= beat.mono_ns:
            self._teach(rank, beat, limits)
        self.steps_made += beat.phase is WorkerPhase.STEPPING
        if beat.step != STEP_UNKNOWN:
            self.step = beat.step
        self.beats += 1
        self.phase, self.name = beat.phase, beat.name
        self.heard_ns = beat.mono_ns

    def _teach(self, rank: int, beat: Beat, limits: HangTimeouts) -> None:
        took_s = (beat.mono_ns - self.heard_ns) / NS
        if self.phase in _LABELLED:
            limits.learn_phase(self.phase, self.name, took_s)
        if beat.phase is WorkerPhase.STEPPING and self.steps_made == 0:
            limits.learn_first_step((beat.mono_ns - self.started_ns) / NS)
        elif beat.phase is WorkerPhase.STEPPING and self.phase is WorkerPhase.STEPPING:
            limits.learn_step(rank, took_s)

    def limit_s(self, rank: int, limits: HangTimeouts) -> float:
        """Return how long this rank may be silent now."""
        if self.phase in _LABELLED:
            return limits.phase(self.phase, self.name)
        if self.phase is WorkerPhase.RAISED:
            return limits.end()
        return limits.step(rank, self.steps_made) if self.steps_made else limits.first_step()

    @property
    def doing(self) -> str:
        """Return what it does, for people."""
        if self.phase in _LABELLED:
            return self.name or self.phase.name.lower()
        if self.phase is WorkerPhase.RAISED:
            return "ending after an exception"
        return STEP if self.steps_made else FIRST_STEP


@dataclass(slots=True)
class HangJudge:
    """Kept for the whole run; `begin` starts each generation."""

    limits: HangTimeouts
    _ranks: dict[int, RankTimer] = field(default_factory=dict)
    _looked_ns: int = 0
    _awake_ns: int = 0
    _excused_until_ns: int = 0
    _has_said_beatless: bool = False
    _has_ever_stepped: bool = False

    def begin(self, ranks: Iterable[int], now_ns: int) -> None:
        """Watch *ranks*, whose workers have just been started."""
        self._ranks = {rank: RankTimer(now_ns, now_ns) for rank in ranks}
        self._looked_ns = self._awake_ns = now_ns
        self.limits.begin_attempt()
        self._excused_until_ns = 0

    def feed(self, beats: Mapping[int, Iterable[Beat]], now_ns: int) -> None:
        """Take the next beats of each rank in."""
        self._note_time(now_ns)
        for rank, watch in self._ranks.items():
            for beat in beats.get(rank, ()):
                watch.hear(rank, beat, self.limits, self._awake_ns)
                self._has_ever_stepped |= beat.phase is WorkerPhase.STEPPING

    def excuse_until(self, mono_ns: int) -> None:
        """Accept silence until then: somebody was seen at work, here or on another node."""
        self._excused_until_ns = max(self._excused_until_ns, mono_ns)

    @property
    def steps(self) -> dict[int, int | None]:
        """Return the last step of each rank that still runs."""
        return {rank: watch.step for rank, watch in self._ranks.items()}

    @property
    def finished(self) -> tuple[int, ...]:
        """Return the ranks whose program has come to its end."""
        return tuple(r for r, watch in self._ranks.items() if watch.phase is WorkerPhase.FINISHED)

    def long_finished(self, now_ns: int) -> tuple[int, ...]:
        """Return the ranks whose program came to its end longer ago than a phase may last.

        Most of their processes are gone: beats do not tell.
        """
        limit_s = self.limits.phase(WorkerPhase.FINISHED, "")
        return tuple(r for r in self.finished if self._silent_s(self._ranks[r], now_ns) > limit_s)

    def silences_s(self, now_ns: int) -> dict[int, float]:
        """Return for how long each rank has been silent."""
        return {rank: self._silent_s(watch, now_ns) for rank, watch in self._ranks.items()}

    def busy_for_s(self, now_ns: int) -> float:
        """Return for how long this node still has a reason to be silent beyond a step's limit.

        For other nodes, whose ranks may be waiting for ours.
        """
        left_s = (self._excused_until_ns - now_ns) / NS
        for rank, watch in self._ranks.items():
            if self._is_at_something_long(watch):
                left_s = max(
                    left_s, watch.limit_s(rank, self.limits) - self._silent_s(watch, now_ns)
                )
        return max(left_s, 0.0)

    def look(self, now_ns: int) -> HangFinding | None:
        """Return the hang there is; may be called at any interval."""
        self._note_time(now_ns)
        late = {
            rank: (silent_s - limit_s, silent_s, limit_s)
            for rank, watch in self._ranks.items()
            if self._can_judge(watch)
            and (silent_s := self._silent_s(watch, now_ns))
            > (limit_s := watch.limit_s(rank, self.limits))
        }
        if not late or self._is_excused(late, now_ns):
            return None
        lagging = self._lagging(late)
        # Who came over its limit last is who the others were waiting for.
        worst = min(lagging or late, key=lambda rank: late.get(rank, (0.0, 0.0, 0.0)))
        _, silent_s, limit_s = late.get(worst) or min(late.values())
        return HangFinding(
            phase=self._ranks[worst].doing,
            limit_s=limit_s,
            silent_s=silent_s,
            step=self._ranks[worst].step,
            lagging=lagging,
            steps=self.steps,
            silences_s=self.silences_s(now_ns),
        )

    def stopped(self, lasted_s: Mapping[int, float], limit_s: float, now_ns: int) -> HangFinding:
        """Return the hang that ranks make which have been stopped for so many seconds."""
        worst = max(lasted_s, key=lambda rank: lasted_s[rank])
        return HangFinding(
            phase=self._ranks[worst].doing,
            limit_s=limit_s,
            silent_s=lasted_s[worst],
            step=self._ranks[worst].step,
            lagging=tuple(sorted(lasted_s)),
            steps=self.steps,
            silences_s=self.silences_s(now_ns),
        )

    def is_beatless(self, now_ns: int) -> bool:
        """Return true once, when no rank has beaten for `BEATLESS_S`: hangs cannot be judged."""
        if self._has_said_beatless or not self._ranks:
            return False
        self._has_said_beatless = not any(watch.beats for watch in self._ranks.values()) and all(
            now_ns - watch.started_ns > BEATLESS_S * NS for watch in self._ranks.values()
        )
        return self._has_said_beatless

    def _note_time(self, now_ns: int) -> None:
        if now_ns - self._looked_ns > ASLEEP_S * NS:
            self._awake_ns = now_ns
        self._looked_ns = now_ns

    def _can_judge(self, watch: RankTimer) -> bool:
        """Say whether silence of *watch* means anything: of a job that never beat it does not."""
        if watch.phase is WorkerPhase.FINISHED:
            return False
        if watch.beats:
            return True
        # A rank may be one that never steps: while the others do, nobody waits for it.
        return self._has_ever_stepped and not self._others_step_on()

    def _others_step_on(self) -> bool:
        return any(
            watch.steps_made
            and self._silent_s(watch, self._looked_ns) <= watch.limit_s(rank, self.limits)
            for rank, watch in self._ranks.items()
        )

    def _is_excused(self, late: Mapping[int, object], now_ns: int) -> bool:
        if now_ns < self._excused_until_ns:
            return True
        return any(
            self._is_at_something_long(watch)
            and self._silent_s(watch, now_ns) <= watch.limit_s(rank, self.limits)
            for rank, watch in self._ranks.items()
            if rank not in late
        )

    def _is_at_something_long(self, watch: RankTimer) -> bool:
        if watch.phase in _LABELLED:
            return True
        return not watch.steps_made and watch.phase not in {
            WorkerPhase.FINISHED,
            WorkerPhase.RAISED,
        }

    def _silent_s(self, watch: RankTimer, now_ns: int) -> float:
        return (now_ns - max(watch.heard_ns, self._awake_ns)) / NS

    def _lagging(self, late: Iterable[int]) -> tuple[int, ...]:
        """Return who is behind by the beats.

        Who made no step, else who is in a phase of its own, who has the lowest step, who is silent
        while others are not.
        """
        running = {r: w for r, w in self._ranks.items() if w.phase is not WorkerPhase.FINISHED}
        late = sorted(late)
        stepless = [rank for rank in late if not running[rank].steps_made]
        # Where the others have made more, it is none that they wait for.
        if stepless and 0 < max(w.steps_made for w in running.values()) <= STEPS_MIN:
            return tuple(stepless)
        busy = [rank for rank in late if running[rank].phase in _LABELLED]
        if 0 < len(busy) < len(running):
            return tuple(busy)
        known = {rank: w.step for rank, w in running.items() if w.step is not None}
        if known and len(known) == len(running) and len(set(known.values())) > 1:
            lowest = min(known.values())
            return tuple(sorted(rank for rank, step in known.items() if step == lowest))
        return tuple(late) if len(late) < len(running) else ()
