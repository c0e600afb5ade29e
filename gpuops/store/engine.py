"""Open a store, or summarize it: schema checked, every call bounded, a one-line error on failure.

A server that is stopped, or unreachable, never reports its own statement timeout. Shutting the
socket down from this side makes the waiting call fail at once.
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

from sqlalchemy import Connection, Engine, inspect, text
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
from gpuops.store.sizes import TableSize, measure_tables
from gpuops.store.views import create_views


class SchemaFit(Enum):
    """How the schema in a database compares with the schema of this code."""

    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    UNKNOWN = "unknown"
    FOREIGN = "foreign"


_PRE_RELEASE_REVISIONS = ("0002", "0003")


def compare_revision(
    store_revision: str | None, *, has_tables: bool, code_revision: str = REVISION
) -> SchemaFit:
    """Return how revision *store_revision* (None: no migration has run) fits *code_revision*.

    Revisions are numbers in one sequence. One above *code_revision* is unknown, as it is from a
    newer gpuops; so are those of pre-releases whose migrations were merged into the first one.
    """
    if store_revision is None:
        return SchemaFit.FOREIGN if has_tables else SchemaFit.EMPTY
    if store_revision == code_revision:
        return SchemaFit.CURRENT
    is_older = store_revision.isdecimal() and int(store_revision) < int(code_revision)
    if is_older and store_revision not in _PRE_RELEASE_REVISIONS:
        return SchemaFit.OLDER
    return SchemaFit.UNKNOWN


def unknown_revision_text(revision: str | None) -> str:
    """Return what is wrong with a store whose *revision* is `SchemaFit.UNKNOWN`."""
    return (
        f"has schema revision {revision}, which this gpuops (revision {REVISION}) does not know: "
        "another version of gpuops wrote it, a newer one or a pre-release"
    )


UNKNOWN_REVISION_ADVICE = (
    "if that version is newer, upgrade gpuops here, "
    "else name a new store (store.url or GPUOPS_STORE)"
)


# As Alembic makes it.
_VERSION_TABLE = (
    "CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)


def read_revision(connection: Connection) -> tuple[str | None, bool]:
    """Return the revision in the database, and whether it has any other tables."""
    tables = set(inspect(connection).get_table_names())
    others = bool(tables - {"alembic_version"})
    if "alembic_version" not in tables:
        return None, others
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return (None if found is None else str(found)), others


class ConnectionWatchdog:
    """Cuts a connection off after *timeout_s*; ``fired``: it did.

    SQLite needs none: it bounds itself by its busy timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = max(timeout_s, 0.0)
        self.fired = False

    @contextlib.contextmanager
    def guard(self, connection: Connection) -> Iterator[None]:
        """Watch *connection* while the block runs."""
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
    """An open store. ``notes`` are lines for the user about missing data or limits."""

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
            StoreUnreachableError: The store could not be reached, was lost or refused.
            sqlalchemy.exc.DBAPIError: The rows cannot be stored (see `is_data_error`).
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
    url: str, *, mode: AccessMode, root: Path = Path("/"), deadline_s: float = SESSION_TIMEOUT_S
) -> IncidentStore:
    """Return the store at *url*, whose schema fits this code well enough for *mode*.

    An empty SQLite store is given its tables; an empty Postgres needs ``gpuops db upgrade``.

    Raises:
        UsageError: The URL is malformed or its driver is not installed.
        NetworkFilesystemError: SQLite on a network file system.
        StoreUnreachableError: No connection within the deadline.
        SchemaMismatchError: The schema is older or missing, or *mode* is write and the revision
            is unknown.
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
            revision, has_tables = read_revision(connection)
        fit = compare_revision(revision, has_tables=has_tables)
        if fit is SchemaFit.EMPTY and store.is_sqlite and mode == "write":
            fit, revision = _create_tables(store)
        return _require_fit(store, fit, revision, mode)
    except StoreError:
        engine.dispose()
        raise


def _create_tables(store: IncidentStore) -> tuple[SchemaFit, str | None]:
    """Create this code's tables in an empty SQLite store, as the migrations would.

    Alembic alone takes half of the second that a failing prolog has for its permit. Another process
    may have been first: what the store then has is returned.
    """
    with store.begin() as connection:
        revision, has_tables = read_revision(connection)
        fit = compare_revision(revision, has_tables=has_tables)
        if fit is not SchemaFit.EMPTY:
            return fit, revision
        metadata.create_all(connection)
        create_views(connection)
        connection.execute(text(_VERSION_TABLE))
        version = {"revision": REVISION}
        connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), version)
    return SchemaFit.CURRENT, REVISION


def memory_store(*notes: str) -> IncidentStore:
    """Return an empty store in memory, with this code's tables."""
    engine = memory_engine()
    metadata.create_all(engine)
    return IncidentStore(engine, parse_url("sqlite:///:memory:"), notes)


