"""Merge the reports of several writers into one row, in any order of arrival.

A `MergeRule` declares for each column of a derived table how two values are merged; every way is
commutative, associative and, but for sums, idempotent. It is implemented twice: in Python for the
rows of one batch, and in SQL (``ON CONFLICT DO UPDATE``) against the stored row, so that concurrent
writers cannot lose each other's values.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, case, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.base import ReadOnlyColumnCollection

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """How rows of *table* with equal *key* columns are merged.

    Attributes:
        table: The derived table.
        least: Columns that keep the smallest known value.
        greatest: Columns that keep the greatest known value.
        best: For each ``*_key`` column, the columns that are taken from the row with its greatest
            value.
        total: Columns that are summed: only for rows of events never counted before.

    Columns not named here are determined by the key: equal in every row.
    """

    table: Table
    key: tuple[str, ...]
    least: tuple[str, ...] = ()
    greatest: tuple[str, ...] = ()
    best: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    total: tuple[str, ...] = ()

    @property
    def is_updating(self) -> bool:
        """Return whether a second row can change the first."""
        return bool(self.least or self.greatest or self.best or self.total)


def merge_rows(rule: MergeRule, rows: Iterable[Row]) -> list[Row]:
    """Return *rows* merged to one for each key, with all columns, sorted by key.

    The order is the same for every writer, so that two of them cannot deadlock.
    """
    merged: dict[tuple[Any, ...], Row] = {}
    names = [column.name for column in rule.table.columns]
    for row in rows:
        full = {name: row.get(name) for name in names}
        key = tuple(row[name] for name in rule.key)
        merged[key] = _merge_rows_of_key(rule, merged[key], full) if key in merged else full
    return [merged[key] for key in sorted(merged)]


def _merge_rows_of_key(rule: MergeRule, old: Row, new: Row) -> Row:
    row = dict(old)
    for name in rule.least:
        row[name] = _choose_known(min, old[name], new[name])
    for name in rule.greatest:
        row[name] = _choose_known(max, old[name], new[name])
    for order, names in rule.best.items():
        if new[order] is not None and (old[order] is None or new[order] > old[order]):
            row.update({name: new[name] for name in (order, *names)})
    for name in rule.total:
        row[name] = old[name] + new[name]
    return row


def _choose_known(pick: Any, old: Any, new: Any) -> Any:  # noqa: ANN401 any comparable column
    if old is None or new is None:
        return new if old is None else old
    return pick(old, new)


def upsert(connection: Connection, rule: MergeRule, rows: Sequence[Row]) -> None:
    """Merge *rows* into the stored table."""
    merged = merge_rows(rule, rows)
    if not merged:
        return
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(rule.table)
    if rule.is_updating:
        assigned = _assignments(rule, statement.excluded)
        old = rule.table.c
        statement = statement.on_conflict_do_update(
            index_elements=list(rule.key),
            set_=assigned,
            # Rewriting an unchanged row would cost a dead row and a lock.
            where=or_(*(old[name].is_distinct_from(new) for name, new in assigned.items())),
        )
    else:
        statement = statement.on_conflict_do_nothing()
    connection.execute(statement, merged)


def _assignments(
    rule: MergeRule, new: ReadOnlyColumnCollection[str, Any]
) -> dict[str, ColumnElement[Any]]:
    old = rule.table.c
    values: dict[str, ColumnElement[Any]] = {}
    for name in rule.least:
        values[name] = _pick(old[name], new[name], new[name] < old[name])
    for name in rule.greatest:
        values[name] = _pick(old[name], new[name], new[name] > old[name])
    for order, names in rule.best.items():
        better = and_(new[order].is_not(None), or_(old[order].is_(None), new[order] > old[order]))
        for name in (order, *names):
            values[name] = case((better, new[name]), else_=old[name])
    for name in rule.total:
        values[name] = old[name] + new[name]
    return values


def _pick(
    old: ColumnElement[Any], new: ColumnElement[Any], better: ColumnElement[bool]
) -> ColumnElement[Any]:
    return case((or_(old.is_(None), better), new), else_=old)
