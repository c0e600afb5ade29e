"""Break down the wall time of a run: every microsecond is in exactly one phase.

The share of productive time is the Effective Training Time Ratio of arXiv 2410.21680 (Revisiting
Reliability in Large-Scale Machine Learning Research Clusters), ETTR = productive / wall,
taken over the logical run with all its restarts. Here the wall time begins with the launch, so
time in a queue is not in it (``ETTR_alloc``).

A failure costs detection, the decision, the rendezvous, the start of new workers up to their first
step (`INIT`), the reading of a checkpoint (`RESTORE`) and the steps that are made again. The
incident has the time of the decision (``decide``); without it, as in older histories, all from the
detection to the first new step is `RESTART`.

Three conventions. A step that is made twice counts as productive the first time and as ``redo`` the
second, so that lost work is charged to the failure that caused it. An attempt that failed without a
step is lost entirely, as in its incident: ``init`` from the start of its workers to the failure,
``detect`` from there (all of it, without an incident). Unknown time (no step numbers, no
heartbeats, no end on record) is a separate phase.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpuops.model import ActionKind, Incident
from gpuops.store.queries.run_queries import AttemptRow, DecisionRow, ExclusionRow, RunRow
from gpuops.units import US_PER_S


class TimePhase(StrEnum):
    """What a moment of a run was spent on."""

    INIT = "init"
    PRODUCTIVE = "productive"
    DETECT = "detect"
    DECIDE = "decide"
    RENDEZVOUS = "rendezvous"
    RESTORE = "restore"
    RESTART = "restart"
    REDO = "redo"
    OTHER = "other"
    UNKNOWN = "unknown"


class AgentLiveness(StrEnum):
    """The state of the agent of a run without an end on record."""

    RUNNING = "running"
    GONE = "gone"
    UNKNOWN = "unknown"


REGROUPED = "regrouped"  # the outcome of an attempt that was ended to add nodes
# In chronological order. The init of the first attempt is not lost if it made a step.
LOST_PHASES = (
    TimePhase.DETECT,
    TimePhase.DECIDE,
    TimePhase.RENDEZVOUS,
    TimePhase.INIT,
    TimePhase.RESTORE,
    TimePhase.RESTART,
    TimePhase.REDO,
)
_LAUNCH_PHASES = (TimePhase.INIT, TimePhase.RESTORE)
_YEAR_S = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """An interval of one phase; epoch µs, the end excluded."""

    phase: TimePhase
    ordinal: int
    start_us: int
    end_us: int

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / US_PER_S


@dataclass(frozen=True, slots=True)
class _Failure:
    """When an attempt failed and this was detected, epoch µs, and its cost by its incident.

    The durations are µs; None: not reported.
    """

    failed_us: int
    detected_us: int
    decide_us: int | None = None
    rendezvous_us: int | None = None
    restore_us: int = 0
    is_restarted: bool = True

    @property
    def decided_us(self) -> int | None:
        return None if self.decide_us is None else self.detected_us + self.decide_us


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptBreakdown:
    """One attempt with the steps that it repeated.

    ``redone_steps`` is None if step numbers are unknown. ``restarted_from_scratch`` means that
    it started at or before the first step of the entire run: it loaded no checkpoint.
    """

    row: AttemptRow
    redone_steps: int | None
    restarted_from_scratch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStart:
    """What the Checkpointer of an attempt began with.

    ``why``: why it had no state to load, or not the newest one from memory; "" where it had.
    ``lost_step``: of the newest state that was lost with the process that held it in memory.
    """

    is_fresh: bool
    why: str
    lost_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBreakdown:
    """A run with its time breakdown. The spans are contiguous from ``start_us`` to ``end_us``.

    ``starts``: by attempt, what its Checkpointer began with.
    """

    run: RunRow
    attempts: tuple[AttemptBreakdown, ...]
    incidents: tuple[Incident, ...]
    start_us: int
    end_us: int
    spans: tuple[PhaseSpan, ...]
    agent: AgentLiveness = AgentLiveness.UNKNOWN
    decisions: tuple[DecisionRow, ...] = ()
    exclusions: tuple[ExclusionRow, ...] = ()
    starts: Mapping[int, CheckpointStart] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        """Return the seconds from the launch to the end, or to the last event of a live run."""
        return (self.end_us - self.start_us) / US_PER_S

    @property
    def seconds(self) -> dict[TimePhase, float]:
        """Return the seconds of each phase; their sum is the wall time."""
        return {
            phase: sum(s.end_us - s.start_us for s in self.spans if s.phase is phase) / US_PER_S
            for phase in TimePhase
        }

    @property
    def lost(self) -> dict[TimePhase, float]:
        """Return the seconds lost to failures, by phase, without the launch."""
        spans = [span for span in self.spans if not self._is_launch(span)]
        return {
            phase: sum(s.end_us - s.start_us for s in spans if s.phase is phase) / US_PER_S
            for phase in LOST_PHASES
        }

    def _is_launch(self, span: PhaseSpan) -> bool:
        """Return whether *span* is before the first step of the run's first attempt.

        Without a step, only the time before its workers started is the launch.
        """
        first = self.attempts[0].row if self.attempts else None
        if span.phase not in _LAUNCH_PHASES or first is None or span.ordinal != first.ordinal:
            return False
        has_stepped = first.first_step_us is not None
        return has_stepped or first.start_us is None or span.start_us < first.start_us

    @property
    def lost_s(self) -> float:
        """Return the seconds lost to failures, up to the last repeated step."""
        return sum(self.lost.values())

    @property
    def ettr_alloc(self) -> float | None:
        """Return productive / wall, None if the wall time is zero; unknown time counts as lost."""
        return self.seconds[TimePhase.PRODUCTIVE] / self.wall_s if self.wall_s > 0 else None

    @property
    def ettr_alloc_max(self) -> float | None:
        """Return the same as if all unknown time had been productive."""
        if self.wall_s <= 0:
            return None
        return (self.seconds[TimePhase.PRODUCTIVE] + self.seconds[TimePhase.UNKNOWN]) / self.wall_s

    @property
    def redone_steps(self) -> int | None:
        """Return the steps made more than once, None if those of an attempt are unknown."""
        counts = [attempt.redone_steps for attempt in self.attempts]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def is_live(self) -> bool:
        """Return whether the run has no end on record; its agent may be gone nevertheless."""
        return self.run.ended_us is None

    @property
    def has_failed(self) -> bool:
        """Return whether the run or one of its attempts failed, as far as recorded.

        An incident without an attempt ended none, as a state that is damaged on disk.
        """
        outcomes = [self.run.outcome, *(attempt.row.outcome for attempt in self.attempts)]
        ended_one = (each for each in self.incidents if each.attempt is not None)
        return "failed" in outcomes or any(map(_is_failure, ended_one))


def break_down_run(
    run: RunRow,
    attempts: Sequence[AttemptRow],
    incidents: Sequence[Incident],
    *,
    last_event_us: int | None = None,
    agent: AgentLiveness = AgentLiveness.UNKNOWN,
) -> RunBreakdown:
    """Return the time breakdown of *run*.

    Args:
        run: The run.
        attempts: Its attempts, in any order.
        incidents: Its incidents, in any order; they date the decision to restart.
        last_event_us: The time of its newest event: the end of a run without an end on record.
        agent: The state of its agent, for a run without an end.
    """
    rows = sorted(attempts, key=lambda row: row.ordinal)
    start_us, end_us = _time_range(run, rows, incidents, last_event_us)
    spans = _spans(run, rows, _failures(incidents), start_us, end_us)
    assert sum(span.end_us - span.start_us for span in spans) == end_us - start_us
    return RunBreakdown(
        run=run,
        attempts=tuple(_attempt_breakdown(rows, index) for index in range(len(rows))),
        incidents=tuple(sorted(incidents, key=lambda item: (item.first_us, item.id))),
        start_us=start_us,
        end_us=end_us,
        spans=spans,
        agent=agent,
    )


def _time_range(
    run: RunRow,
    rows: Sequence[AttemptRow],
    incidents: Sequence[Incident],
    last_event_us: int | None,
) -> tuple[int, int]:
    starts = [run.created_us, *(row.start_us for row in rows if row.start_us is not None)]
    start_us = min(starts)
    if run.ended_us is not None:
        return start_us, max(run.ended_us, start_us)
    times = [time for row in rows for time in _known_times(row)]
    times += [incident.detected_us for incident in incidents]
    return start_us, max([start_us, *times, last_event_us or start_us])


def _known_times(row: AttemptRow) -> list[int]:
    times = (row.start_us, row.first_step_us, row.redo_done_us, row.last_step_us, row.end_us)
    return [time for time in times if time is not None]


def _is_failure(incident: Incident) -> bool:
    return not incident.failure_class.is_request or bool(incident.culprits)


def _failures(incidents: Sequence[Incident]) -> dict[int, _Failure]:
    """Return the failure of each attempt, by the incident that was detected first.

    One about a node that did not join ended no attempt, and counts only where there is no other.
    """
    found: dict[int, _Failure] = {}
    ordered = sorted(incidents, key=lambda each: (each.about is not None, each.detected_us))
    for incident in filter(_is_failure, ordered):
        if incident.attempt is not None and incident.attempt not in found:
            found[incident.attempt] = _Failure(
                failed_us=incident.first_us,
                detected_us=incident.detected_us,
                decide_us=_lost_us(incident, "decide"),
                rendezvous_us=_lost_us(incident, "rendezvous"),
                restore_us=_lost_us(incident, "restore") or 0,
                is_restarted=ActionKind.RESTART in incident.actions,
            )
    return found


def _lost_us(incident: Incident, phase: str) -> int | None:
    seconds = incident.lost_s.get(phase)
    # Limits a recorded value to a range from 0 to a year.
    return None if seconds is None else round(min(max(seconds, 0.0), _YEAR_S) * US_PER_S)


def _spans(
    run: RunRow,
    rows: Sequence[AttemptRow],
    failures: Mapping[int, _Failure],
    start_us: int,
    end_us: int,
) -> tuple[PhaseSpan, ...]:
    """Return contiguous spans, whatever order or gaps the recorded times have."""
    spans: list[PhaseSpan] = []
    cursor = start_us
    for phase, ordinal, until in [
        *_boundaries(rows, failures),
        *_trailing_boundary(run, rows, failures, end_us),
    ]:
        until_us = min(max(until, cursor), end_us)
        if until_us > cursor:
            spans.append(PhaseSpan(phase, ordinal, cursor, until_us))
            cursor = until_us
    return tuple(spans)


def _trailing_boundary(
    run: RunRow, rows: Sequence[AttemptRow], failures: Mapping[int, _Failure], end_us: int
) -> list[tuple[TimePhase, int, int]]:
    """Return the phase after the last attempt."""
    if not rows:
        return [(TimePhase.OTHER, 0, end_us)]
    last = rows[-1]
    failure = failures.get(last.ordinal)
    if last.outcome == "failed" and run.outcome in ("cancelled", None):
        phase = TimePhase.RESTART
        if failure is not None and failure.decided_us is not None:
            is_coming = failure.is_restarted and failure.rendezvous_us is None
            phase = TimePhase.RENDEZVOUS if is_coming else TimePhase.OTHER
    elif last.end_us is None and run.outcome is None:
        phase = TimePhase.UNKNOWN
    else:
        phase = TimePhase.OTHER
    return [(phase, last.ordinal, end_us)]


def _boundaries(
    rows: Sequence[AttemptRow], failures: Mapping[int, _Failure]
) -> list[tuple[TimePhase, int, int]]:
    """Return (phase, attempt, end µs) in chronological order."""
    steps_are_seen = any(row.first_step_us is not None for row in rows)
    boundaries: list[tuple[TimePhase, int, int]] = []
    for index, row in enumerate(rows):
        failure = failures.get(row.ordinal)
        previous_failure = failures.get(rows[index - 1].ordinal) if index else None
        found = _progress_boundaries(rows, index, previous_failure)
        found += _failure_boundary(
            rows, index, failure, previous_failure, steps_are_seen=steps_are_seen
        )
        if failure is not None and failure.decided_us is not None:
            found.append((TimePhase.DECIDE, failure.decided_us))
            if index + 1 == len(rows) and failure.rendezvous_us is not None:
                found.append((TimePhase.RENDEZVOUS, failure.decided_us + failure.rendezvous_us))
        boundaries += [(phase, row.ordinal, until) for phase, until in found]
    return boundaries


def _failure_boundary(
    rows: Sequence[AttemptRow],
    index: int,
    failure: _Failure | None,
    previous_failure: _Failure | None,
    *,
    steps_are_seen: bool,
) -> list[tuple[TimePhase, int]]:
    """Return the phases from the last progress of an attempt to its end."""
    row = rows[index]
    has_failed = row.outcome == "failed" or failure is not None or index + 1 < len(rows)
    stop_us = row.end_us if failure is None else failure.detected_us
    if stop_us is None or not (has_failed or row.first_step_us is None):
        return []
    if has_failed:
        phase = TimePhase.DETECT
        if row.outcome == REGROUPED and failure is None:
            phase = TimePhase.RESTART
        elif row.start_us is None and row.first_step_us is None and row.end_us is None:
            phase = _phase_before_start(index, previous_failure)  # it never started
        elif failure is not None and row.start_us is not None and row.first_step_us is None:
            return [(TimePhase.INIT, min(failure.failed_us, stop_us)), (phase, stop_us)]
    else:
        phase = (
            _phase_before_first_step(index, previous_failure)
            if steps_are_seen
            else TimePhase.UNKNOWN
        )
    return [(phase, stop_us)]


def _progress_boundaries(
    rows: Sequence[AttemptRow], index: int, previous_failure: _Failure | None
) -> list[tuple[TimePhase, int]]:
    row = rows[index]
    found = []
    if row.start_us is not None:
        found.append((_phase_before_start(index, previous_failure), row.start_us))
    if row.first_step_us is None:
        return found
    restore_us = 0 if previous_failure is None else previous_failure.restore_us
    found.append(
        (_phase_before_first_step(index, previous_failure), row.first_step_us - restore_us)
    )
    if restore_us:
        found.append((TimePhase.RESTORE, row.first_step_us))
    last_us = row.last_step_us if row.last_step_us is not None else row.first_step_us
    return [*found, *_step_boundaries(rows, index, last_us)]


def _phase_before_start(index: int, previous_failure: _Failure | None) -> TimePhase:
    """Return the phase before an attempt's workers were started."""
    if index == 0:
        return TimePhase.INIT
    is_known = previous_failure is not None and previous_failure.decided_us is not None
    return TimePhase.RENDEZVOUS if is_known else TimePhase.RESTART


