"""Open a store, or summarize it: schema checked, every call bounded, one clear line on failure.

A server that is stopped, or behind a cut cable, never reports its own statement timeout. Shutting
the socket down from this side makes the waiting call fail at once.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Self

from sqlalchemy import Connection, Engine, func, inspect, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from gpuops.errors import SchemaMismatchError, StoreError, StoreUnreachableError
from gpuops.store.backends import (
    BUSY_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    STATEMENT_TIMEOUT_S,
    AccessMode,
    check_can_create,
    connect_engine,
    is_data_error,
    memory_engine,
    parse_url,
    redacted,
    sqlite_path,
    unreachable_error,
)
from gpuops.store.schema import REVISION, metadata


class SchemaFit(Enum):
    """How the schema that was found stands to the schema of this code."""

    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"
    FOREIGN = "foreign"


def compare_revision(
    store_revision: str | None, *, has_tables: bool, code_revision: str = REVISION
) -> SchemaFit:
    """Return how revision *store_revision* (None: no migration has run) stands to *code_revision*.

    Revisions are numbers in one line; one that is not a number is of a release to come.
    """
    if store_revision is None:
        return SchemaFit.FOREIGN if has_tables else SchemaFit.EMPTY
    if store_revision == code_revision:
        return SchemaFit.CURRENT
    if store_revision.isdecimal() and int(store_revision) < int(code_revision):
        return SchemaFit.OLDER
    return SchemaFit.NEWER


def read_revision(connection: Connection) -> tuple[str | None, bool]:
    """Return the revision in the store, and whether it has tables of any other kind."""
    tables = set(inspect(connection).get_table_names())
    others = bool(tables - {"alembic_version"})
    if "alembic_version" not in tables:
        return None, others
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return (None if found is None else str(found)), others


class ConnectionWatchdog:
    """Cuts a connection off after *timeout_s*; ``fired`` says whether it did.

    SQLite needs none: it bounds itself by its busy timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = max(timeout_s, 0.0)
        self.fired = False

    @contextlib.contextmanager
    def guard(self, connection: Connection) -> Iterator[None]:
        """Watch over *connection* for the time of a block."""
        if connection.dialect.name != "postgresql":
            yield
            return
        descriptor = connection.connection.driver_connection.fileno()  # type: ignore[union-attr] # psycopg has it
        timer = threading.Timer(self.timeout_s, self._fire, args=(descriptor,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _fire(self, descriptor: int) -> None:
        self.fired = True
        _shut_down_socket(descriptor)


def _shut_down_socket(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as borrowed:
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()


SESSION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class IncidentStore:
    """An open store. ``notes`` are lines for the user about what it does not hold or cannot do."""

    engine: Engine
    url: URL
    notes: tuple[str, ...] = ()
    session_timeout_s: float = SESSION_TIMEOUT_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.dispose()

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextlib.contextmanager
    def begin(self, *, deadline_s: float | None = None) -> Iterator[Connection]:
        """Open a transaction that is cut off after *deadline_s* (default: a minute).

        Raises:
            StoreUnreachableError: The store could not be reached, went away or will not serve.
            sqlalchemy.exc.DBAPIError: It is there, and what it was asked to keep cannot be kept
                (see `is_about_data`).
        """
        watchdog = ConnectionWatchdog(deadline_s or self.session_timeout_s)
        try:
            with (
                self.engine.connect() as connection,
                watchdog.guard(connection),
                connection.begin(),
            ):
                yield connection
        except DBAPIError as exc:
            if is_data_error(exc):
                raise
            if watchdog.fired:
                raise StoreUnreachableError(
                    f"cannot use the store {redacted(self.url)}: no answer within "
                    f"{watchdog.timeout_s:.3g} s"
                ) from exc
            raise unreachable_error(self.url, exc) from exc


def open_store(
    url: str,
    *,
    mode: AccessMode,
    root: Path = Path("/"),
    deadline_s: float = SESSION_TIMEOUT_S,
) -> IncidentStore:
    """Return the store at *url*, whose schema fits this code well enough for *mode*.

    An empty SQLite store is given its tables; an empty Postgres needs ``gpuops db upgrade``.

    Raises:
        UsageError: The URL is malformed or its driver is not installed.
        NetworkFilesystemError: SQLite on a network file system.
        StoreUnreachableError: No connection within the deadline.
        SchemaMismatchError: The schema is older, not there, or too new to write to.
    """
    parsed = parse_url(url)
    engine = connect_engine(
        parsed,
        mode=mode,
        root=root,
        connect_timeout_s=min(CONNECT_TIMEOUT_S, deadline_s),
        statement_timeout_s=min(STATEMENT_TIMEOUT_S, deadline_s),
        busy_timeout_s=min(BUSY_TIMEOUT_S, deadline_s),
    )
    store = IncidentStore(engine, parsed, session_timeout_s=deadline_s)
    try:
        with store.begin() as connection:
            fit = check_schema(connection)
        if fit is SchemaFit.EMPTY and store.is_sqlite and mode == "write":
            from gpuops.store.migrate import upgrade

            upgrade(store)
            return store
        return _require_fit(store, fit, mode)
    except StoreError:
        engine.dispose()
        raise


def check_schema(connection: Connection) -> SchemaFit:
    """Return how the schema behind *connection* stands to this code."""
    found, has_tables = read_revision(connection)
    return compare_revision(found, has_tables=has_tables)


def memory_store(*notes: str) -> IncidentStore:
    """Return an empty store in memory, with this code's tables."""
    engine = memory_engine()
    metadata.create_all(engine)
    return IncidentStore(engine, parse_url("sqlite:///:memory:"), notes)


def _require_fit(store: IncidentStore, fit: SchemaFit, mode: AccessMode) -> IncidentStore:
    name = redacted(store.url)
    match fit:
        case SchemaFit.CURRENT:
            return store
        case SchemaFit.NEWER if mode == "read":
            note = f"the store {name} is of a newer gpuops; reading it as far as this one can"
            return replace(store, notes=(*store.notes, note))
        case SchemaFit.NEWER:
            raise SchemaMismatchError(
                f"the store {name} is of a newer gpuops (this one has schema {REVISION}): "
                "nothing is written to it; upgrade gpuops here"
            )
        case SchemaFit.OLDER:
            raise SchemaMismatchError(
                f"the store {name} is of an older gpuops (this one has schema {REVISION}): "
                "run `gpuops db upgrade`"
            )
        case SchemaFit.EMPTY:
            raise SchemaMismatchError(
                f"the store {name} has no tables yet: run `gpuops db upgrade`"
            )
        case SchemaFit.FOREIGN:
            raise SchemaMismatchError(
                f"the database {name} holds tables that are not gpuops': name another one"
            )


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
