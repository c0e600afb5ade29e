"""Opening a store, and one clear line where it cannot be opened."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from gpuops.errors import SchemaMismatchError, StoreError, StoreUnreachableError
from gpuops.store.backends import (
    BUSY_S,
    CONNECT_S,
    STATEMENT_S,
    Mode,
    connect_engine,
    is_about_data,
    memory_engine,
    unreachable,
)
from gpuops.store.schema import REVISION, metadata
from gpuops.store.url import parse_url, shown
from gpuops.store.versions import Fit, judge, read_revision
from gpuops.store.watchdog import Watchdog

SESSION_S = 60.0


@dataclass(frozen=True, slots=True)
class Store:
    """An open store. ``notes`` are lines for the user about what it does not hold or cannot do."""

    engine: Engine
    url: URL
    notes: tuple[str, ...] = ()
    session_s: float = SESSION_S

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
        watchdog = Watchdog(deadline_s or self.session_s)
        try:
            with (
                self.engine.connect() as connection,
                watchdog.watching(connection),
                connection.begin(),
            ):
                yield connection
        except DBAPIError as exc:
            if is_about_data(exc):
                raise
            if watchdog.barked:
                raise StoreUnreachableError(
                    f"cannot use the store {shown(self.url)}: no answer within "
                    f"{watchdog.seconds:.3g} s"
                ) from exc
            raise unreachable(self.url, exc) from exc


def open_store(
    url: str,
    *,
    mode: Mode,
    root: Path = Path("/"),
    deadline_s: float = SESSION_S,
) -> Store:
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
        connect_s=min(CONNECT_S, deadline_s),
        statement_s=min(STATEMENT_S, deadline_s),
        busy_s=min(BUSY_S, deadline_s),
    )
    store = Store(engine, parsed, session_s=deadline_s)
    try:
        with store.begin() as connection:
            fit = judge_store(connection)
        if fit is Fit.EMPTY and store.is_sqlite and mode == "write":
            from gpuops.store.migrate import upgrade

            upgrade(store)
            return store
        return _fitting(store, fit, mode)
    except StoreError:
        engine.dispose()
        raise


def judge_store(connection: Connection) -> Fit:
    """Return how the schema behind *connection* stands to this code."""
    found, has_tables = read_revision(connection)
    return judge(found, has_tables=has_tables)


def memory_store(*notes: str) -> Store:
    """Return an empty store in memory, with this code's tables."""
    engine = memory_engine()
    metadata.create_all(engine)
    return Store(engine, parse_url("sqlite:///:memory:"), notes)


def _fitting(store: Store, fit: Fit, mode: Mode) -> Store:
    name = shown(store.url)
    match fit:
        case Fit.CURRENT:
            return store
        case Fit.NEWER if mode == "read":
            note = f"the store {name} is of a newer gpuops; reading it as far as this one can"
            return replace(store, notes=(*store.notes, note))
        case Fit.NEWER:
            raise SchemaMismatchError(
                f"the store {name} is of a newer gpuops (this one has schema {REVISION}): "
                "nothing is written to it; upgrade gpuops here"
            )
        case Fit.OLDER:
            raise SchemaMismatchError(
                f"the store {name} is of an older gpuops (this one has schema {REVISION}): "
                "run `gpuops db upgrade`"
            )
        case Fit.EMPTY:
            raise SchemaMismatchError(
                f"the store {name} has no tables yet: run `gpuops db upgrade`"
            )
        case Fit.FOREIGN:
            raise SchemaMismatchError(
                f"the database {name} holds tables that are not gpuops': name another one"
            )
