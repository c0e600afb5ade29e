"""Store URLs and the two databases behind them: SQLite on a local disk, and Postgres.

All waits are bounded: connecting takes at most `CONNECT_TIMEOUT_S`, a statement
`STATEMENT_TIMEOUT_S`, a locked SQLite file `BUSY_TIMEOUT_S`.
"""

import logging
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool, StaticPool

from gpuops.errors import NetworkFilesystemError, StoreUnreachableError, UsageError
from gpuops.host.storage.mounts import Mount, mount_of, read_mounts
from gpuops.scrub import scrub

URL_FORMS = "sqlite:////absolute/path.db or postgresql+psycopg://user@host/database"


def parse_url(text: str) -> URL:
    """Return the store URL in *text*, with its driver.

    Raises:
        UsageError: Malformed, or of a database that gpuops does not support.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # The parser's message may quote a part of the password.
        raise UsageError(
            f"the store URL {redacted_text(text)!r} is malformed; expected {URL_FORMS}"
        ) from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        if url.drivername not in ("sqlite", "sqlite+pysqlite") or url.host or not url.database:
            raise UsageError(
                f"the store URL {redacted(url)!r} names no SQLite file; expected sqlite:////absolute/path.db"
            )
        return url.set(drivername="sqlite")
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        if not url.database:
            raise UsageError(
                f"the store URL {redacted(url)!r} names no database; expected {URL_FORMS}"
            )
        return url.set(drivername="postgresql+psycopg")
    hint = f"expected {URL_FORMS}"
    if backend.startswith("postgres"):
        hint = f"did you mean {redacted(url.set(drivername='postgresql+psycopg'))}?"
    raise UsageError(
        f"the store URL {redacted(url)!r} is of kind {url.drivername!r}, which is not known; {hint}"
    )


def redacted(url: URL) -> str:
    """Return *url* without its secrets."""
    return redacted_text(url.render_as_string(hide_password=True))


def redacted_text(text: str) -> str:
    """Return *text*, which may be a malformed URL, without its secrets."""
    return scrub(text)


def sqlite_path(url: URL) -> Path:
    """Return the file of a SQLite URL, absolute."""
    assert url.database is not None
    return Path(url.database).expanduser().absolute()


CONNECT_TIMEOUT_S = 3
STATEMENT_TIMEOUT_S = 5.0
BUSY_TIMEOUT_S = 10.0
AccessMode = Literal["read", "write"]


def connect_engine(
    url: URL,
    *,
    mode: AccessMode,
    root: Path = Path("/"),
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    statement_timeout_s: float = STATEMENT_TIMEOUT_S,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> Engine:
    """Return an engine for *url*, not yet connected.

    Raises:
        UsageError: Malformed URL or a driver that is not installed.
        NetworkFilesystemError: SQLite on a file system of another machine.
        StoreUnreachableError: The SQLite file or its directory cannot be opened.
    """
    if url.get_backend_name() == "sqlite":
        path = sqlite_path(url)
        reject_network_filesystem(path, read_mounts(root))
        _check_file(path, url, mode=mode)
        if mode == "write":
            _make_directory(path, url)
        return _sqlite_engine(path, mode=mode, busy_timeout_s=busy_timeout_s)
    return _postgres_engine(
        url, mode=mode, connect_timeout_s=connect_timeout_s, statement_timeout_s=statement_timeout_s
    )


def memory_engine() -> Engine:
    """Return an engine on a new SQLite database in memory, without tables."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    _set_explicit_begin(engine, "BEGIN", busy_timeout_s=BUSY_TIMEOUT_S, is_persistent=False)
    return engine


def check_can_create(url: URL) -> None:
    """Check that a missing SQLite file could be created; creates nothing.

    Raises:
        StoreUnreachableError: It could not; says why.
    """
    path = sqlite_path(url)
    _check_file(path, url, mode="write")
    ancestor = next(parent for parent in path.parents if os.path.lexists(parent))
    if not ancestor.is_dir():
        raise _cannot_open(url, f"{ancestor} is not a directory")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise _cannot_open(url, f"this user may not create a file in {ancestor}")


