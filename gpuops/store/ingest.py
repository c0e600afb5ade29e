"""Events into the store: each is kept once, and the derived tables join what it says.

Any permutation, duplication or splitting of the same lines leaves the same rows: an event is
known by its id and by its (origin, boot_id, seq), and what it adds is joined by `merge`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope
from gpuops.store.facts.kinds import TABLE_ORDER, facts_of
from gpuops.store.lines import LineError
from gpuops.store.merge import Merge, Row, write

INGEST_LOG = Merge(
    table=schema.ingest_log,
    key=("origin", "boot_id"),
    least=("origin_uid", "first_seq"),
    greatest=("last_seq",),
    total=("rows",),
)


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of a batch. ``clashing`` lines bear a number or an id of another event."""

    new: int
    already_there: int
    clashing: tuple[Envelope, ...] = ()


def ingest(connection: Connection, envelopes: Sequence[Envelope], now_us: int) -> Counts:
    """Put *envelopes* into the store, within the caller's transaction.

    Raises:
        LineError: A payload is not one of its kind (see `facts_of`); nothing is written.
        sqlalchemy.exc.SQLAlchemyError: The database refused or went away.
    """
    first = {envelope.event.id: envelope for envelope in reversed(envelopes)}
    facts = {event_id: facts_of(envelope) for event_id, envelope in first.items()}
    new_ids = _insert_events(connection, list(first.values()), now_us)
    rows: dict[int, list[Row]] = {}
    for event_id in new_ids:
        for merge, row in facts[event_id]:
            rows.setdefault(id(merge), []).append(row)
    for merge in TABLE_ORDER:
        write(connection, merge, rows.get(id(merge), []))
    write(connection, INGEST_LOG, [_log_row(first[event_id]) for event_id in new_ids])
    clashing = _clashing(connection, [e for e in envelopes if e.event.id not in new_ids])
    new = len(new_ids)
    return Counts(new, len(envelopes) - new - len(clashing), tuple(clashing))


def fitting(envelopes: Sequence[Envelope]) -> list[Envelope]:
    """Return those of *envelopes* whose payload is one of its kind."""
    good = []
    for envelope in envelopes:
        with contextlib.suppress(LineError):
            facts_of(envelope)
            good.append(envelope)
    return good


def _insert_events(
    connection: Connection, envelopes: Sequence[Envelope], now_us: int
) -> frozenset[str]:
    if not envelopes:
        return frozenset()
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(schema.events).on_conflict_do_nothing().returning(schema.events.c.id)
    rows = sorted((_event_row(envelope, now_us) for envelope in envelopes), key=lambda r: r["id"])
    return frozenset(connection.execute(statement, rows).scalars())


def _event_row(envelope: Envelope, now_us: int) -> Row:
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


def _log_row(envelope: Envelope) -> Row:
    line = envelope.line
    return {
        "origin": line.origin,
        "boot_id": line.boot_id,
        "origin_uid": envelope.uid,
        "first_seq": line.seq,
        "last_seq": line.seq,
        "rows": 1,
    }


def _clashing(connection: Connection, known: Sequence[Envelope]) -> list[Envelope]:
    if not known:
        return []
    table = schema.events.c
    wanted = [envelope.event.id for envelope in known]
    query = select(table.id, table.origin, table.boot_id, table.seq).where(table.id.in_(wanted))
    stored = {row.id: (row.origin, row.boot_id, row.seq) for row in connection.execute(query)}
    return [
        e for e in known if stored.get(e.event.id) != (e.line.origin, e.line.boot_id, e.line.seq)
    ]
