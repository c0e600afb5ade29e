"""Where the wall time of a run went: every microsecond in exactly one phase.

The share of productive time is the Effective Training Time Ratio of arXiv 2410.21680 (Revisiting
Reliability in Large-Scale Machine Learning Research Clusters), ETTR = productive / wall,
taken over the logical run with all its restarts. Here the wall time begins with the launch, so
time in a queue is not in it (``ETTR_alloc``).

Three decisions of ours. A step that is made twice counts as productive the first time and as
``redo`` the second, so that lost work is charged to the failure that caused it. An attempt that
failed without a step is lost as a whole: its start is the last progress there was, so all of it is
``detect``, as in its incident. And what cannot be known (no step numbers, no heartbeats, no end on
record) is a phase of its own, never folded into another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuops.model import FailureClass, Incident
from gpuops.store.queries import AttemptRow, RunRow
from gpuops.units import US_PER_S


class Phase(StrEnum):
    """What a moment of a run was spent on."""

    INIT = "init"
    PRODUCTIVE = "productive"
    DETECT = "detect"
    RESTART = "restart"
    REDO = "redo"
    OTHER = "other"
    UNKNOWN = "unknown"


class Agent(StrEnum):
    """What has become of the agent of a run without an end on record."""

    RUNNING = "running"
    GONE = "gone"
    UNKNOWN = "unknown"


LOST = (Phase.DETECT, Phase.RESTART, Phase.REDO)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one phase; epoch µs, the end excluded."""

    phase: Phase
    ordinal: int
    start_us: int
    end_us: int

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / US_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAccount:
    """One attempt with what it redid.

    ``redone_steps`` is None where step numbers are unknown. ``began_again`` means that it started
    at or before the first step of the whole run: it loaded no checkpoint.
    """

    row: AttemptRow
    redone_steps: int | None
    began_again: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """A run, accounted. The spans lie end to end from ``start_us`` to ``end_us``."""

    run: RunRow
    attempts: tuple[AttemptAccount, ...]
    incidents: tuple[Incident, ...]
    start_us: int
    end_us: int
    spans: tuple[Span, ...]
    agent: Agent = Agent.UNKNOWN

    @property
    def wall_s(self) -> float:
        """Return the seconds from the launch to the end, or to the last news of a live run."""
        return (self.end_us - self.start_us) / US_PER_S

    @property
    def seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase; their sum is the wall time."""
        return {
            phase: sum(s.end_us - s.start_us for s in self.spans if s.phase is phase) / US_PER_S
            for phase in Phase
        }

    @property
    def lost_s(self) -> float:
        """Return the seconds that failures took: detection, restart and repeated steps."""
        return sum(self.seconds[phase] for phase in LOST)

    @property
    def ettr_alloc(self) -> float | None:
        """Return productive / wall, None for a run of no length; unknown time counts as lost."""
        return self.seconds[Phase.PRODUCTIVE] / self.wall_s if self.wall_s > 0 else None

    @property
    def ettr_alloc_max(self) -> float | None:
        """Return the same as if all unknown time had been productive."""
        if self.wall_s <= 0:
            return None
        return (self.seconds[Phase.PRODUCTIVE] + self.seconds[Phase.UNKNOWN]) / self.wall_s

    @property
    def redone_steps(self) -> int | None:
        """Return the steps made more than once, None where an attempt's are not known."""
        counts = [attempt.redone_steps for attempt in self.attempts]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def is_live(self) -> bool:
        """Say whether the run has no end on record; its agent may be gone all the same."""
        return self.run.ended_us is None

    @property
    def has_failed(self) -> bool:
        """Say whether the run or an attempt of it failed, as far as is on record."""
        outcomes = [self.run.outcome, *(attempt.row.outcome for attempt in self.attempts)]
        return "failed" in outcomes or any(map(_is_failure, self.incidents))


def account(
    run: RunRow,
    attempts: Sequence[AttemptRow],
    incidents: Sequence[Incident],
    *,
    last_event_us: int | None = None,
    agent: Agent = Agent.UNKNOWN,
) -> RunAccount:
    """Return where the time of *run* went.

    Args:
        run: The run.
        attempts: Its attempts, in any order.
        incidents: Its incidents, in any order; they date the decision to restart.
        last_event_us: The time of its newest event, where a run without an end is counted to.
        agent: What is known of its agent, for a run without an end.
    """
    rows = sorted(attempts, key=lambda row: row.ordinal)
    start_us, end_us = _extent(run, rows, incidents, last_event_us)
    spans = _spans(run, rows, _decisions(incidents), start_us, end_us)
    assert sum(span.end_us - span.start_us for span in spans) == end_us - start_us
    return RunAccount(
        run=run,
        attempts=tuple(_attempt(rows, index) for index in range(len(rows))),
        incidents=tuple(sorted(incidents, key=lambda item: (item.first_us, item.id))),
        start_us=start_us,
        end_us=end_us,
        spans=spans,
        agent=agent,
    )


def _extent(
    run: RunRow,
    rows: Sequence[AttemptRow],
    incidents: Sequence[Incident],
    last_event_us: int | None,
) -> tuple[int, int]:
    starts = [run.created_us, *(row.start_us for row in rows if row.start_us is not None)]
    start_us = min(starts)
    if run.ended_us is not None:
        return start_us, max(run.ended_us, start_us)
    told = [time for row in rows for time in _times(row)]
    told += [incident.detected_us for incident in incidents]
    return start_us, max([start_us, *told, last_event_us or start_us])


