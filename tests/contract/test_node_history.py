"""What the events of a node come to: strikes, parts, drains, repairs, our own failures."""

import pytest
from sqlalchemy import select
from support.stories import START_US, Teller, dump, envelopes, incident, node_incident, story

from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    FailureClass,
    IncidentState,
    Side,
)
from gpuops.store import schema
from gpuops.store.checks import check_runs
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest, rebuild_projections
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import SpoolLineError


@pytest.fixture
def store(store_url):
    with open_store(store_url, mode="write") as opened:
        yield opened


def put(store, lines, uid=0):
    with store.begin() as connection:
        return ingest(connection, envelopes(lines, uid=uid), 7)


def told(kind, payload, **more):
    teller = Teller(more.pop("seed", 0))
    teller.tell(kind, payload, **more)
    return teller.lines


def rows(store, table, *names):
    with store.begin() as connection:
        found = connection.execute(select(*(table.c[name] for name in names)))
        return sorted(tuple(row) for row in found)


def strikes(store):
    return rows(store, schema.strikes, "entity_kind", "entity_id", "weight")


def test_an_incident_of_a_node_is_one_strike_however_often_it_is_told(store):
    for rev in (1, 2, 3):
        put(store, told("incident.recorded", node_incident(rev=rev).to_json(), seed=rev))

    assert strikes(store) == [("gpu", "GPU-1", 1.0)]


def test_an_incident_that_only_users_tell_of_is_no_strike(store):
    put(store, told("incident.recorded", node_incident().to_json()), uid=1000)

    assert strikes(store) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"confidence": Confidence.PROBABLE}, [("gpu", "GPU-1", 0.5)]),
        ({"confidence": Confidence.SYMPTOM_ONLY}, []),
        ({"confidence": Confidence.UNKNOWN}, []),
        ({"side": Side.USER}, []),
        ({"side": Side.AMBIGUOUS}, []),
        ({"run_id": "r1"}, []),
        ({"failure_class": FailureClass.GPU_CONFIG}, []),
        ({"failure_class": FailureClass.STORAGE_SHARED_FS}, []),
        ({"culprits": ()}, []),
        ({"culprits": (Entity(EntityKind.NIC, "0x1"),)}, [("nic", "0x1", 1.0)]),
        ({"culprits": (Entity(EntityKind.DISK, "/dev/sda"),)}, [("node", "n1", 1.0)]),
    ],
)
def test_a_strike_is_against_what_a_known_fault_of_the_machine_blames(store, changes, expected):
    put(store, told("incident.recorded", node_incident(**changes).to_json()))

    assert strikes(store) == expected


def test_a_users_account_of_a_nodes_incident_changes_nothing(store):
    put(store, told("incident.recorded", node_incident().to_json()))
    lie = node_incident(state=IncidentState.CLOSED, authority=999, rev=999)
    put(store, told("incident.recorded", lie.to_json(), seed=2), uid=1000)

    with store.begin() as connection:
        (found,) = run_queries.incidents(connection)
    assert found.state is IncidentState.OPEN


def test_the_parts_that_root_saw_are_kept_with_when(store):
    first = story(1)
    put(store, first)

    seen = [x.event.t_us for x in first if x.event.kind == "check.ran" and x.event.node == "n1"]
    found = rows(store, schema.components, "kind", "component_id", "first_seen_us")
    assert ("gpu", "GPU-1", seen[0]) in found
    assert len(found) == 2


def test_a_part_that_only_a_user_saw_is_not_kept(store):
    put(store, story(1), uid=1000)

    assert rows(store, schema.components, "component_id") == []


def test_a_check_run_keeps_its_job_profile_and_mode(store):
    put(store, story(1))

    kept = rows(store, check_runs, "job_id", "profile", "mode")
    assert kept == [("17", "h100", "observe")] * 2


REPAIR = {"entity": {"kind": "gpu", "id": "GPU-1"}, "by": "ada", "what": "a new GPU"}


