"""The machine of `support.user_spools`, with a store on SQLite or on each database."""

import pytest
from support.user_spools import Machine

from gpuops.store.migrate import upgrade_store


@pytest.fixture
def machine():
    with Machine() as made:
        yield made


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def either(request):
    """A machine with a store on each database."""
    url = None
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        upgrade_store(url)
    with Machine(url) as made:
        yield made
