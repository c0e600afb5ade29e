"""Store URLs: which are understood, and how they are shown."""

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from gpuops.errors import UsageError
from gpuops.scrub import scrub

FORMS = "sqlite:////absolute/path.db or postgresql+psycopg://user@host/database"


def parse_url(text: str) -> URL:
    """Return the store URL in *text*, with its driver.

    Raises:
        UsageError: Malformed, or of a database that gpuops does not keep its store in.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # The parser's own words may quote a part of the password.
        raise UsageError(
            f"the store URL {shown_text(text)!r} is malformed; wanted {FORMS}"
        ) from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        if url.drivername not in ("sqlite", "sqlite+pysqlite") or url.host or not url.database:
            raise UsageError(
                f"the store URL {shown(url)!r} names no SQLite file; wanted sqlite:////absolute/path.db"
            )
        return url.set(drivername="sqlite")
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        if not url.database:
            raise UsageError(f"the store URL {shown(url)!r} names no database; wanted {FORMS}")
        return url.set(drivername="postgresql+psycopg")
    wanted = f"wanted {FORMS}"
    if backend.startswith("postgres"):
        wanted = f"did you mean {shown(url.set(drivername='postgresql+psycopg'))}?"
    raise UsageError(
        f"the store URL {shown(url)!r} is of kind {url.drivername!r}, which is not known; {wanted}"
    )


def shown(url: URL) -> str:
    """Return *url* without its secrets."""
    return shown_text(url.render_as_string(hide_password=True))


def shown_text(text: str) -> str:
    """Return a text that may be a URL without its secrets, however malformed it is."""
    return scrub(text)


def sqlite_path(url: URL) -> Path:
    """Return the file of a SQLite URL, absolute."""
    assert url.database is not None
    return Path(url.database).expanduser().absolute()
