"""The two databases that a store can be in: SQLite on a local disk, and Postgres.

Nothing here waits without bound: connecting takes at most `CONNECT_S`, a statement `STATEMENT_S`,
a locked SQLite file `BUSY_S`.
"""

import logging
import os
import sqlite3
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool, StaticPool

from gpuops.errors import NetworkFilesystemError, StoreUnreachableError, UsageError
from gpuops.host.mounts import Mount, mount_of, read_mounts
from gpuops.store.url import shown, sqlite_path

CONNECT_S = 3
STATEMENT_S = 5.0
BUSY_S = 10.0
Mode = Literal["read", "write"]


def connect_engine(
    url: URL,
    *,
    mode: Mode,
    root: Path = Path("/"),
    connect_s: float = CONNECT_S,
    statement_s: float = STATEMENT_S,
    busy_s: float = BUSY_S,
) -> Engine:
    """Return an engine for *url*, not yet connected.

    Raises:
        UsageError: Malformed URL or a driver that is not installed.
        NetworkFilesystemError: SQLite on a file system of another machine.
        StoreUnreachableError: The SQLite file or its directory cannot be opened.
    """
    if url.get_backend_name() == "sqlite":
        path = sqlite_path(url)
        refuse_network(path, read_mounts(root))
        _check_file(path, url, mode=mode)
        if mode == "write":
            _make_directory(path, url)
        return _sqlite(path, mode=mode, busy_s=busy_s)
    return _postgres(url, mode=mode, connect_s=connect_s, statement_s=statement_s)


def memory_engine() -> Engine:
    """Return an engine on a new SQLite database in memory, without tables."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    _begin_by_hand(engine, "BEGIN", busy_s=BUSY_S, keep=False)
    return engine


def check_place(url: URL) -> None:
    """Refuse a SQLite file that does not exist and could not be made; makes nothing.

    Raises:
        StoreUnreachableError: Says what is in the way.
    """
    path = sqlite_path(url)
    _check_file(path, url, mode="write")
    above = next(parent for parent in path.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise _unusable(url, f"{above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise _unusable(url, f"no file can be made in {above} by this user")


def check_directory(url: URL) -> None:
    """Refuse a SQLite file whose directory is not there.

    Raises:
        StoreUnreachableError: Says which.
    """
    parent = sqlite_path(url).parent
    if not os.path.lexists(parent):
        raise _unusable(url, f"the directory {parent} is not there; make it or name another")


def _check_file(path: Path, url: URL, *, mode: Mode) -> None:
    try:
        is_directory, is_there = path.is_dir(), path.exists()
    except OSError as exc:
        raise _unusable(url, exc.strerror or str(exc)) from exc
    if is_directory:
        raise _unusable(url, "it is a directory; name a file in it")
    if mode == "read" and not is_there:
        raise _unusable(url, "there is no such file; `gpuops db upgrade` makes one")


def _unusable(url: URL, why: str) -> StoreUnreachableError:
    return StoreUnreachableError(f"cannot open the store {shown(url)}: {why}")


def _sqlite(path: Path, *, mode: Mode, busy_s: float) -> Engine:
    target = f"file:{quote(str(path))}?{'mode=rwc' if mode == 'write' else _read_flags(path)}"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(target, timeout=busy_s, check_same_thread=False, uri=True)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    begin = "BEGIN IMMEDIATE" if mode == "write" else "BEGIN"
    _begin_by_hand(engine, begin, busy_s=busy_s, keep=mode == "write")
    return engine


def _read_flags(path: Path) -> str:
    # A reader of a WAL file makes its index beside it; where it may not, and no writer has left
    # one, the file alone is the whole database.
    alone = not path.with_name(path.name + "-wal").exists()
    if alone and not os.access(path.parent, os.W_OK):
        return "mode=ro&immutable=1"
    return "mode=ro"


def _make_directory(path: Path, url: URL) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise _unusable(url, f"cannot make {path.parent}: {exc.strerror}") from exc


def _begin_by_hand(engine: Engine, statement: str, *, busy_s: float, keep: bool) -> None:
    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # noqa: ANN401 the driver's own type
        # sqlite3 would start transactions late and as readers, which deadlocks two writers.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {round(busy_s * 1000)}")
        if keep:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(statement)


def refuse_network(path: Path, mounts: list[Mount]) -> None:
    """Refuse a SQLite file whose locks another machine would have to keep.

    Raises:
        NetworkFilesystemError: *path* lies on a network file system; says what to use.
    """
    mount = mount_of(Path(os.path.realpath(path)), mounts)
    if mount is not None and mount.is_network:
        raise NetworkFilesystemError(
            f"the store {path} is on {mount.point} ({mount.filesystem} from {mount.source}): "
            "SQLite's locks cannot be trusted on a network file system; use a path on a local "
            "disk (store.url or GPUOPS_STORE=sqlite:////var/tmp/gpuops.db) or Postgres"
        )


def _postgres(url: URL, *, mode: Mode, connect_s: float, statement_s: float) -> Engine:
    try:
        engine = create_engine(
            url,
            poolclass=NullPool,
            connect_args={
                "connect_timeout": max(round(connect_s), 1),
                "application_name": "gpuops",
                # Behind a pooler the next statement may meet another session.
                "prepare_threshold": None,
            },
        )
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"the store URL {shown(url)!r} needs the driver {exc.name}, which is not installed: "
            "pip install 'psycopg[binary]'"
        ) from exc
    # It logs what it could not clean up after a server that went away; the error itself says so.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    timeout = f"SET LOCAL statement_timeout = {round(statement_s * 1000)}"
    access = "SET TRANSACTION READ ONLY; " if mode == "read" else ""

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(access + timeout)

    return engine


def is_about_data(exc: DBAPIError) -> bool:
    """Say whether *exc* is about the rows that were given and not about the store itself.

    PostgreSQL's classes (its documentation, appendix A): 22 data exception, 23 integrity
    constraint violation, 54 program limit exceeded.
    """
    state = getattr(exc.orig, "sqlstate", None)
    if isinstance(state, str):
        return state[:2] in ("22", "23", "54")
    return isinstance(exc, DataError | IntegrityError)


def unreachable(url: URL, exc: DBAPIError) -> StoreUnreachableError:
    """Return the one clear line for a store that could not be reached."""
    words = " ".join(str(exc.orig).split()) or type(exc.orig).__name__
    if url.password:
        words = words.replace(str(url.password), "***")
    return StoreUnreachableError(f"cannot use the store {shown(url)}: {words[:300]}")
