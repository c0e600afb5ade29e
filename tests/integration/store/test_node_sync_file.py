"""What the store knows of a node comes into the node's file, within a deadline."""

import os
from dataclasses import replace

import pytest
from support.stories import Teller, envelopes, node_incident

from gpuops.gate.drain import DrainRecord, DrainStage, write_drain
from gpuops.gate.node_state import read_state
from gpuops.gate.permit import sync_from_store
from gpuops.gate.record import acknowledge
from gpuops.host.clock import SystemClock
from gpuops.host.node_state import Repair
from gpuops.model import FailureClass
from gpuops.store.engine import open_store
from gpuops.store.fuse import CauseKind
from gpuops.store.ingest.batch import ingest
from gpuops.store.migrate import upgrade_store
from gpuops.store.permits import DrainRequest, request_permits
from gpuops.store.queries.node_queries import fetch_node_records

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

UID = os.geteuid()
NOW_US = SystemClock().now_us()
OWN = Repair(entity_kind="gpu", entity_id="GPU-2", t_us=NOW_US, by="ada", what="reseated")

DRAIN = DrainRecord(
    id="d1", node="n1", hook="health", reason="x", check="x", failure_class="x", t_us=NOW_US
)


@pytest.fixture
def state_dir(tmp_path):
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    acknowledge(made, UID, OWN)
    return made


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path}/store.db"
    upgrade_store(made)
    teller = Teller()
    finding = {"check": "x", "entity": {"kind": "gpu", "id": "GPU-1"}, "status": "fail"}
    run = {"suite": "s", "trigger": "t", "start_us": 1, "end_us": 2, "verdict": "fail"}
    teller.tell("check.ran", {**run, "findings": [{**finding, "message": "lost"}]})
    told = node_incident(first_us=NOW_US, detected_us=NOW_US)
    teller.tell("incident.recorded", told.to_json())
    node = {"entity": {"kind": "node", "id": "n1"}, "by": "bob", "what": "a new board"}
    teller.tell("node.repaired", node)
    with open_store(made, mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes(teller.lines), 1)
    return made


def synced(url, state_dir):
    return sync_from_store(
        url, cluster="c1", node="n1", state_dir=state_dir, uid=UID, clock=SystemClock()
    )


def test_repairs_and_strikes_come_into_the_nodes_file_besides_its_own(url, state_dir):
    assert synced(url, state_dir) is None

    state = read_state(state_dir, UID)
    assert [(item.entity_id, item.count) for item in state.strikes] == [("GPU-1", 1)]
    assert [item.entity_id for item in state.repairs] == ["GPU-2", "n1"]
    assert (state.fleet.seen, state.fleet.drained) == (0, 0)


@pytest.mark.parametrize(("is_drained", "answer"), [(True, True), (False, False)])
def test_a_node_that_is_back_gives_its_permit_back(url, state_dir, is_drained, answer):
    request = DrainRequest(check="x", failure_class=FailureClass.GPU_MISSING, kind=CauseKind.LIMIT)
    asked_us = NOW_US - 600_000_000
    request_permits(url, [request], cluster="c1", node="n1", now_us=asked_us, deadline_s=20.0)
    if is_drained:
        write_drain(state_dir, DRAIN)

    assert synced(url, state_dir) is None

    found = fetch_node_records(url, cluster="c1", node="n1", now_us=NOW_US)
    assert found.holds_permit is answer


def test_a_drain_that_was_set_while_the_store_was_silent_counts_from_then_on(url, state_dir):
    kinds = {"failure_class": FailureClass.GPU_MISSING.value, "stage": DrainStage.SET.value}
    write_drain(state_dir, replace(DRAIN, **kinds))

    assert synced(url, state_dir) is None

    def drained(node):
        found = fetch_node_records(url, cluster="c1", node=node, now_us=SystemClock().now_us())
        return found.fleet.drained

    assert (drained("n1"), drained("n2")) == (0, 1)


def test_what_cannot_be_asked_is_said_and_changes_nothing(tmp_path, state_dir):
    before = read_state(state_dir, UID)

    said = synced(f"sqlite:///{tmp_path}/none.db", state_dir)

    assert "from the store: cannot open the store" in said
    assert read_state(state_dir, UID) == before
