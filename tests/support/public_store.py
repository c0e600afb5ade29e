"""The incident store and the spool, as SQL queries and other hosts' gpuops rely on them."""

from sqlalchemy import Index, PrimaryKeyConstraint, UniqueConstraint
from sqlalchemy.dialects import postgresql, sqlite

from gpuops.model import Event, Severity
from gpuops.store.schema import REVISION, metadata
from gpuops.store.spool.format import LINE_BYTES_MAX, SpoolLine, encode_line

DIALECTS = (sqlite.dialect(), postgresql.dialect())


def tables():
    """Return every table: its columns as SQLite and Postgres have them, keys and indexes."""
    return {
        "revision": REVISION,
        "tables": {
            table.name: {
                "columns": {column.name: _column(column) for column in table.columns},
                "constraints": sorted(map(_constraint, table.constraints)),
                "indexes": {index.name: _indexed(index) for index in table.indexes},
            }
            for table in metadata.sorted_tables
        },
    }


def _column(column):
    types = dict.fromkeys(column.type.compile(dialect=dialect) for dialect in DIALECTS)
    words = [" / ".join(types), "null" if column.nullable else "not null"]
    return ", ".join([*words, *(f"to {key.target_fullname}" for key in column.foreign_keys)])


def _constraint(constraint):
    columns = ", ".join(column.name for column in constraint.columns)
    kinds = {PrimaryKeyConstraint: "primary key", UniqueConstraint: "unique"}
    return f"{kinds.get(type(constraint), 'foreign key')}: {columns} ({constraint.name})"


def _indexed(index: Index):
    columns = ", ".join(column.name for column in index.columns)
    return f"{'unique: ' if index.unique else ''}{columns}"


def spool_line():
    """Return one line of a spool, and how long the longest may be."""
    event = Event(
        id="0190f6a0-0000-7000-8000-0000abcd1234",
        kind="attempt.ended",
        t_us=1_700_000_000_000_000,
        node="n1",
        severity=Severity.ERROR,
        run_id="0190f6a0-0000-7000-8000-0000abcd1235",
        attempt=1,
        payload={"outcome": "failed", "exit_code": 1, "text": "grün"},
    )
    line = encode_line(SpoolLine("n1.0123456789ab", "b", 7, event))
    return {"line": line.decode("ascii"), "longest": LINE_BYTES_MAX}
