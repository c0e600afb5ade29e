"""Fixtures of tests that run on both databases: SQLite in a file, and Postgres."""

import pytest

from gpuops.store.migrate import upgrade_store


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_store_url(request, tmp_path):
    """Return the URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def store_url(empty_store_url):
    """Return the URL of a store without a row."""
    upgrade_store(empty_store_url)
    return empty_store_url
