"""The fuse: how many nodes may be drained for one check, held against SQLite and Postgres alike."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert
from support.fuse_fleet import MemoryPermits

from gpuops.errors import StoreUnreachableError
from gpuops.model import FailureClass, IncidentState
from gpuops.store import schema
from gpuops.store.checks import check_runs
from gpuops.store.columns import derived_id
from gpuops.store.engine import open_store
from gpuops.store.fuse import CauseKind, FuseSettings
from gpuops.store.permits import DrainRequest, release_permits, request_permits
from gpuops.store.queries import run_queries
from gpuops.store.queries.node_queries import fetch_node_records

NOW_US = 1_760_000_000_000_000
MINUTE_US = 60_000_000
HARDWARE, SHARED, LIMIT = CauseKind
# Each answer is a transaction, with its syncs, and some of these tests ask for dozens.
pytestmark = [pytest.mark.quick_disk, pytest.mark.timeout(300)]


def wanted(check="gpu_count", kind=LIMIT, failure_class=FailureClass.GPU_MISSING):
    return DrainRequest(check=check, failure_class=failure_class, kind=kind)


def ask_all(store_url, node, requests, *, minute=0, now_us=NOW_US, **changes):
    return request_permits(
        store_url,
        requests,
        node=node,
        cluster=changes.pop("cluster", "c1"),
        now_us=now_us + minute * MINUTE_US,
        deadline_s=200.0,
        settings=FuseSettings(**changes),
    )


def ask(store_url, node, request=None, **changes):
    return ask_all(store_url, node, [request or wanted()], **changes)[0]


def granted(store_url, node, request=None, **changes):
    return ask(store_url, node, request, **changes).granted


def granted_at_last(store_url, node, request=None, **changes):
    """Ask again where a busy machine keeps the store from answering, as the next health check."""
    while True:
        with contextlib.suppress(StoreUnreachableError):
            return granted(store_url, node, request, **changes)


def incidents(store_url):
    with open_store(store_url, mode="read") as store, store.begin() as connection:
        return run_queries.incidents(connection)


def fleet_of(store_url, count, *, last_seen_us=NOW_US, uid=0):
    """Have *count* nodes in the store that *uid* last checked then."""
    cluster_id = derived_id("cluster", "c1")
    rows = [
        {
            "id": derived_id("node", "c1", f"f{n}"),
            "cluster_id": cluster_id,
            "hostname": f"f{n}",
            "first_seen_us": last_seen_us,
            "last_seen_us": last_seen_us,
        }
        for n in range(count)
    ]
    with open_store(store_url, mode="write") as store, store.begin() as connection:
        connection.execute(insert(schema.clusters).values(id=cluster_id, name="c1"))
        connection.execute(insert(schema.nodes), rows)
        run = {
            "suite": "health",
            "trigger": "health",
            "start_us": last_seen_us,
            "last_us": last_seen_us,
            "runs": 1,
            "status": "pass",
            "origin_uid": uid,
        }
        connection.execute(
            insert(check_runs), [{"id": row["id"], "node_id": row["id"], **run} for row in rows]
        )


@pytest.mark.parametrize(
    ("kind", "drained"),
    # Of 100 nodes: the fuse trips above 3, and 10 may be drained while it is tripped.
    [(HARDWARE, 10), (SHARED, 3), (LIMIT, 3)],
)
def test_how_many_nodes_of_a_hundred_are_drained_for_one_check(store_url, kind, drained):
    fleet_of(store_url, 100)

    answers = [granted(store_url, f"f{n}", wanted(kind=kind), minute=n // 3) for n in range(15)]

    assert answers == [True] * drained + [False] * (15 - drained)


def test_nodes_that_only_a_user_has_checked_are_no_part_of_the_fleet(store_url):
    """One who invents nodes would raise the fuse and the cap."""
    fleet_of(store_url, 250, uid=1000)

    assert sum(granted(store_url, f"f{n}") for n in range(5)) == 3


def test_nodes_that_were_not_seen_for_a_day_are_no_part_of_the_fleet(store_url):
    fleet_of(store_url, 250, last_seen_us=NOW_US - 1441 * MINUTE_US)

    assert sum(granted(store_url, f"f{n}") for n in range(5)) == 3


def test_a_node_that_was_granted_is_granted_again(store_url):
    for node in ("n1", "n2", "n3", "n4"):
        ask(store_url, node)

    assert granted(store_url, "n1", minute=1)
    assert granted(store_url, "n2", minute=9)


def test_checks_and_clusters_have_fuses_of_their_own(store_url):
    for node in ("n1", "n2", "n3", "n4"):
        ask(store_url, node)

    assert granted(store_url, "n4", wanted("gpu_xid"))
    assert granted(store_url, "n4", cluster="c2")
    assert not granted(store_url, "n4")


def test_a_refused_node_counts_for_ten_minutes(store_url):
    for node in ("n1", "n2", "n3"):
        ask(store_url, node, nodes=1)
    release_permits(store_url, cluster="c1", node="n1", before_us=NOW_US + 1)

    end_us = NOW_US + 10 * MINUTE_US
    assert not granted(store_url, "n4", now_us=end_us - 1, nodes=2)
    assert granted(store_url, "n5", now_us=end_us, nodes=2)


def test_nodes_that_are_drained_count_until_they_are_back(store_url):
    """A wrong rule that fails a node every hour would else drain a cluster in a week."""
    answers = [granted(store_url, f"n{n}", minute=60 * n) for n in range(5)]
    assert answers == [True, True, True, False, False]

    release_permits(store_url, cluster="c1", node="n2", before_us=NOW_US + 300 * MINUTE_US)

    assert granted(store_url, "n6", minute=301)
    assert not granted(store_url, "n7", minute=302)


def test_a_permit_without_a_health_check_counts_for_a_week(store_url):
    for node in ("n1", "n2", "n3"):
        ask(store_url, node)

    assert not granted(store_url, "n4", minute=7 * 1440 - 1)
    assert granted(store_url, "n5", minute=7 * 1440)


def test_nodes_that_were_refused_keep_the_fuse_tripped_while_they_fail(store_url):
    for minute in range(0, 30, 5):
        for node in ("n1", "n2", "n3", "n4", "n5", "n6"):
            ask(store_url, node, minute=minute)
    for node in ("n1", "n2", "n3"):
        release_permits(store_url, cluster="c1", node=node, before_us=NOW_US + 30 * MINUTE_US)

    assert not granted(store_url, "n7", minute=29)


def test_a_clock_that_is_far_ahead_holds_nobody_up(store_url):
    for node in ("n1", "n2", "n3"):
        ask(store_url, node, minute=100_000)

    assert granted(store_url, "n4")


def test_what_a_tripped_fuse_refuses_for_one_check_another_may_drain(store_url):
    for node in ("n1", "n2", "n3", "n4"):
        ask(store_url, node)

    permits = ask_all(store_url, "n5", [wanted(), wanted("gpu_clocks")], max_drained=4)
    above = ask_all(store_url, "n6", [wanted(), wanted("gpu_clocks")], max_drained=4)

    assert [permit.granted for permit in permits] == [False, True]
    assert [permit.granted for permit in above] == [False, False]


def test_a_dead_file_server_does_not_drain_three_nodes_for_each_check_that_sees_it(store_url):
    checks = [wanted("mount_alive", SHARED), wanted("mount_writable", SHARED)]

    answers = [ask_all(store_url, f"n{n}", checks, max_drained=100) for n in range(8)]

    assert [answer[-1].granted for answer in answers] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("kind", "failure_class", "title"),
    [
        (LIMIT, FailureClass.TOOL, "check gpu_count is suspect"),
        (SHARED, FailureClass.GPU_MISSING, "a shared network, storage or switch is suspect"),
        (HARDWARE, FailureClass.GPU_MISSING, "more faulty hardware than gate.max_drained"),
    ],
)
def test_a_tripped_fuse_is_one_incident_of_the_whole_cluster(store_url, kind, failure_class, title):
    for node in ("n1", "n2", "n3", "n4", "n5", "n4"):
        answer = ask(store_url, node, wanted(kind=kind), minute=1)

    (found,) = incidents(store_url)
    assert found.failure_class is failure_class
    assert found.state is IncidentState.OPEN
    assert found.culprits == ()
    assert title in found.title
    assert "n1, n2, n3, n4, n5" in found.evidence[0].text
    assert found.id[-8:] in answer.reason


def test_a_fuse_that_trips_again_a_day_later_is_another_incident(store_url):
    for minute in (0, 1440):
        for node in ("n1", "n2", "n3", "n4"):
            ask(store_url, node, minute=minute)

    assert len(incidents(store_url)) == 2


def test_of_many_nodes_at_once_three_are_granted(store_url):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: granted_at_last(store_url, f"n{n}"), range(16)))

    assert sum(answers) == 3
    assert len(incidents(store_url)) == 1


def test_of_many_nodes_at_once_hardware_faults_drain_no_more_than_the_cap(store_url):
    def one(n):
        return granted_at_last(store_url, f"n{n}", wanted(kind=HARDWARE), max_drained=7)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(20)))

    assert sum(answers) == 7


def test_the_fleets_count_is_told_to_each_node(store_url):
    fleet_of(store_url, 5)
    for node in ("f1", "f2"):
        ask(store_url, node)

    def records(node):
        return fetch_node_records(store_url, cluster="c1", node=node, now_us=NOW_US)

    assert (records("f0").fleet.seen, records("f0").fleet.drained) == (5, 2)
    assert records("f1").fleet.drained == 1
    assert (records("f0").holds_permit, records("f1").holds_permit) == (False, True)


def test_a_store_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreUnreachableError):
        ask(f"sqlite:///{tmp_path}/file/store.db", "n1")


def test_the_simulated_store_of_the_benchmark_answers_as_a_store_does(store_url):
    """`bench_fuse` measures with `MemoryPermits`: they are worth as much as this test."""
    fleet_of(store_url, 100)
    rng, settings = random.Random(5), FuseSettings(max_drained=8)
    memory, now_s = MemoryPermits(100, settings), NOW_US // 1_000_000
    checks = {"a": HARDWARE, "b": SHARED, "c": SHARED, "d": LIMIT}
    for _ in range(40):
        now_s += rng.choice((1, 60, 500))
        node, names = f"f{rng.randrange(20)}", rng.sample(sorted(checks), rng.randint(1, 3))
        if rng.random() < 0.1:
            release_permits(store_url, cluster="c1", node=node, before_us=(now_s + 1) * 1_000_000)
            memory.release(node)
            continue
        requests = [wanted(name, checks[name]) for name in names]
        permits = ask_all(store_url, node, requests, now_us=now_s * 1_000_000, max_drained=8)
        answers = memory.request(node, [(name, checks[name]) for name in names], now_s)
        assert [permit.granted for permit in permits] == answers