def check_directory(url: URL) -> None:
    """Check that the directory of a SQLite file exists.

    Raises:
        StoreUnreachableError: It does not.
    """
    parent = sqlite_path(url).parent
    if not os.path.lexists(parent):
        raise _cannot_open(url, f"the directory {parent} does not exist; create it or name another")


def _check_file(path: Path, url: URL, *, mode: AccessMode) -> None:
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as exc:
        raise _cannot_open(url, exc.strerror or str(exc)) from exc
    if is_directory:
        raise _cannot_open(url, "it is a directory; name a file in it")
    if mode == "read" and not exists:
        raise _cannot_open(url, "there is no such file; `gpuops db upgrade` creates one")


def _cannot_open(url: URL, why: str) -> StoreUnreachableError:
    return StoreUnreachableError(f"cannot open the store {redacted(url)}: {why}")


def _sqlite_engine(path: Path, *, mode: AccessMode, busy_timeout_s: float) -> Engine:
    target = f"file:{quote(str(path))}?{'mode=rwc' if mode == 'write' else _read_flags(path)}"

    def connect() -> sqlite3.Connection:
        if mode == "write":
            # For its owner alone; SQLite gives its other files the mode of this one.
            with suppress(OSError):  # it is there, or SQLite says what is wrong
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return sqlite3.connect(target, timeout=busy_timeout_s, check_same_thread=False, uri=True)

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    begin = "BEGIN IMMEDIATE" if mode == "write" else "BEGIN"
    _set_explicit_begin(engine, begin, busy_timeout_s=busy_timeout_s, is_persistent=mode == "write")
    return engine


def _read_flags(path: Path) -> str:
    # A reader of a WAL file creates its index next to it; if it may not, and no writer has left
    # one, the file alone is the complete database.
    has_no_wal = not path.with_name(path.name + "-wal").exists()
    if has_no_wal and not os.access(path.parent, os.W_OK):
        return "mode=ro&immutable=1"
    return "mode=ro"


def _make_directory(path: Path, url: URL) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise _cannot_open(url, f"cannot make {path.parent}: {exc.strerror}") from exc


def _set_explicit_begin(
    engine: Engine, statement: str, *, busy_timeout_s: float, is_persistent: bool
) -> None:
    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # noqa: ANN401 the driver's own type
        # sqlite3 would start transactions late and as readers, which deadlocks two writers.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        if is_persistent:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(statement)


def reject_network_filesystem(path: Path, mounts: list[Mount]) -> None:
    """Check that a SQLite file is not on a network file system, whose locks are unreliable.

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


def _postgres_engine(
    url: URL, *, mode: AccessMode, connect_timeout_s: float, statement_timeout_s: float
) -> Engine:
    try:
        engine = create_engine(
            url,
            poolclass=NullPool,
            connect_args={
                "connect_timeout": max(round(connect_timeout_s), 1),
                "application_name": "gpuops",
                # Behind a pooler the next statement may run in another session.
                "prepare_threshold": None,
            },
        )
    except ModuleNotFoundError as exc:
        raise UsageError(
            f"the store URL {redacted(url)!r} needs the driver {exc.name}, which is not installed: "
            "pip install 'psycopg[binary]'"
        ) from exc
    # It logs failed clean-ups after a lost connection, which the error reports anyway.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    timeout = f"SET LOCAL statement_timeout = {round(statement_timeout_s * 1000)}"
    access = "SET TRANSACTION READ ONLY; " if mode == "read" else ""

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(access + timeout)

    return engine


def is_data_error(exc: DBAPIError) -> bool:
    """Return whether *exc* is about the given rows and not about the store itself.

    PostgreSQL's classes (its documentation, appendix A): 22 data exception, 23 integrity
    constraint violation, 54 program limit exceeded.
    """
    state = getattr(exc.orig, "sqlstate", None)
    if isinstance(state, str):
        return state[:2] in ("22", "23", "54")
    return isinstance(exc, DataError | IntegrityError)


def unreachable_error(url: URL, exc: DBAPIError) -> StoreUnreachableError:
    """Return the one-line error for a store that could not be reached."""
    message = " ".join(str(exc.orig).split()) or type(exc.orig).__name__
    if url.password:
        message = message.replace(str(url.password), "***")
    return StoreUnreachableError(f"cannot use the store {redacted(url)}: {message[:300]}")
