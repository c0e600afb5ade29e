"""Ingest events: each is stored once, and derived tables are updated from it.

Any permutation, duplication or splitting of the same lines results in the same rows: an event is
identified by its id and by its (origin, boot_id, seq), and its projected rows are combined by
`merge`. A line that says that nothing changed is no event: its rows alone are merged. After an
upgrade `rebuild_projections` reads the stored events again, to fill new tables.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from gpuops.store import schema
from gpuops.store.ingest.envelope import EventEnvelope, ProjectedRow
from gpuops.store.ingest.merge import MergeRule, Row, upsert
from gpuops.store.ingest.projections.registry import (
    TABLE_ORDER,
    UNSTORED_KINDS,
    project_event,
)
from gpuops.store.queries.run_queries import event_of
from gpuops.store.spool.format import SpoolLine, SpoolLineError

INGEST_LOG = MergeRule(
    table=schema.ingest_log,
    key=("origin", "boot_id"),
    least=("origin_uid", "first_seq"),
    greatest=("last_seq",),
    total=("rows",),
)


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """The result of a batch. ``conflicting`` lines have a number or an id of another event."""

    new: int
    already_there: int
    conflicting: tuple[EventEnvelope, ...] = ()


def ingest(connection: Connection, envelopes: Sequence[EventEnvelope], now_us: int) -> IngestCounts:
    """Insert *envelopes* into the store, within the caller's transaction.

    Raises:
        SpoolLineError: A payload is invalid (see `project_event`); nothing is written.
        sqlalchemy.exc.SQLAlchemyError: The database refused or went away.
    """
    unstored = [e for e in envelopes if e.event.kind in UNSTORED_KINDS]
    envelopes = [e for e in envelopes if e.event.kind not in UNSTORED_KINDS]
    first = {_line_key(envelope): envelope for envelope in reversed(envelopes)}
    unstored_rows = [row for envelope in unstored for row in project_event(envelope)]
    rows_by_line = {line_key: project_event(envelope) for line_key, envelope in first.items()}
    new = [first[line_key] for line_key in _insert_events(connection, list(first.values()), now_us)]
    stored_rows = [row for envelope in new for row in rows_by_line[_line_key(envelope)]]
    write_projected_rows(connection, [*stored_rows, *unstored_rows])
    upsert(connection, INGEST_LOG, [_log_row(envelope) for envelope in new])
    written = set(map(id, new))
    conflicting = _find_conflicting(connection, [e for e in envelopes if id(e) not in written])
    known = len(envelopes) - len(new) - len(conflicting)
    return IngestCounts(len(new) + len(unstored), known, tuple(conflicting))


def write_projected_rows(connection: Connection, projected: Iterable[ProjectedRow]) -> None:
    """Merge *projected* into the derived tables."""
    rows: dict[int, list[Row]] = {}
    for rule, row in projected:
        rows.setdefault(id(rule), []).append(row)
    for rule in TABLE_ORDER:
        upsert(connection, rule, rows.get(id(rule), []))


_LineKey = tuple[str, str, int]


def _line_key(envelope: EventEnvelope) -> _LineKey:
    line = envelope.line
    return line.origin, line.boot_id, line.seq


def valid_envelopes(envelopes: Sequence[EventEnvelope]) -> list[EventEnvelope]:
    """Return the *envelopes* with a valid payload."""
    valid = []
    for envelope in envelopes:
        with contextlib.suppress(SpoolLineError):
            project_event(envelope)
            valid.append(envelope)
    return valid


def _insert_events(
    connection: Connection, envelopes: Sequence[EventEnvelope], now_us: int
) -> list[_LineKey]:
    """Insert the new events; return their keys, in an order that is the same for all writers."""
    if not envelopes:
        return []
    table = schema.events
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    returned = (table.c.origin, table.c.boot_id, table.c.seq)
    statement = make(table).on_conflict_do_nothing().returning(*returned)
    rows = sorted((_event_row(e, now_us) for e in envelopes), key=itemgetter("id", "seq"))
    found = connection.execute(statement, rows)
    return sorted((origin, boot_id, seq) for origin, boot_id, seq in found)


def _event_row(envelope: EventEnvelope, now_us: int) -> Row:
    line, event = envelope.line, envelope.event
    return {
        "id": event.id,
        "origin": line.origin,
        "boot_id": line.boot_id,
        "seq": line.seq,
        "origin_uid": envelope.uid,
        "cluster": envelope.cluster,
        "node": event.node,
        "kind": event.kind,
        "severity": int(event.severity),
        "t_us": event.t_us,
        "run_id": event.run_id,
        "attempt": event.attempt,
        "payload": event.payload,
        "schema_v": line.version,
        "ingested_us": now_us,
    }


def _log_row(envelope: EventEnvelope) -> Row:
    line = envelope.line
    return {
        "origin": line.origin,
        "boot_id": line.boot_id,
        "origin_uid": envelope.uid,
        "first_seq": line.seq,
        "last_seq": line.seq,
        "rows": 1,
    }


def _find_conflicting(
    connection: Connection, known: Sequence[EventEnvelope]
) -> list[EventEnvelope]:
    if not known:
        return []
    table = schema.events.c
    wanted = [envelope.event.id for envelope in known]
    query = select(table.id, table.origin, table.boot_id, table.seq).where(table.id.in_(wanted))
    stored = {row.id: (row.origin, row.boot_id, row.seq) for row in connection.execute(query)}
    return [
        e for e in known if stored.get(e.event.id) != (e.line.origin, e.line.boot_id, e.line.seq)
    ]


_BATCH = 500


def rebuild_projections(connection: Connection) -> None:
    """Merge every stored event into the derived tables; existing rows do not change."""
    for batch in _batches(connection):
        projected = []
        for envelope in batch:
            # It was stored by a release that did not project its kind.
            with contextlib.suppress(SpoolLineError):
                projected += project_event(envelope)
        write_projected_rows(connection, projected)


def _batches(connection: Connection) -> Iterator[Sequence[EventEnvelope]]:
    table, last = schema.events, ""
    while True:
        query = select(table).where(table.c.id > last).order_by(table.c.id).limit(_BATCH)
        rows = connection.execute(query).mappings().all()
        if not rows:
            return
        yield [_envelope(row) for row in rows]
        last = rows[-1]["id"]


def _envelope(row: Mapping[Any, Any]) -> EventEnvelope:
    line = SpoolLine(row["origin"], row["boot_id"], row["seq"], event_of(row), row["schema_v"])
    return EventEnvelope(line, row["cluster"], row["origin_uid"])
