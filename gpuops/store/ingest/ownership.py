"""Whose runs the events of a user are about: those of a run belong to the user of its first one.

A run's id is random, so that no other user can know it before its first event is stored. Asked in
the transaction that ingests, under locks: two nodes may forward at once.
"""

import zlib
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, select, text

from gpuops.store import schema
from gpuops.store.ingest.envelope import EventEnvelope

# One lock for each run would let one batch exhaust the lock table of Postgres.
_LOCKS = 64
_LOCK_CLASS = 0x67706F77  # an arbitrary constant that all versions of gpuops share


def find_foreign(connection: Connection, envelopes: Sequence[EventEnvelope]) -> dict[int, str]:
    """Return why some of *envelopes*, each about a run, are not their user's; by their `id`."""
    runs = {envelope.event.run_id or "" for envelope in envelopes}
    origins = {envelope.line.origin for envelope in envelopes}
    _lock(connection, [*runs, *origins])
    owners = {run_id: _owner_of_run(connection, run_id) for run_id in runs}
    known = _known_runs(connection, [run_id for run_id in runs if owners[run_id] is None])
    writers = _writers(connection, origins)
    foreign = {}
    for envelope in envelopes:
        run_id, uid = envelope.event.run_id or "", envelope.uid
        owner = owners[run_id]
        if owner is None and run_id in known:
            foreign[id(envelope)] = "its run's events, which say whose it is, were pruned"
        elif owner is not None and owner != (envelope.cluster, uid):
            foreign[id(envelope)] = f"its run is that of uid {owner[1]} of {owner[0]}, not {uid}"
        elif writers.get(envelope.line.origin, {uid}) != {uid}:
            foreign[id(envelope)] = f"its origin {envelope.line.origin} is another user's"
    return foreign


def _lock(connection: Connection, names: Iterable[str]) -> None:
    """Serialize the questions about *names*; SQLite's writers are serialized anyway."""
    if connection.dialect.name != "postgresql":
        return
    # In one order for all writers, so that they cannot deadlock.
    for number in sorted({zlib.crc32(name.encode()) % _LOCKS for name in names}):
        connection.execute(
            text("SELECT pg_advisory_xact_lock(:noun, :number)"),
            {"noun": _LOCK_CLASS, "number": number},
        )


def _owner_of_run(connection: Connection, run_id: str) -> tuple[str, int] | None:
    table = schema.events.c
    query = select(table.cluster, table.origin_uid).where(table.run_id == run_id)
    found = connection.execute(query.order_by(table.t_us).limit(1)).one_or_none()
    return None if found is None else (found.cluster, found.origin_uid)


def _known_runs(connection: Connection, run_ids: Sequence[str]) -> set[str]:
    table = schema.runs.c
    return set(connection.execute(select(table.id).where(table.id.in_(run_ids))).scalars())


def _writers(connection: Connection, origins: Iterable[str]) -> dict[str, set[int]]:
    table = schema.ingest_log.c
    query = select(table.origin, table.origin_uid).where(table.origin.in_(origins))
    writers: dict[str, set[int]] = {}
    for origin, uid in connection.execute(query):
        writers.setdefault(origin, set()).add(uid)
    return writers
