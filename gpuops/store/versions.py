"""Whether a store's schema and this code fit together."""

from enum import Enum

from sqlalchemy import Connection, inspect, text

from gpuops.store.schema import REVISION


class Fit(Enum):
    """How the schema that was found stands to the schema of this code."""

    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"
    FOREIGN = "foreign"


def judge(found: str | None, *, has_tables: bool, code: str = REVISION) -> Fit:
    """Return how revision *found* (None: no migration has run) stands to *code*.

    Revisions are numbers in one line; one that is not a number is of a release to come.
    """
    if found is None:
        return Fit.FOREIGN if has_tables else Fit.EMPTY
    if found == code:
        return Fit.CURRENT
    if found.isdecimal() and int(found) < int(code):
        return Fit.OLDER
    return Fit.NEWER


def read_revision(connection: Connection) -> tuple[str | None, bool]:
    """Return the revision in the store, and whether it has tables of any other kind."""
    tables = set(inspect(connection).get_table_names())
    others = bool(tables - {"alembic_version"})
    if "alembic_version" not in tables:
        return None, others
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return (None if found is None else str(found)), others
