"""Judges from heartbeats, phases and the time whether this node's part of the group hangs; pure.

The ranks of a job wait for each other, so what counts is not which rank is silent (soon all are)
but whether any of them still has a reason to be: one that evaluates, saves or makes its first step
within its own limit excuses the others, which may be waiting for it.

Times are this host's monotonic nanoseconds, as in the rings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuops.agent.monitors.hang.timeouts import FIRST_STEP, STEP, STEPS_MIN, HangTimeouts
from gpuops.wire.ring import STEP_UNKNOWN, Beat, WorkerPhase

NS = 10**9
# An agent that did not poll for so long was itself stopped, and its workers with it: that time does
# not count as their silence.
ASLEEP_S = 5.0
# A job that sends heartbeats at all has sent one by then; otherwise there is one warning.
BEATLESS_S = 600.0
_LABELLED = frozenset(
    {WorkerPhase.EVAL, WorkerPhase.CHECKPOINT, WorkerPhase.RESTORE, WorkerPhase.OTHER}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """A node whose ranks make no progress.

    ``lagging`` are the ranks that the heartbeats alone identify: with fewer steps than the others,
    or silent while others are not; none where all are at the same step. ``phase`` and the times are
    those of the rank that exceeded its limit last. ``steps_made``: the most of any rank in this
    generation; ``ever_stepped``: a step of the run was seen in any.
    """

    phase: str
    limit_s: float
    silent_s: float
    step: int | None
    lagging: tuple[int, ...]
    steps: Mapping[int, int | None]
    silences_s: Mapping[int, float]
    steps_made: int = 1
    ever_stepped: bool = True


@dataclass(slots=True)
class RankTimer:
    """The heartbeats of one rank in this generation."""

    started_ns: int
    beat_ns: int  # of the last heartbeat, at first of the start
    step: int | None = None
    steps_made: int = 0
    beats: int = 0
    phase: WorkerPhase = WorkerPhase.STARTING
    name: str = ""

    def add(self, rank: int, beat: Beat, limits: HangTimeouts, awake_ns: int) -> None:
        """Take in one heartbeat; *limits* learn from it, unless the host was asleep before it."""
        if not self.beat_ns < awake_ns <= beat.mono_ns:
            self._learn(rank, beat, limits)
        self.steps_made += beat.phase is WorkerPhase.STEPPING
        if beat.step != STEP_UNKNOWN:
            self.step = beat.step
        self.beats += 1
        self.phase, self.name = beat.phase, beat.name
        self.beat_ns = beat.mono_ns

    def _learn(self, rank: int, beat: Beat, limits: HangTimeouts) -> None:
        took_s = (beat.mono_ns - self.beat_ns) / NS
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
        """Return its activity, for people."""
        if self.phase in _LABELLED:
            return self.name or self.phase.name.lower()
        if self.phase is WorkerPhase.RAISED:
            return "ending after an exception"
        return STEP if self.steps_made else FIRST_STEP


@dataclass(slots=True)
class HangJudge:
    """Lasts for the run; `begin` starts each generation."""

    limits: HangTimeouts
    _ranks: dict[int, RankTimer] = field(default_factory=dict)
    _polled_ns: int = 0
    _awake_ns: int = 0
    _excused_until_ns: int = 0
    _busy_until_ns: int = 0
    _has_reported_beatless: bool = False
    _has_ever_stepped: bool = False
    _expects_steps: bool = False

    def begin(self, ranks: Iterable[int], now_ns: int) -> None:
        """Watch *ranks*, whose workers have just been started.

        A job shows no steps if a start lasted for `BEATLESS_S` without one; else a restart that
        makes none is judged.
        """
        self._expects_steps = bool(self._ranks) and not self._has_reported_beatless
        self._ranks = {rank: RankTimer(now_ns, now_ns) for rank in ranks}
        self._polled_ns = self._awake_ns = now_ns
        self.limits.begin_attempt()
        self._excused_until_ns = self._busy_until_ns = 0

    def feed(self, beats: Mapping[int, Iterable[Beat]], now_ns: int) -> None:
        """Take in the next heartbeats of each rank."""
        self._update_time(now_ns)
        for rank, timer in self._ranks.items():
            for beat in beats.get(rank, ()):
                timer.add(rank, beat, self.limits, self._awake_ns)
                self._has_ever_stepped |= beat.phase is WorkerPhase.STEPPING

    def excuse_until(self, mono_ns: int, *, others_too: bool = True) -> None:
        """Accept silence until then: a rank is at work, here or on another node.

        *others_too*: other nodes are told to accept theirs, see `busy_for_s`.
        """
        self._excused_until_ns = max(self._excused_until_ns, mono_ns)
        if others_too:
            self._busy_until_ns = max(self._busy_until_ns, mono_ns)

    @property
    def steps(self) -> dict[int, int | None]:
        """Return the last step of each rank that still runs."""
        return {rank: timer.step for rank, timer in self._ranks.items()}

    @property
    def steps_made(self) -> int:
        """Return the most steps that a rank has made in this generation."""
        return max((timer.steps_made for timer in self._ranks.values()), default=0)

    @property
    def finished(self) -> tuple[int, ...]:
        """Return the ranks whose program has ended."""
        return tuple(r for r, timer in self._ranks.items() if timer.phase is WorkerPhase.FINISHED)

    def long_finished(self, now_ns: int) -> tuple[int, ...]:
        """Return the ranks whose program ended longer ago than a phase may last.

        Most of their processes have exited; heartbeats do not show which.
        """
        limit_s = self.limits.phase(WorkerPhase.FINISHED, "")
        return tuple(r for r in self.finished if self._silent_s(self._ranks[r], now_ns) > limit_s)

    def silences_s(self, now_ns: int) -> dict[int, float]:
        """Return for how long each rank has been silent."""
        return {rank: self._silent_s(timer, now_ns) for rank, timer in self._ranks.items()}

    def busy_for_s(self, now_ns: int) -> float:
        """Return for how long this node still has a reason to be silent beyond a step's limit.

        For other nodes, whose ranks may be waiting for ranks here.
        """
        left_s = [0.0, (self._busy_until_ns - now_ns) / NS]
        for rank, timer in self._ranks.items():
            if self._is_in_long_phase(timer):
                left_s.append(timer.limit_s(rank, self.limits) - self._silent_s(timer, now_ns))
        return max(left_s)

    def judge(self, now_ns: int, ahead_s: float = 0.0) -> HangFinding | None:
        """Return the present hang, if any; may be called at any interval.

        With *ahead_s* the one that there will be then, unless a rank makes progress.
        """
        self._update_time(now_ns)
        now_ns += round(ahead_s * NS)
        late = {
            rank: (silent_s - limit_s, silent_s, limit_s)
            for rank, timer in self._ranks.items()
            if self._can_judge(timer)
            and (silent_s := self._silent_s(timer, now_ns))
            > (limit_s := timer.limit_s(rank, self.limits))
        }
        if not late or self._is_excused(late, now_ns):
            return None
        lagging = self._lagging(late)
        # The rank that exceeded its limit last is the one that the others were waiting for.
        worst = min(lagging or late, key=lambda rank: late.get(rank, (0.0, 0.0, 0.0)))
        _, silent_s, limit_s = late.get(worst) or min(late.values())
        return self._finding(worst, silent_s, limit_s, lagging, now_ns)

    def present(self, now_ns: int) -> HangFinding:
        """Return the state of the ranks as a hang, which the agent of another node has noticed."""
        silences_s = self.silences_s(now_ns)
        worst = min(silences_s, key=lambda rank: silences_s[rank])
        limit_s = self._ranks[worst].limit_s(worst, self.limits)
        return self._finding(worst, silences_s[worst], limit_s, (), now_ns)

    def stopped(self, lasted_s: Mapping[int, float], limit_s: float, now_ns: int) -> HangFinding:
        """Return the hang of ranks that have been stopped for *lasted_s* seconds."""
        worst = max(lasted_s, key=lambda rank: lasted_s[rank])
        return self._finding(worst, lasted_s[worst], limit_s, tuple(sorted(lasted_s)), now_ns)

    def _finding(
        self, worst: int, silent_s: float, limit_s: float, lagging: tuple[int, ...], now_ns: int
    ) -> HangFinding:
        return HangFinding(
            phase=self._ranks[worst].doing,
            limit_s=limit_s,
            silent_s=silent_s,
            step=self._ranks[worst].step,
            lagging=lagging,
            steps=self.steps,
            silences_s=self.silences_s(now_ns),
            steps_made=self.steps_made,
            ever_stepped=self._has_ever_stepped,
        )

    def is_beatless(self, now_ns: int) -> bool:
        """Return true once, when no heartbeat came for `BEATLESS_S`: hangs cannot be judged."""
        if self._has_reported_beatless or self._expects_steps or not self._ranks:
            return False
        self._has_reported_beatless = not any(
            timer.beats for timer in self._ranks.values()
        ) and all(now_ns - timer.started_ns > BEATLESS_S * NS for timer in self._ranks.values())
        return self._has_reported_beatless

    def _update_time(self, now_ns: int) -> None:
        if now_ns - self._polled_ns > ASLEEP_S * NS:
            self._awake_ns = now_ns
        self._polled_ns = now_ns

    def _can_judge(self, timer: RankTimer) -> bool:
        """Return whether silence is significant; without any heartbeat of the job it is not."""
        if timer.phase is WorkerPhase.FINISHED:
            return False
        if timer.beats:
            return True
        # A rank may never make steps: while the others do, they do not wait for it.
        expects = self._has_ever_stepped or self._expects_steps
        return expects and not self._do_others_step()

    def _do_others_step(self) -> bool:
        return any(
            timer.steps_made
            and self._silent_s(timer, self._polled_ns) <= timer.limit_s(rank, self.limits)
            for rank, timer in self._ranks.items()
        )

    def _is_excused(self, late: Mapping[int, object], now_ns: int) -> bool:
        if now_ns < self._excused_until_ns:
            return True
        return any(
            self._is_in_long_phase(timer)
            and self._silent_s(timer, now_ns) <= timer.limit_s(rank, self.limits)
            for rank, timer in self._ranks.items()
            if rank not in late
        )

    def _is_in_long_phase(self, timer: RankTimer) -> bool:
        if timer.phase in _LABELLED:
            return True
        return not timer.steps_made and timer.phase not in {
            WorkerPhase.FINISHED,
            WorkerPhase.RAISED,
        }

    def _silent_s(self, timer: RankTimer, now_ns: int) -> float:
        return (now_ns - max(timer.beat_ns, self._awake_ns)) / NS

    def _lagging(self, late: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that are behind according to the heartbeats.

        Those without a step, else those in a labelled phase, those with the lowest step, those that
        are silent while others are not.
        """
        running = {r: w for r, w in self._ranks.items() if w.phase is not WorkerPhase.FINISHED}
        late = sorted(late)
        stepless = [rank for rank in late if not running[rank].steps_made]
        # Where the others have made more steps, they do not wait for it.
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
