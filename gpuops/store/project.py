"""The derived tables, told once more by the events that are stored: what a new table needs."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from gpuops.store import schema
from gpuops.store.facts.envelope import Envelope
from gpuops.store.facts.kinds import facts_of
from gpuops.store.ingest import write_facts
from gpuops.store.lines import Line, LineError
from gpuops.store.queries import event_of

_BATCH = 500


def project(connection: Connection) -> None:
    """Join every stored event into the derived tables; what they hold already stays as it is."""
    for batch in _batches(connection):
        facts = []
        for envelope in batch:
            # It was stored by a release that did not read its kind.
            with contextlib.suppress(LineError):
                facts += facts_of(envelope)
        write_facts(connection, facts)


def _batches(connection: Connection) -> Iterator[Sequence[Envelope]]:
    table, last = schema.events, ""
    while True:
        query = select(table).where(table.c.id > last).order_by(table.c.id).limit(_BATCH)
        rows = connection.execute(query).mappings().all()
        if not rows:
            return
        yield [_envelope(row) for row in rows]
        last = rows[-1]["id"]


def _envelope(row: Mapping[Any, Any]) -> Envelope:
    line = Line(row["origin"], row["boot_id"], row["seq"], event_of(row), row["schema_v"])
    return Envelope(line, row["cluster"], row["origin_uid"])
