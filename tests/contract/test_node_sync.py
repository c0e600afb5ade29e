"""What the store tells a node of itself: repairs and strikes, on SQLite and Postgres alike."""

import pytest
from support.stories import START_US, Teller, envelopes, node_incident

from gpuops.errors import SchemaMismatchError, StoreUnreachableError
from gpuops.host.node_state import FleetCount, Repair, Strikes
from gpuops.model import Confidence, Entity, EntityKind
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.queries.node_queries import STRIKE_DAYS, fetch_node_records

DAY_US = 86_400_000_000
NOW_US = START_US + 100 * DAY_US


class History:
    """Events of nodes, told at days before now."""

    def __init__(self, url):
        self.url = url
        self._count = 0

    def tell(self, kind, payload, *, node="n1", days=0.0, uid=0, cluster="c1"):
        self._count += 1
        teller = Teller(self._count)
        teller.now_us = NOW_US - round(days * DAY_US) - 10_000_000
        teller.tell(kind, payload, node=node)
        with open_store(self.url, mode="write") as store, store.begin() as connection:
            ingest(connection, envelopes(teller.lines, uid=uid, cluster=cluster), 1)
        return teller.now_us

    def seen(self, gpu="GPU-1", **more):
        finding = {
            "check": "gpu_lost",
            "entity": {"kind": "gpu", "id": gpu},
            "status": "pass",
            "message": "is there",
        }
        run = {"suite": "prolog", "trigger": "prolog", "start_us": 1, "end_us": 2}
        self.tell("check.ran", {**run, "verdict": "pass", "findings": [finding]}, **more)

    def failed(self, gpu="GPU-1", *, days=1.0, uid=0, node="n1", **changes):
        t_us = NOW_US - round(days * DAY_US)
        found = node_incident(
            node, gpu, id=f"i{self._count}", first_us=t_us, detected_us=t_us, **changes
        )
        self.tell("incident.recorded", found.to_json(), node=node, uid=uid)
        return t_us

    def repaired(self, kind="gpu", entity="GPU-1", **more):
        payload = {"entity": {"kind": kind, "id": entity}, "by": "ada", "what": "swapped"}
        return self.tell("node.repaired", payload, **more)

    def strikes(self, node="n1"):
        found = fetch_node_records(self.url, cluster="c1", node=node, now_us=NOW_US)[1]
        return {(item.entity_kind, item.entity_id): item.count for item in found}

    def repairs(self, node="n1"):
        return fetch_node_records(self.url, cluster="c1", node=node, now_us=NOW_US)[0]


@pytest.fixture
def history(store_url):
    return History(store_url)


def test_a_node_that_nobody_knows_has_nothing(history):
    found = fetch_node_records(history.url, cluster="c1", node="n1", now_us=NOW_US)

    assert found == ((), (), FleetCount(t_us=NOW_US, seen=0, drained=0), False)


def test_strikes_of_a_part_are_added_up(history):
    history.seen()
    history.failed(days=3)
    last_us = history.failed(days=1)

    (found,) = fetch_node_records(history.url, cluster="c1", node="n1", now_us=NOW_US)[1]
    assert found == Strikes(
        entity_kind="gpu",
        entity_id="GPU-1",
        count=2,
        last_us=last_us,
        why="gpu_hw.fell_off_bus",
    )


def test_the_node_itself_is_struck_for_what_no_part_is_blamed_for(history):
    history.failed(culprits=(Entity(EntityKind.NODE, "n1"),))

    assert history.strikes() == {("node", "n1"): 1}


@pytest.mark.parametrize(
    ("days", "expected"), [(STRIKE_DAYS - 0.01, 1), (STRIKE_DAYS, 0), (STRIKE_DAYS + 0.01, 0)]
)
def test_a_strike_counts_for_28_days(history, days, expected):
    history.seen()
    history.failed(days=days)

    assert sum(history.strikes().values()) == expected


def test_of_probable_causes_it_takes_two(history):
    history.seen()
    history.failed(confidence=Confidence.PROBABLE)
    one = history.strikes()
    history.failed(confidence=Confidence.PROBABLE)

    assert (one, history.strikes()) == ({}, {("gpu", "GPU-1"): 1})


def test_what_users_tell_is_no_strike(history):
    history.seen()
    history.failed(uid=1000)

    assert history.strikes() == {}


def test_a_part_takes_its_strikes_to_another_node(history):
    history.seen(days=5)
    history.failed(days=4)
    history.seen(node="n2", days=1)

    assert history.strikes("n1") == {}
    assert history.strikes("n2") == {("gpu", "GPU-1"): 1}


def test_a_node_of_another_cluster_has_its_own_strikes(history):
    found = node_incident("n1", culprits=(Entity(EntityKind.NODE, "n1"),), first_us=NOW_US)
    history.tell("incident.recorded", found.to_json(), cluster="c2")
    history.tell("node.seen", {})

    assert history.strikes() == {}


@pytest.mark.parametrize(
    ("repair", "left"),
    [
        ({"days": 3}, {("gpu", "GPU-1"): 1}),
        ({"days": 1}, {}),
        ({"kind": "node", "entity": "n1", "days": 1}, {}),
        ({"entity": "GPU-2", "days": 1}, {("gpu", "GPU-1"): 1}),
        ({"kind": "node", "entity": "n2", "node": "n2", "days": 1}, {("gpu", "GPU-1"): 1}),
        ({"days": 1, "uid": 1000}, {("gpu", "GPU-1"): 1}),
    ],
    ids=["before", "after", "node", "another GPU", "another node", "a user's"],
)
def test_a_repair_takes_away_the_strikes_before_it(history, repair, left):
    history.seen()
    history.failed(days=2)
    history.repaired(**repair)

    assert history.strikes() == left


def test_a_strike_that_a_later_account_takes_back_is_void(history):
    history.seen()
    t_us = NOW_US - DAY_US
    for rev, gpu in enumerate(("GPU-1", "GPU-2"), start=1):
        told = node_incident("n1", gpu, id="same", rev=rev, first_us=t_us)
        history.tell("incident.recorded", told.to_json())

    assert history.strikes() == {}


def test_of_each_thing_the_latest_repair_is_told(history):
    history.repaired(days=9)
    gpu_us = history.repaired(days=2)
    node_us = history.repaired("node", "n1", days=5)
    history.repaired(days=1, node="n2")

    assert history.repairs() == (
        Repair(entity_kind="gpu", entity_id="GPU-1", t_us=gpu_us, by="ada", what="swapped"),
        Repair(entity_kind="node", entity_id="n1", t_us=node_us, by="ada", what="swapped"),
    )


def test_a_store_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises((StoreUnreachableError, SchemaMismatchError)):
        fetch_node_records(f"sqlite:///{tmp_path}/none.db", cluster="c1", node="n1", now_us=NOW_US)
