"""Upgrade a store's schema to this version: ``gpuops db upgrade``.

One upgrade at a time (an advisory lock on Postgres, the write lock on SQLite), in one transaction;
a SQLite file with tables is copied first. New tables are filled from the stored events, and the
views are made anew.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from gpuops.errors import SchemaMismatchError, StoreUnreachableError
from gpuops.store.backends import check_directory, connect_engine, parse_url, redacted, sqlite_path
from gpuops.store.engine import (
    UNKNOWN_REVISION_ADVICE,
    IncidentStore,
    SchemaFit,
    compare_revision,
    read_revision,
    unknown_revision_text,
)
from gpuops.store.ingest.batch import rebuild_projections
from gpuops.store.schema import REVISION
from gpuops.store.views import create_views, drop_views

UPGRADE_TIMEOUT_S = 300.0
# An arbitrary constant that all versions of gpuops share ("gpuops" in ASCII).
_LOCK = 0x6770756F7073


def upgrade_store(
    url: str, *, create_directory: bool = True, root: Path = Path("/")
) -> tuple[str | None, str]:
    """Upgrade the store at *url*; return the revision it had (None: empty) and the one it has.

    Without *create_directory* a SQLite file is made only in a directory that exists: a path that a
    person typed may be mistyped.

    Raises:
        UsageError, NetworkFilesystemError, StoreUnreachableError: It cannot be opened.
        SchemaMismatchError: Its revision is unknown to this code, or it is not a store of gpuops.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not create_directory:
        check_directory(parsed)
    engine = connect_engine(parsed, mode="write", root=root, statement_timeout_s=UPGRADE_TIMEOUT_S)
    with IncidentStore(engine, parsed, session_timeout_s=UPGRADE_TIMEOUT_S) as store:
        return upgrade(store), REVISION


def upgrade(store: IncidentStore, revision: str = "head") -> str | None:
    """Upgrade an open store to *revision*; return the revision it had."""
    name = redacted(store.url)
    try:
        with store.begin(deadline_s=UPGRADE_TIMEOUT_S) as connection:
            if not store.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            found, has_tables = read_revision(connection)
            fit = compare_revision(found, has_tables=has_tables)
            if fit is SchemaFit.FOREIGN:
                raise SchemaMismatchError(
                    f"the database {name} holds tables of another program: name another one"
                )
            if fit is SchemaFit.UNKNOWN:
                raise SchemaMismatchError(
                    f"the store {name} {unknown_revision_text(found)}; {UNKNOWN_REVISION_ADVICE}"
                )
            if fit is not SchemaFit.CURRENT:
                if store.is_sqlite and has_tables:
                    _back_up_sqlite(sqlite_path(store.url), found)
                drop_views(connection)
                command.upgrade(alembic_config(connection), revision)
                if has_tables and revision == "head":
                    rebuild_projections(connection)
            if revision == "head":
                drop_views(connection)
                create_views(connection)
    except CommandError as exc:
        raise SchemaMismatchError(f"cannot upgrade the store {name}: {exc}") from exc
    except DBAPIError as exc:
        raise StoreUnreachableError(f"cannot upgrade the store {name}: {exc.orig}") from exc
    return found


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's configuration for the migrations on *connection*, without a file."""
    config = Config()
    location = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", location.replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _back_up_sqlite(path: Path, revision: str | None) -> None:
    """Copy a SQLite store in its directory; an existing copy of the same revision is kept."""
    target = path.with_name(f"{path.name}.before-upgrade-from-{revision}")
    if target.exists():
        return
    partial = target.with_name(target.name + ".part")
    partial.unlink(missing_ok=True)
    try:
        partial.touch(mode=0o600)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(partial)) as copy:
            source.backup(copy)
        partial.rename(target)
    except (OSError, sqlite3.Error) as exc:
        raise StoreUnreachableError(
            f"cannot copy the store {path} to {target} before upgrading it: {exc}"
        ) from exc
