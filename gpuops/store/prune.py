"""Delete what is older than its retention: ``gpuops db prune``.

In steps: the keys of the next rows are read, then these rows are deleted in a transaction of their
own, and then as long as that took nothing is done, so that writers of SQLite, which take turns, get
theirs. Interrupted anywhere, the next prune goes on.

Nothing else needs what is deleted: incidents, runs, attempts, repairs and strikes are rows of their
own, and stay. After an upgrade of gpuops only younger events can be projected into new tables.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, select, tuple_

from gpuops.store import schema
from gpuops.store.burnin import measurements, pair_tests
from gpuops.store.checks import check_results, check_runs, check_samples
from gpuops.store.engine import IncidentStore
from gpuops.units import US_PER_S

STEP_ROWS = 500
_DAY_US = 86_400 * US_PER_S
_PAUSE_MIN_S = 0.02
_LOG = schema.ingest_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many days each kind of row is kept; 0: for ever. Defaults: the design's (§7)."""

    events_days: int = 400
    checks_days: int = 400
    samples_days: int = 90
    progress_days: int = 90

    @property
    def is_forever(self) -> bool:
        return not any(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True)
class _PrunedTable:
    """Rows of *table* go by *time_us*; before them those of *children*, by their first key."""

    table: Table
    time_us: str
    children: tuple[Table, ...] = ()


# By the field of `Retention` that applies to them.
_PRUNED = {
    "events_days": (
        _PrunedTable(schema.events, "t_us"),
        _PrunedTable(schema.evidence, "first_us", (schema.incident_evidence,)),
    ),
    "checks_days": (
        _PrunedTable(check_runs, "last_us", (check_results,)),
        _PrunedTable(measurements, "t_us"),
        _PrunedTable(pair_tests, "t_us"),
    ),
    "samples_days": (_PrunedTable(check_samples, "hour_us"),),
    "progress_days": (_PrunedTable(schema.progress, "minute_us"),),
}


def prune(
    store: IncidentStore,
    retention: Retention,
    now_us: int,
    *,
    pause: Callable[[float], None] = time.sleep,
    step_rows: int = STEP_ROWS,
) -> dict[str, int]:
    """Delete what is older than *retention* at *now_us*; return the deleted rows by table.

    Args:
        store: Open for writing.
        retention: What to keep.
        now_us: The time.
        pause: Is called after each step, with the seconds for which writers have the store.
        step_rows: How many rows a step deletes, besides their children.

    Raises:
        StoreUnreachableError: The store was lost or locked; the next prune goes on.
    """
    deleted: dict[str, int] = {}
    for pruned, before_us in _due(retention, now_us):
        while (rows := _prune_step(store, pruned, before_us, step_rows, pause)) is not None:
            for name, count in rows.items():
                deleted[name] = deleted.get(name, 0) + count
    if retention.events_days and (count := _prune_log(store, step_rows, pause)):
        deleted[_LOG.name] = count
    return deleted


def count_prunable(connection: Connection, retention: Retention, now_us: int) -> dict[str, int]:
    """Return how many rows `prune` would delete, by table, without their children."""
    counts = {}
    for pruned, before_us in _due(retention, now_us):
        query = select(func.count()).select_from(pruned.table)
        count = connection.scalar(query.where(_is_due(pruned, before_us)))
        if count:
            counts[pruned.table.name] = int(count)
    if retention.events_days:
        kept = schema.events.c.t_us >= now_us - retention.events_days * _DAY_US
        query = select(func.count()).select_from(_LOG).where(~_has_event(kept))
        if count := connection.scalar(query):
            counts[_LOG.name] = int(count)
    return counts


def _due(retention: Retention, now_us: int) -> list[tuple[_PrunedTable, int]]:
    return [
        (pruned, now_us - days * _DAY_US)
        for name, tables in _PRUNED.items()
        if (days := getattr(retention, name))
        for pruned in tables
    ]


def _prune_step(
    store: IncidentStore,
    pruned: _PrunedTable,
    before_us: int,
    step_rows: int,
    pause: Callable[[float], None],
) -> dict[str, int] | None:
    """Delete the next rows; return how many of which table, or None if there are none."""
    key = list(pruned.table.primary_key.columns)
    due = _is_due(pruned, before_us)
    with store.begin() as connection:
        query = select(*key).where(due).limit(step_rows)
        keys = [tuple(row) for row in connection.execute(query)]
    if not keys:
        return None
    start_s, rows = time.monotonic(), {}
    with store.begin() as connection:
        for table in pruned.children:
            # Its row may be extended since the keys were read.
            still_due = select(key[0]).where(and_(due, _is_one_of([key[0]], keys)))
            column = next(c for c in table.columns if c.references(key[0]))
            rows[table.name] = connection.execute(
                delete(table).where(column.in_(still_due))
            ).rowcount
        statement = delete(pruned.table).where(and_(due, _is_one_of(key, keys)))
        rows[pruned.table.name] = connection.execute(statement).rowcount
    pause(max(time.monotonic() - start_s, _PAUSE_MIN_S))
    return rows


def _prune_log(store: IncidentStore, step_rows: int, pause: Callable[[float], None]) -> int:
    """Delete the writers of whom no event is left; return how many.

    Then the uid of such a writer is known no more. Its runs stay their user's: one without events
    takes none (`gpuops.store.ingest.ownership`).
    """
    key, last, deleted = list(_LOG.primary_key.columns), None, 0
    while True:
        query = select(*key, _LOG.c.rows, _has_event()).order_by(*key).limit(step_rows)
        if last is not None:
            query = query.where(tuple_(*key) > tuple_(*last))
        with store.begin() as connection:
            found = [tuple(row) for row in connection.execute(query)]
        if not found:
            return deleted
        last, start_s = found[-1][:2], time.monotonic()
        # One that has written since has more rows: its event may not be visible yet.
        empty = [row[:3] for row in found if not row[3]]
        if empty:
            statement = delete(_LOG).where(_is_one_of([*key, _LOG.c.rows], empty), ~_has_event())
            with store.begin() as connection:
                deleted += connection.execute(statement).rowcount
        pause(max(time.monotonic() - start_s, _PAUSE_MIN_S))


def _has_event(among: ColumnElement[bool] | None = None) -> ColumnElement[bool]:
    event = schema.events.c
    of_writer = and_(event.origin == _LOG.c.origin, event.boot_id == _LOG.c.boot_id)
    return exists().where(of_writer if among is None else and_(of_writer, among))


def _is_due(pruned: _PrunedTable, before_us: int) -> ColumnElement[bool]:
    due: ColumnElement[bool] = pruned.table.c[pruned.time_us] < before_us
    if pruned.table is not schema.evidence:
        return due
    # A line of a log is kept once for all incidents that it is evidence of: the last one counts.
    link, incident = schema.incident_evidence.c, schema.incidents.c
    of_younger = exists().where(
        link.evidence_id == schema.evidence.c.id,
        incident.id == link.incident_id,
        incident.first_us >= before_us,
    )
    return and_(due, ~of_younger)


def _is_one_of(
    key: Sequence[ColumnElement[object]], keys: list[tuple[object, ...]]
) -> ColumnElement[bool]:
    if len(key) == 1:
        return key[0].in_([values[0] for values in keys])
    return tuple_(*key).in_(keys)
