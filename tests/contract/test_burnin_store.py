"""What burn-ins and sweeps leave in a store: the same rows in any order, only root's count."""

import random
from inspect import isgenerator

import pytest
from sqlalchemy import select, text
from support.stories import START_US, Teller, burnin, dump, envelopes, measured, pair

from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.store import schema
from gpuops.store.burnin import measurements, pair_tests
from gpuops.store.columns import derived_id
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest, rebuild_projections
from gpuops.store.prune import Retention, prune
from gpuops.store.queries import burnin_queries
from gpuops.store.queries.burnin_queries import passed_measurements

DAY_US = 86_400 * 10**6


@pytest.fixture
def store(store_url):
    with open_store(store_url, mode="write") as opened:
        yield opened


def put(store, lines, uid=0, cluster="c1"):
    with store.begin() as connection:
        return ingest(connection, envelopes(lines, uid=uid, cluster=cluster), 7)


def look(store, query, *args, **kwargs):
    with store.begin() as connection:
        found = query(connection, *args, **kwargs)
        return list(found) if isgenerator(found) else found


def values(rows):
    return sorted((row.node, row.part_id, row.value) for row in rows)


def test_any_order_and_repetition_leave_the_same_rows_and_a_rebuild_none_other(store, tmp_path):
    teller = Teller(1)
    for node in ("n1", "n2"):
        burnin(teller, node)
    for number in range(3):
        teller.tell("sweep.tested", pair(round=number, rail=number))
    put(store, teller.lines)
    before = look(store, dump)
    shuffled = [*teller.lines, *teller.lines[::2]]
    random.Random(2).shuffle(shuffled)

    with open_store(f"sqlite:///{tmp_path}/other.db", mode="write") as other:
        for start in range(0, len(shuffled), 3):
            put(other, shuffled[start : start + 3])
        assert look(other, dump) == before

    with store.begin() as connection:
        for table in (measurements, pair_tests):
            connection.execute(table.delete())
        rebuild_projections(connection)
    assert look(store, dump) == before
    assert (len(before["measurements"]), len(before["pair_tests"])) == (4, 3)


def test_learning_takes_only_what_root_measured_in_runs_that_passed(store):
    root, user = Teller(1), Teller("user")
    burnin(root, "n1")
    burnin(root, "n2", status="warn")
    burnin(root, "n3", values=(None, 700.0), status="pass")
    burnin(root, "n4", shape="a100")
    burnin(user, "n5", values=(9999.0,))
    forged = Teller("forged")
    run_of_root = root.lines[0].event.payload["check_run"]
    forged.tell("burnin.measured", measured(run_of_root, value=1.0), node="n1")
    put(store, root.lines)
    put(store, [*user.lines, *forged.lines], uid=1000)

    found = look(store, passed_measurements, cluster="c1", since_us=0, shape="h100-sxm")

    assert values(found) == [("n1", "GPU-0", 790.0), ("n1", "GPU-1", 780.0), ("n3", "GPU-1", 700.0)]
    assert found[0].software == {"driver": "570.124", "nccl": "2.27.7"}
    assert found[0].higher_is_better is True
    assert look(store, passed_measurements, cluster="c1", since_us=START_US + 10**12) == []
    assert look(store, passed_measurements, cluster="other", since_us=0) == []


def slow(kind, name, check="burnin"):
    return Finding(
        check=check,
        entity=Entity(kind, name),
        status=Status.FAIL,
        value=500.0,
        unit="GB/s",
        threshold=">= 700 GB/s",
        source="learned: 128 nodes",
        message="slow",
        failure_class=FailureClass.GPU_SLOW,
    )


def test_the_last_burnin_of_a_node_has_what_did_not_pass(store):
    teller = Teller(1)
    burnin(teller, "n1")
    found = (slow(EntityKind.GPU, "GPU-1"),)
    last = burnin(teller, "n1", "fail", (790.0, 500.0, None), found, test="hbm_copy")
    burnin(teller, "n2")
    put(store, teller.lines)
    user = Teller("user")
    user.now_us = teller.now_us
    burnin(user, "n1", values=(1.0,))
    put(store, user.lines, uid=1000)

    found = look(store, burnin_queries.last_burnin, derived_id("node", "c1", "n1"))

    assert (found.check_run_id, found.status) == (last, "fail")
    assert [item.value for item in found.measurements] == [790.0, 500.0, None]
    assert {item.test for item in found.measurements} == {"hbm_copy"}
    (finding,) = found.findings
    assert finding.items() <= slow(EntityKind.GPU, "GPU-1").to_json().items()
    assert finding.keys() >= {"entity", "value", "threshold", "source", "message"}
    assert look(store, burnin_queries.last_burnin, derived_id("node", "c1", "n9")) is None


