"""Drains by administrators in the store: each once, on SQLite and Postgres alike."""

import threading

import pytest
from sqlalchemy import text
from support.command import gpuops
from support.stories import Teller, envelopes

from gpuops.errors import StoreUnreachableError
from gpuops.gate.slurm_drains import record_drains
from gpuops.host.clock import FakeClock
from gpuops.slurm.scontrol import SlurmNode
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest

S = 1_000_000
HOUR_US = 3600 * S


class Slurm:
    """A `scontrol` and the clock; ``n1`` to ``n3`` are in the store, ``cpu1`` is not."""

    def __init__(self, url):
        self.url = url
        self.clock = FakeClock()
        self.nodes_by_name = {}
        self.before_answer = lambda: None
        for name in ("n1", "n2", "n3", "cpu1"):
            self.resume(name)

    def resume(self, name):
        self.nodes_by_name[name] = SlurmNode(name=name, states=frozenset({"IDLE"}))

    def drain(self, name, reason, by="ann"):
        self.nodes_by_name[name] = SlurmNode(
            name=name,
            states=frozenset({"IDLE", "DRAIN"}),
            reason=reason,
            reason_by=by,
            reason_us=self.clock.now_us() // S * S,
        )

    def nodes(self):
        self.before_answer()
        return list(self.nodes_by_name.values())

    def record(self, **more):
        found = record_drains(self, self.url, cluster="c1", clock=self.clock, **more)
        return [(item.node, item.drained, item.actor) for item in found.changes]


@pytest.fixture
def slurm(store_url):
    teller = Teller()
    for name in ("n1", "n2", "n3"):
        teller.tell("node.seen", {"boot_us": 1}, node=name)
    others = Teller(1)
    others.tell("node.drained", {"reason": "of another cluster", "actor": "bob"}, node="n3")
    with open_store(store_url, mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes(teller.lines, cluster="c1"), 1)
        ingest(connection, envelopes(others.lines, cluster="c2"), 1)
    return Slurm(store_url)


def rows(slurm, query):
    with open_store(slurm.url, mode="read") as store, store.begin() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def drains(slurm):
    return rows(
        slurm,
        "SELECT node, actor, reason, round(hours) FROM v_drains WHERE cluster = 'c1'"
        " AND until IS NOT NULL ORDER BY node, drained",
    )


def test_drains_and_resumes_are_recorded_once_with_their_hours(slurm):
    slurm.drain("n1", "swapping a cable")
    slurm.drain("n2", "gpuops: fail gpu_lost")
    slurm.drain("cpu1", "no node of gpuops")
    slurm.clock.advance(60)

    assert slurm.record(dry_run=True) == [("n1", True, "administrator ann")]
    assert slurm.record() == [("n1", True, "administrator ann")]
    assert slurm.record() == []

    slurm.clock.advance(2 * 3600)
    slurm.resume("n1")
    slurm.resume("n2")
    assert slurm.record() == [("n1", False, "administrator")]
    assert slurm.record() == []
    assert drains(slurm) == [("n1", "administrator ann", "swapping a cable", 2.0)]

    slurm.clock.advance(1)
    slurm.drain("n1", "swapping a cable", by="bob")
    assert slurm.record() == [("n1", True, "administrator bob")]
    assert rows(slurm, "SELECT count(*) FROM events WHERE node = 'cpu1'") == [(0,)]


def test_a_repair_and_a_burn_in_end_no_drain(slurm):
    slurm.drain("n1", "swapping a cable")
    slurm.clock.advance(60)
    slurm.record()
    teller = Teller(2)
    teller.now_us = slurm.clock.now_us() + 60 * S
    repaired = {"entity": {"kind": "node", "id": "n1"}, "by": "ann", "what": "a cable"}
    teller.tell("node.repaired", repaired, node="n1")
    with open_store(slurm.url, mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes(teller.lines, cluster="c1"), 1)
    slurm.clock.advance(2 * 3600)

    assert slurm.record() == []
    slurm.resume("n1")
    assert slurm.record() == [("n1", False, "administrator")]
    assert drains(slurm) == [("n1", "administrator ann", "swapping a cable", 2.0)]


def test_two_hosts_at_once_record_a_drain_once(slurm):
    slurm.drain("n1", "swapping a cable")
    together = threading.Barrier(2, timeout=30)
    slurm.before_answer = together.wait
    found = []
    threads = [threading.Thread(target=lambda: found.extend(slurm.record())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [("n1", True, "administrator ann")]
    assert rows(slurm, "SELECT count(*) FROM node_states WHERE actor <> 'bob'") == [(1,)]


def test_a_drain_is_not_lost_while_the_store_is_down(slurm):
    slurm.drain("n1", "swapping a cable")
    url, slurm.url = slurm.url, "postgresql+psycopg://nobody@127.0.0.1:1/gpuops"
    with pytest.raises(StoreUnreachableError):
        slurm.record()

    slurm.url = url
    slurm.clock.advance(3600)
    assert slurm.record() == [("n1", True, "administrator ann")]
    assert rows(slurm, "SELECT t_us FROM node_states WHERE actor <> 'bob'") == [
        (slurm.clock.now_us() - HOUR_US,)
    ]


def test_a_slurmctld_that_is_down_is_one_error(tmp_path):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    program.chmod(0o755)
    env = {
        "GPUOPS_SLURM_BIN_DIR": str(tmp_path),
        "GPUOPS_STORE": f"sqlite:///{tmp_path}/store.db",
    }
    done = gpuops("slurm", "drains", "--dry-run", env=env)

    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == (
        "gpuops: scontrol show nodes exited with code 1: Unable to contact slurm controller\n"
    )
