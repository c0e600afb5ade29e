"""What ``gpuops db status`` says of a store: its schema, its rows."""

import os
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, select

from gpuops.store.backends import check_can_create, connect_engine, parse_url, redacted, sqlite_path
from gpuops.store.engine import IncidentStore, SchemaFit, compare_revision, read_revision
from gpuops.store.schema import metadata

COUNTED_TABLES = ("events", "nodes", "runs", "attempts", "incidents", "check_runs")
STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """What is in a store; ``revision`` is its schema's, None where it has none."""

    url: str
    backend: str
    fit: SchemaFit
    revision: str | None
    rows: dict[str, int]

    @property
    def advice(self) -> str | None:
        """Return what to do about the schema, or None where it fits."""
        return {
            SchemaFit.CURRENT: None,
            SchemaFit.EMPTY: "it has no tables yet: "
            + ("made on first use" if self.backend == "sqlite" else "run `gpuops db upgrade`"),
            SchemaFit.OLDER: "it is of an older gpuops: run `gpuops db upgrade`",
            SchemaFit.NEWER: "it is of a newer gpuops: upgrade gpuops here; until then only read",
            SchemaFit.FOREIGN: "it holds tables that are not gpuops': name another database",
        }[self.fit]


def summarize_store(url: str, *, root: Path = Path("/")) -> StoreSummary:
    """Return what the store at *url* holds; a SQLite file that is not there is empty.

    Raises:
        UsageError, NetworkFilesystemError, StoreUnreachableError: It cannot be read.
    """
    parsed = parse_url(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite" and not os.path.lexists(sqlite_path(parsed)):
        check_can_create(parsed)
        return StoreSummary(redacted(parsed), backend, SchemaFit.EMPTY, None, {})
    engine = connect_engine(parsed, mode="read", root=root)
    with (
        IncidentStore(engine, parsed, session_timeout_s=STATUS_TIMEOUT_S) as store,
        store.begin() as connection,
    ):
        found, has_tables = read_revision(connection)
        fit = compare_revision(found, has_tables=has_tables)
        rows = _count(connection) if fit in (SchemaFit.CURRENT, SchemaFit.NEWER) else {}
    return StoreSummary(redacted(parsed), backend, fit, found, rows)


def _count(connection: Connection) -> dict[str, int]:
    tables = metadata.tables
    return {
        name: connection.execute(select(func.count()).select_from(tables[name])).scalar_one()
        for name in COUNTED_TABLES
    }