def test_roots_burn_ins_and_repairs_are_states_of_the_node(store):
    root, user = Teller(1), Teller("user")
    burnin(root, status="fail")
    part = {"entity": {"kind": "node", "id": "n1"}, "by": "ada", "what": "a new GPU"}
    root.tell("node.repaired", part, node="n1")
    passed = burnin(root, status="warn")
    again = {"suite": "burnin", "trigger": "manual", "verdict": "pass", "run": passed}
    root.tell("check.unchanged", again, node="n1", start_us=root.now_us, first_us=1, runs=2)
    root.tell("check.ran", {**again, "suite": "full"}, node="n1", start_us=1, end_us=1, findings=[])
    burnin(user)
    put(store, root.lines)
    put(store, root.lines)
    put(store, user.lines, uid=1000)

    with store.begin() as connection:
        rebuild_projections(connection)
        state = schema.node_states.c
        found = connection.execute(select(state.state, state.reason, state.actor))
        told = sorted(map(tuple, found))
    assert told == [
        *[("burn_in", "gpuops burnin", "gpuops")] * 3,
        ("in_service", "its burn-in ended with pass", "gpuops"),
        ("in_service", "its burn-in ended with warn", "gpuops"),
        ("repair", "a new GPU", "ada"),
    ]


def test_a_burnin_that_measured_nothing_is_the_last_one(store):
    teller = Teller(1)
    burnin(teller, "n1")
    last = burnin(teller, "n1", status="unknown", values=())
    put(store, teller.lines)

    found = look(store, burnin_queries.last_burnin, derived_id("node", "c1", "n1"))

    assert (found.check_run_id, found.status, found.measurements) == (last, "unknown", ())


def test_runs_with_one_result_have_the_values_of_the_last_one(store):
    teller = Teller(1)
    run_id = burnin(teller, "n1", values=(790.0, 780.0))
    part = {"kind": "gpu", "id": "GPU-0"}
    teller.tell("burnin.measured", measured(run_id, part=part, value=785.0), node="n1")
    put(store, teller.lines)

    found = look(store, burnin_queries.last_burnin, derived_id("node", "c1", "n1"))

    assert [item.value for item in found.measurements] == [785.0, 780.0]


def ended(sweep, *findings):
    return {"sweep": sweep, "findings": [finding.to_json() for finding in findings]}


def test_the_last_sweep_of_a_node_is_the_newest_that_tested_it(store):
    teller = Teller(1)
    teller.tell("sweep.tested", pair("n1", "n2", sweep="old"))
    teller.tell("sweep.tested", pair("n3", "n1", sweep="new", outcome="slow", value=200.0))
    teller.tell("sweep.tested", pair("n2", "n4", sweep="new", outcome="timeout", value=None))
    teller.tell("sweep.tested", pair("n1", "n4", sweep="new", round=1))
    teller.tell("sweep.tested", pair("n2", "n3", sweep="newest"))
    about = [slow(EntityKind.NODE, name, "sweep") for name in ("n1", "n11")]
    about.append(slow(EntityKind.PAIR, "n1,n3", "sweep"))
    teller.tell("sweep.ended", ended("new", *about))
    put(store, teller.lines)
    user = Teller("user")
    user.now_us = teller.now_us
    user.tell("sweep.tested", pair("n1", "n2", sweep="forged", outcome="fail"))
    user.tell("sweep.ended", ended("new", slow(EntityKind.NODE, "n1", "forged")))
    put(store, user.lines, uid=1000)

    found = look(store, burnin_queries.last_sweep, "c1", "n1")
    everything = look(store, burnin_queries.pair_tests_since, "c1", 0)
    second_us = teller.lines[1].event.t_us
    later = look(store, burnin_queries.pair_tests_since, "c1", second_us)
    own = look(store, burnin_queries.pair_tests_since, "c1", 0, 1000)
    pairs = look(store, burnin_queries.tested_pairs, "c1", second_us, 0)
    own_pairs = look(store, burnin_queries.tested_pairs, "c1", second_us, 1000)

    assert [(row.node_a, row.node_b, row.outcome, row.value) for row in found.tests] == [
        ("n1", "n3", "slow", 200.0),
        ("n1", "n4", "pass", 365.0),
    ]
    assert list(found.findings) == [about[0].to_json(), about[2].to_json()]
    assert [row.sweep_id for row in everything] == ["old", "new", "new", "new", "newest"]
    assert later == everything[1:]
    assert [row.sweep_id for row in own] == [*(row.sweep_id for row in everything), "forged"]
    assert look(store, burnin_queries.last_sweep, "c1", "n9") is None
    assert pairs == {("n1", "n3"), ("n2", "n4"), ("n1", "n4"), ("n2", "n3")}
    assert own_pairs == {*pairs, ("n1", "n2")}