@pytest.mark.parametrize(
    ("kind", "payload", "table"),
    [
        ("node.repaired", REPAIR, schema.repairs),
        ("node.drained", {"reason": "broken", "actor": "gpuops"}, schema.node_states),
        ("node.resumed", {"reason": "well", "actor": "gpuops"}, schema.node_states),
    ],
)
def test_only_root_drains_resumes_and_repairs(store, kind, payload, table):
    put(store, told(kind, payload), uid=1000)
    before = rows(store, table, "t_us")
    put(store, told(kind, payload, seed=1))

    assert before == []
    assert len(rows(store, table, "t_us")) == 1


@pytest.mark.parametrize(
    "payload",
    [
        {**REPAIR, "entity": None},
        {**REPAIR, "entity": {"kind": "moon", "id": "1"}},
        {**REPAIR, "entity": {"kind": "gpu"}},
        {**REPAIR, "by": None},
    ],
)
def test_a_repair_that_does_not_say_of_what_or_by_whom_is_refused(store, payload):
    with pytest.raises(SpoolLineError):
        put(store, told("node.repaired", payload))


def test_our_own_failures_are_one_incident_a_day_and_blame_nobody(store):
    teller = Teller()
    for day in (0, 0, 0, 1):
        teller.now_us = START_US + day * 86_400_000_000
        teller.tell("tool.failed", what="judge of check x", error="KeyError: 'y'", traceback="a\nb")
    put(store, teller.lines, uid=1000)

    with store.begin() as connection:
        found = run_queries.incidents(connection)
    assert len(found) == 2
    assert {(i.failure_class, i.side, i.culprits) for i in found} == {
        (FailureClass.TOOL, Side.TOOL, ())
    }
    assert found[0].title == "gpuops itself failed on n1: judge of check x"
    assert found[0].evidence[0].lines == ("a", "b")


def test_an_own_failure_that_says_nothing_is_an_incident_all_the_same(store):
    put(store, told("tool.failed", {"what": ["odd"], "error": 7, "traceback": {"x": 1}}))

    with store.begin() as connection:
        assert len(run_queries.incidents(connection)) == 1


def test_every_culprit_leads_to_its_incident(store):
    put(store, told("incident.recorded", node_incident().to_json()))
    put(store, told("incident.recorded", incident("r1", 0).to_json(), seed=1))

    found = rows(store, schema.incident_culprits, "entity_kind", "entity_id")
    assert found == [("gpu", "GPU-1"), ("node", "n1"), ("node", "n1"), ("rank", "1")]


def test_telling_all_events_again_changes_nothing(store):
    put(store, story(3))
    put(store, story(4), uid=1000)
    with store.begin() as connection:
        before = dump(connection)
        rebuild_projections(connection)

        assert dump(connection) == before


def test_a_boot_is_known_from_the_first_check_in_it_until_more_is_told(store):
    teller = Teller()
    run = {"suite": "s", "trigger": "prolog", "start_us": 1, "end_us": 2, "verdict": "pass"}
    for boot_us in (50, 51):
        teller.tell("check.ran", run, boot_us=boot_us, findings=[])
    put(store, list(reversed(teller.lines)))
    first = rows(store, schema.boots, "boot_id", "boot_us", "kernel")
    teller.tell("node.seen", boot_us=49, kernel="6.1")
    put(store, teller.lines)

    assert first == [("boot-n1", 50, None)]
    assert rows(store, schema.boots, "boot_id", "boot_us", "kernel") == [("boot-n1", 49, "6.1")]


def test_what_a_node_needs_is_the_runbooks_advice_and_no_act(store):
    put(store, told("incident.recorded", node_incident().to_json()))
    put(store, told("incident.recorded", incident("r1", 0).to_json(), seed=1))

    found = rows(store, schema.actions, "kind", "actor", "dry_run")
    assert found == [("drain", "runbook", True), ("restart", "policy", False)]
