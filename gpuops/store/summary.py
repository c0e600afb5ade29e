"""What ``gpuops db status`` says of a store: its schema, its rows."""

import os
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, select

from gpuops.store.backends import check_place, connect_engine
from gpuops.store.engine import Store
from gpuops.store.schema import metadata
from gpuops.store.url import parse_url, shown, sqlite_path
from gpuops.store.versions import Fit, judge, read_revision

COUNTED = ("events", "nodes", "runs", "attempts", "incidents", "check_runs")
STATUS_S = 10.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a store; ``revision`` is its schema's, None where it has none."""

    url: str
    backend: str
    fit: Fit
    revision: str | None
    rows: dict[str, int]

    @property
    def advice(self) -> str | None:
        """Return what to do about the schema, or None where it fits."""
        return {
            Fit.CURRENT: None,
            Fit.EMPTY: "it has no tables yet: "
            + ("made on first use" if self.backend == "sqlite" else "run `gpuops db upgrade`"),
            Fit.OLDER: "it is of an older gpuops: run `gpuops db upgrade`",
            Fit.NEWER: "it is of a newer gpuops: upgrade gpuops here; until then only read",
            Fit.FOREIGN: "it holds tables that are not gpuops': name another database",
        }[self.fit]


def summarise(url: str, *, root: Path = Path("/")) -> Summary:
    """Return what the store at *url* holds; a SQLite file that is not there is empty.

    Raises:
        UsageError, NetworkFilesystemError, StoreUnreachableError: It cannot be read.
    """
    parsed = parse_url(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite" and not os.path.lexists(sqlite_path(parsed)):
        check_place(parsed)
        return Summary(shown(parsed), backend, Fit.EMPTY, None, {})
    engine = connect_engine(parsed, mode="read", root=root)
    with Store(engine, parsed, session_s=STATUS_S) as store, store.begin() as connection:
        found, has_tables = read_revision(connection)
        fit = judge(found, has_tables=has_tables)
        rows = _count(connection) if fit in (Fit.CURRENT, Fit.NEWER) else {}
    return Summary(shown(parsed), backend, fit, found, rows)


def _count(connection: Connection) -> dict[str, int]:
    tables = metadata.tables
    return {
        name: connection.execute(select(func.count()).select_from(tables[name])).scalar_one()
        for name in COUNTED
    }
