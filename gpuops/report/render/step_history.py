"""How long the steps of a run took over time, with what was detected, as text and as JSON."""

from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import groupby
from statistics import median

from gpuops.model import Incident, Json
from gpuops.report.render.incident_text import confidence_text
from gpuops.report.render.layout import count_noun, date_time, one_line, short_id, time_of_day
from gpuops.store.queries.run_queries import ProgressRow, RunRow
from gpuops.units import US_PER_S, format_step, iso_utc

ROWS_MAX = 40  # of each attempt
_BAR_CHARS = 30


def history_text(
    run: RunRow, minutes: Sequence[ProgressRow], incidents: Sequence[Incident]
) -> list[str]:
    """Return the lines of *run*: its step time by time, and each incident where it was detected."""
    head = f"run {one_line(run.name)} ({short_id(run.id)}) from {date_time(run.created_us)}"
    middle = f"{_text(_middle_us(minutes))} a step in the median" if minutes else "no step times"
    lines = [f"{head}: {middle}, {count_noun(len(minutes), 'minute')} with steps on record"]
    if minutes:
        lines.append(f"{'time':<9}{'attempt':>7}  {'to step':>9}  {'median':>8}  {'longest':>8}")
    longest_us = max((row.step_time_p50_us for row in minutes), default=0)
    steps = ((rows[0].minute_us, _step_line(rows, longest_us)) for rows in _parts(minutes))
    found = ((item.detected_us, _incident_line(item)) for item in reversed(incidents))
    return [*lines, *(line for _, line in merge(steps, sorted(found)))]


def history_json(
    run: RunRow, minutes: Iterable[ProgressRow], incidents: Iterable[Incident]
) -> Json:
    """Return the same as the body of ``gpuops detect show --json``."""
    rows = [
        {
            "attempt": row.ordinal,
            "start": iso_utc(row.minute_us),
            "step": row.step_last,
            "step_seconds": row.step_time_p50_us / US_PER_S,
            "step_seconds_max": row.step_time_max_us / US_PER_S,
        }
        for row in minutes
    ]
    found = [item.to_json() for item in incidents]
    return {"run": run.id, "name": run.name, "minutes": rows, "incidents": found}


def _parts(minutes: Sequence[ProgressRow]) -> Iterable[Sequence[ProgressRow]]:
    """Divide the minutes of each attempt into at most `ROWS_MAX` parts."""
    for _, rows in groupby(minutes, key=lambda row: row.ordinal):
        attempt = [*rows]
        size = -(-len(attempt) // ROWS_MAX)
        yield from (attempt[start : start + size] for start in range(0, len(attempt), size))


def _step_line(rows: Sequence[ProgressRow], longest_us: int) -> str:
    middle_us, step = _middle_us(rows), rows[-1].step_last
    most_us = max(row.step_time_max_us for row in rows)
    return (
        f"{time_of_day(rows[0].minute_us):<9}{rows[0].ordinal:>7}  "
        f"{'-' if step is None else step:>9}  {_text(middle_us):>8}  {_text(most_us):>8}  "
        + "#"
        * max(1, round(_BAR_CHARS * middle_us / max(longest_us, 1)))
    )


def _incident_line(item: Incident) -> str:
    what = f"{item.failure_class.value}: {one_line(item.title)} ({confidence_text(item)})"
    return f"{time_of_day(item.detected_us):<9}{short_id(item.id)}  {what}"


def _middle_us(rows: Iterable[ProgressRow]) -> float:
    return median(row.step_time_p50_us for row in rows)


def _text(step_us: float) -> str:
    return format_step(step_us / US_PER_S)