def _phase_before_first_step(index: int, previous_failure: _Failure | None) -> TimePhase:
    is_known = index == 0 or (
        previous_failure is not None and previous_failure.decided_us is not None
    )
    return TimePhase.INIT if is_known else TimePhase.RESTART


def _step_boundaries(
    rows: Sequence[AttemptRow], index: int, last_us: int
) -> list[tuple[TimePhase, int]]:
    row = rows[index]
    earlier = rows[:index]
    if not any(other.first_step_us is not None for other in earlier):
        return [(TimePhase.PRODUCTIVE, last_us)]
    if row.redo_done_us is not None:
        return [(TimePhase.REDO, min(row.redo_done_us, last_us)), (TimePhase.PRODUCTIVE, last_us)]
    highest = _highest_step(earlier)
    if highest is None or row.steps_first is None or row.steps_last is None:
        return [(TimePhase.UNKNOWN, last_us)]
    if row.steps_first > highest:
        return [(TimePhase.PRODUCTIVE, last_us)]
    if row.steps_last <= highest:
        return [(TimePhase.REDO, last_us)]
    return [(TimePhase.UNKNOWN, last_us)]


def _highest_step(rows: Sequence[AttemptRow]) -> int | None:
    """Return the highest step of *rows*, None if one that stepped has no step number."""
    stepped = [row for row in rows if row.first_step_us is not None]
    steps = [row.steps_last for row in stepped if row.steps_last is not None]
    return max(steps) if steps and len(steps) == len(stepped) else None


def _attempt_breakdown(rows: Sequence[AttemptRow], index: int) -> AttemptBreakdown:
    row, earlier = rows[index], [r for r in rows[:index] if r.first_step_us is not None]
    if row.first_step_us is None or not earlier:
        return AttemptBreakdown(row=row, redone_steps=0, restarted_from_scratch=False)
    highest = _highest_step(earlier)
    if highest is None or row.steps_first is None or row.steps_last is None:
        return AttemptBreakdown(row=row, redone_steps=None, restarted_from_scratch=False)
    redone = max(0, min(row.steps_last, highest) - row.steps_first + 1)
    first = min((r.steps_first for r in earlier if r.steps_first is not None), default=None)
    restarted_from_scratch = redone > 0 and first is not None and row.steps_first <= first
    return AttemptBreakdown(
        row=row, redone_steps=redone, restarted_from_scratch=restarted_from_scratch
    )