def _times(row: AttemptRow) -> list[int]:
    times = (row.start_us, row.first_step_us, row.redo_done_us, row.last_step_us, row.end_us)
    return [time for time in times if time is not None]


def _is_failure(incident: Incident) -> bool:
    return incident.failure_class is not FailureClass.CANCELLED or bool(incident.culprits)


def _decisions(incidents: Sequence[Incident]) -> dict[int, int]:
    """Return when the failure of each attempt was decided on, the earliest account of it."""
    found: dict[int, int] = {}
    for incident in filter(_is_failure, incidents):
        if incident.attempt is not None:
            known = found.get(incident.attempt, incident.detected_us)
            found[incident.attempt] = min(known, incident.detected_us)
    return found


def _spans(
    run: RunRow,
    rows: Sequence[AttemptRow],
    decisions: Mapping[int, int],
    start_us: int,
    end_us: int,
) -> tuple[Span, ...]:
    """Return spans that lie end to end, whatever order or gaps the recorded times have."""
    spans: list[Span] = []
    cursor = start_us
    for phase, ordinal, until in [*_marks(rows, decisions), *_rest(run, rows, end_us)]:
        until_us = min(max(until, cursor), end_us)
        if until_us > cursor:
            spans.append(Span(phase, ordinal, cursor, until_us))
            cursor = until_us
    return tuple(spans)


def _rest(run: RunRow, rows: Sequence[AttemptRow], end_us: int) -> list[tuple[Phase, int, int]]:
    """Return what comes after all that the attempts tell of."""
    if not rows:
        return [(Phase.OTHER, 0, end_us)]
    last = rows[-1]
    if last.outcome == "failed" and run.outcome in ("cancelled", None):
        phase = Phase.RESTART
    elif last.end_us is None and run.outcome is None:
        phase = Phase.UNKNOWN
    else:
        phase = Phase.OTHER
    return [(phase, last.ordinal, end_us)]


def _marks(
    rows: Sequence[AttemptRow], decisions: Mapping[int, int]
) -> list[tuple[Phase, int, int]]:
    """Return (phase, attempt, until when), in the order in which they follow each other."""
    steps_are_seen = any(row.first_step_us is not None for row in rows)
    marks: list[tuple[Phase, int, int]] = []
    for index, row in enumerate(rows):
        has_failed = row.outcome == "failed" or index + 1 < len(rows) or row.ordinal in decisions
        stop_us = decisions.get(row.ordinal, row.end_us) if has_failed else row.end_us
        found = _up_to_last_progress(rows, index)
        if stop_us is not None and (has_failed or row.first_step_us is None):
            phase = Phase.DETECT if has_failed else _stepless(index, steps_are_seen=steps_are_seen)
            found.append((phase, stop_us))
        marks += [(phase, row.ordinal, until) for phase, until in found]
    return marks


def _up_to_last_progress(rows: Sequence[AttemptRow], index: int) -> list[tuple[Phase, int]]:
    row, before = rows[index], _before_first_step(index)
    if row.first_step_us is None:
        return [(before, row.start_us)] if row.start_us is not None else []
    last_us = row.last_step_us if row.last_step_us is not None else row.first_step_us
    return [(before, row.first_step_us), *_stepping(rows, index, last_us)]


def _before_first_step(index: int) -> Phase:
    return Phase.INIT if index == 0 else Phase.RESTART


def _stepless(index: int, *, steps_are_seen: bool) -> Phase:
    """Return what an attempt without a step that did not fail spent its time on.

    Where no attempt ever showed a step, its training is invisible to us, not absent.
    """
    return _before_first_step(index) if steps_are_seen else Phase.UNKNOWN


def _stepping(rows: Sequence[AttemptRow], index: int, last_us: int) -> list[tuple[Phase, int]]:
    row = rows[index]
    earlier = rows[:index]
    if not any(other.first_step_us is not None for other in earlier):
        return [(Phase.PRODUCTIVE, last_us)]
    if row.redo_done_us is not None:
        return [(Phase.REDO, min(row.redo_done_us, last_us)), (Phase.PRODUCTIVE, last_us)]
    highest = _highest(earlier)
    if highest is None or row.steps_first is None or row.steps_last is None:
        return [(Phase.UNKNOWN, last_us)]
    if row.steps_first > highest:
        return [(Phase.PRODUCTIVE, last_us)]
    if row.steps_last <= highest:
        return [(Phase.REDO, last_us)]
    return [(Phase.UNKNOWN, last_us)]


def _highest(rows: Sequence[AttemptRow]) -> int | None:
    """Return the highest step that *rows* reached, None where one that stepped does not say."""
    stepped = [row for row in rows if row.first_step_us is not None]
    steps = [row.steps_last for row in stepped if row.steps_last is not None]
    return max(steps) if steps and len(steps) == len(stepped) else None


def _attempt(rows: Sequence[AttemptRow], index: int) -> AttemptAccount:
    row, earlier = rows[index], [r for r in rows[:index] if r.first_step_us is not None]
    if row.first_step_us is None or not earlier:
        return AttemptAccount(row=row, redone_steps=0, began_again=False)
    highest = _highest(earlier)
    if highest is None or row.steps_first is None or row.steps_last is None:
        return AttemptAccount(row=row, redone_steps=None, began_again=False)
    redone = max(0, min(row.steps_last, highest) - row.steps_first + 1)
    first = min((r.steps_first for r in earlier if r.steps_first is not None), default=None)
    began_again = redone > 0 and first is not None and row.steps_first <= first
    return AttemptAccount(row=row, redone_steps=redone, began_again=began_again)
