"""The derived tables, told once more by the events that are stored: what a new table needs."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select

from gpuops.store import schema
from gpuops.store.ingest.batch import write_projected_rows
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.ingest.projections.registry import project_event
from gpuops.store.queries.run_queries import event_of
from gpuops.store.spool.format import SpoolLine, SpoolLineError

_BATCH = 500


def rebuild_projections(connection: Connection) -> None:
    """Join every stored event into the derived tables; what they hold already stays as it is."""
    for batch in _batches(connection):
        projected = []
        for envelope in batch:
            # It was stored by a release that did not read its kind.
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
