"""One Slurm for all tests of this folder; each test meets it healthy and without a past."""

import json
import sqlite3

import pytest
from support import mock_nvml
from support.slurm import running_cluster, wait_until


@pytest.fixture(scope="session")
def slurm_daemons(tmp_path_factory):
    with running_cluster(mock_nvml.build(tmp_path_factory.mktemp("nvml"))) as running:
        yield running


@pytest.fixture
def cluster(slurm_daemons, tmp_path):
    slurm_daemons.reset(f"sqlite:///{tmp_path}/store.db")
    return slurm_daemons


class History:
    """What arrived in the store, by kind of event."""

    def __init__(self, path):
        self.path = path

    def events(self, kind, node=None):
        if not self.path.exists():
            return []
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as connection:
            try:
                rows = connection.execute(
                    "SELECT node, payload FROM events WHERE kind = ? ORDER BY t_us", (kind,)
                ).fetchall()
            except sqlite3.OperationalError:
                return []
        return [json.loads(payload) for where, payload in rows if node in {None, where}]

    def runs(self, node, trigger):
        """Return how many check runs of *trigger* the store knows."""
        if not self.path.exists():
            return 0
        query = (
            "SELECT coalesce(sum(runs), 0) FROM check_runs JOIN nodes ON nodes.id = node_id"
            " WHERE hostname = ? AND trigger = ?"
        )
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as connection:
            try:
                return connection.execute(query, (node, trigger)).fetchone()[0]
            except sqlite3.OperationalError:  # its tables are being made
                return 0

    def wait(self, kind, node=None, **wanted):
        """Return the first event of *kind* whose payload has *wanted*."""

        def found():
            for payload in self.events(kind, node):
                if all(payload.get(key) == value for key, value in wanted.items()):
                    return payload
            return None

        return wait_until(found, lambda: self.events(kind, node))


@pytest.fixture
def history(cluster, tmp_path):
    return History(tmp_path / "store.db")