def _require_fit(
    store: IncidentStore, fit: SchemaFit, revision: str | None, mode: AccessMode
) -> IncidentStore:
    name = redacted(store.url)
    match fit:
        case SchemaFit.CURRENT:
            return store
        case SchemaFit.UNKNOWN if mode == "read":
            note = f"the store {name} {unknown_revision_text(revision)}; reading what is readable"
            return replace(store, notes=(*store.notes, note))
        case SchemaFit.UNKNOWN:
            raise SchemaMismatchError(
                f"the store {name} {unknown_revision_text(revision)}; nothing is written to it; "
                f"{UNKNOWN_REVISION_ADVICE}"
            )
        case SchemaFit.OLDER:
            raise SchemaMismatchError(
                f"an older gpuops wrote the store {name} (schema revision {revision}; this gpuops "
                f"has {REVISION}): run `gpuops db upgrade`"
            )
        case SchemaFit.EMPTY:
            raise SchemaMismatchError(
                f"the store {name} has no tables yet: run `gpuops db upgrade`"
            )
        case SchemaFit.FOREIGN:
            raise SchemaMismatchError(
                f"the database {name} holds tables of another program: name another one"
            )


COUNTED_TABLES = ("events", "nodes", "runs", "attempts", "incidents", "check_runs")
STATUS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """The content of a store; ``revision`` is that of its schema, None without one.

    ``tables``: those with rows, the largest first.
    """

    url: str
    backend: str
    fit: SchemaFit
    revision: str | None
    rows: dict[str, int]
    tables: tuple[TableSize, ...] = ()

    @property
    def advice(self) -> str | None:
        """Return what to do about the schema, or None where it fits."""
        return {
            SchemaFit.CURRENT: None,
            SchemaFit.EMPTY: "it has no tables yet: "
            + ("created on first use" if self.backend == "sqlite" else "run `gpuops db upgrade`"),
            SchemaFit.OLDER: "an older gpuops wrote it: run `gpuops db upgrade`",
            SchemaFit.UNKNOWN: f"it {unknown_revision_text(self.revision)}; "
            f"it is only read; {UNKNOWN_REVISION_ADVICE}",
            SchemaFit.FOREIGN: "it holds tables of another program: name another database",
        }[self.fit]


def summarize_store(url: str, now_us: int, *, root: Path = Path("/")) -> StoreSummary:
    """Return what the store at *url* holds; a SQLite file that is not there is empty.

    *now_us*: how much each table grew lately is counted back from then.

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
        is_readable = fit in (SchemaFit.CURRENT, SchemaFit.UNKNOWN)
        tables = measure_tables(connection, now_us) if is_readable else ()
    counts = {item.name: item.rows for item in tables}
    rows = {name: counts.get(name, 0) for name in COUNTED_TABLES} if is_readable else {}
    return StoreSummary(redacted(parsed), backend, fit, found, rows, tables)