def test_a_sweep_is_found_by_its_id_and_has_the_tests_of_who_recorded_it(store):
    root, user = Teller(1), Teller("user")
    for sweep in ("old", "new"):
        root.tell("sweep.ended", ended(sweep))
        root.tell("sweep.tested", pair(sweep=sweep, round=1))
        root.tell("sweep.tested", pair(sweep=sweep))
    user.now_us = root.now_us
    user.tell("sweep.ended", ended("own"))
    user.tell("sweep.tested", pair(sweep="old", outcome="fail"))
    put(store, root.lines)
    put(store, user.lines, uid=1000)

    def ids(sweep_id=None, cluster="c1"):
        found = look(store, burnin_queries.sweeps, cluster, sweep_id)
        return [(row.payload["sweep"], row.uid) for row in found]

    assert ids() == [("own", 1000), ("new", 0), ("old", 0)]
    assert (ids("old"), ids("ol"), ids('old"'), ids("%")) == ([("old", 0)], [], [], [])
    assert ids(cluster="c2") == []
    of_root = look(store, burnin_queries.sweep_tests, "c1", "old", 0)
    assert [(row.round, row.outcome) for row in of_root] == [(0, "pass"), (1, "pass")]


def test_the_last_repair_of_a_node_is_that_of_any_part_of_it(store):
    teller = Teller(1)
    for entity in ({"kind": "node", "id": "n1"}, {"kind": "nic", "id": "0x1"}):
        teller.tell("node.repaired", node="n1", entity=entity, by="ada", what="a new cable")
    teller.tell("node.seen", node="n2")
    put(store, teller.lines)

    assert look(store, burnin_queries.last_repairs, "c1") == {"n1": teller.lines[1].event.t_us}
    assert look(store, burnin_queries.last_repairs, "c2") == {}


def test_both_go_with_the_retention_of_checks(store):
    teller = Teller(1)
    burnin(teller, "n1")
    teller.tell("sweep.tested", pair())
    put(store, teller.lines)
    middle_us = teller.now_us
    teller.now_us += 2 * DAY_US
    burnin(teller, "n1")
    teller.tell("sweep.tested", pair(round=1))
    put(store, teller.lines)
    day = Retention(events_days=0, checks_days=1, samples_days=0, progress_days=0)

    deleted = prune(store, day, middle_us + DAY_US + 1, pause=lambda _s: None)

    assert deleted == {"check_runs": 1, "check_results": 0, "measurements": 2, "pair_tests": 1}
    with store.begin() as connection:
        assert len(connection.execute(select(measurements)).all()) == 2
        assert connection.execute(select(pair_tests.c.round)).scalars().all() == [1]


def test_the_views_name_nodes_and_say_whether_root_measured(store):
    root, user = Teller(1), Teller("user")
    burnin(root, "n1", values=(790.0,), status="warn")
    root.tell("sweep.tested", pair())
    burnin(user, "n2", values=(1.0,))
    user.tell("sweep.tested", pair(outcome="fail"))
    put(store, root.lines)
    put(store, user.lines, uid=1000)

    with store.begin() as connection:
        measured_by = connection.execute(
            text("SELECT node, value, run_status, by_root FROM v_measurements ORDER BY node")
        ).all()
        tested_by = connection.execute(
            text("SELECT node_a, outcome, by_root FROM v_pair_tests ORDER BY outcome")
        ).all()
    assert [(*row[:3], bool(row[3])) for row in measured_by] == [
        ("n1", 790.0, "warn", True),
        ("n2", 1.0, "pass", False),
    ]
    assert [(*row[:2], bool(row[2])) for row in tested_by] == [
        ("n1", "fail", False),
        ("n1", "pass", True),
    ]
