"""Events into the store: each is kept once, and the derived tables join what it says.

Any permutation, duplication or splitting of the same lines leaves the same rows: an event is
known by its id and by its (origin, boot_id, seq), and what it adds is joined by `merge`.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope, Fact
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
    first = {_number(envelope): envelope for envelope in reversed(envelopes)}
    facts = {number: facts_of(envelope) for number, envelope in first.items()}
    new = [first[number] for number in _insert_events(connection, list(first.values()), now_us)]
    write_facts(connection, [fact for envelope in new for fact in facts[_number(envelope)]])
    write(connection, INGEST_LOG, [_log_row(envelope) for envelope in new])
    written = set(map(id, new))
    clashing = _clashing(connection, [e for e in envelopes if id(e) not in written])
    return Counts(len(new), len(envelopes) - len(new) - len(clashing), tuple(clashing))


def write_facts(connection: Connection, facts: Iterable[Fact]) -> None:
    """Join *facts* into the derived tables."""
    rows: dict[int, list[Row]] = {}
    for merge, row in facts:
        rows.setdefault(id(merge), []).append(row)
    for merge in TABLE_ORDER:
        write(connection, merge, rows.get(id(merge), []))


_Number = tuple[str, str, int]


def _number(envelope: Envelope) -> _Number:
    line = envelope.line
    return line.origin, line.boot_id, line.seq


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
) -> list[_Number]:
    """Insert the events that are not there yet; return their numbers, in one order for all."""
    if not envelopes:
        return []
    table = schema.events
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    returned = (table.c.origin, table.c.boot_id, table.c.seq)
    statement = make(table).on_conflict_do_nothing().returning(*returned)
    rows = sorted((_event_row(e, now_us) for e in envelopes), key=itemgetter("id", "seq"))
    found = connection.execute(statement, rows)
    return sorted((origin, boot_id, seq) for origin, boot_id, seq in found)


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
