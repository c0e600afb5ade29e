"""A store URL is understood or refused in one clear line, and never shows its password."""

import pytest

from gpuops.errors import UsageError
from gpuops.store.backends import parse_url, redacted, sqlite_path


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        ("sqlite:////var/lib/gpuops/gpuops.db", "sqlite"),
        ("sqlite+pysqlite:////x.db", "sqlite"),
        ("postgresql://ada@db/x", "postgresql+psycopg"),
        ("postgresql+psycopg://ada:pw@db:5432/x?sslmode=require", "postgresql+psycopg"),
    ],
)
def test_a_known_url_gets_its_driver(text, driver):
    assert parse_url(text).drivername == driver


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "malformed"),
        ("gpuops.db", "malformed"),
        ("mysql://ada:hunter2@db/x", "of kind 'mysql'"),
        ("postgresql+psycopg2://ada:hunter2@db/x", "of kind 'postgresql\\+psycopg2'"),
        ("postgres://ada:hunter2@db/x", r"did you mean postgresql\+psycopg://ada:\*+@db/x\?"),
        ("postgresql+asyncpg://db/x", r"did you mean postgresql\+psycopg://db/x\?"),
        ("postgresql://ada:hunter2@db:port/x", "malformed"),
        ("postgresql://ada:hunter2@db", "names no database"),
        ("sqlite://", "names no SQLite file"),
        ("sqlite://host/x.db", "names no SQLite file"),
    ],
)
def test_another_url_is_refused_without_its_password(text, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_url(text)

    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://ada:hunter2@db/x",
        "postgresql://ada@db/x?password=hunter2",
        "postgresql://ada:hunter2%2Fx@db/x",
    ],
)
def test_a_shown_url_has_no_password(text):
    assert "hunter2" not in redacted(parse_url(text))
    assert "db/x" in redacted(parse_url(text))


def test_a_relative_file_is_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert sqlite_path(parse_url("sqlite:///x.db")) == tmp_path / "x.db"
