"""The fuse: how many nodes may be drained for one check, held against SQLite and Postgres alike."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuops.errors import StoreUnreachableError
from gpuops.model import FailureClass, IncidentState
from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store
from gpuops.store.permits import request_permit
from gpuops.store.queries import run_queries

NOW_US = 1_760_000_000_000_000
MINUTE_US = 60_000_000
# Each answer is a transaction, with its syncs, and some of these tests ask for dozens.
pytestmark = pytest.mark.quick_disk


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request, tmp_path):
    if request.param == "sqlite":
        found = f"sqlite:///{tmp_path}/store.db"
    else:
        found = request.getfixturevalue("postgres_url")
    upgrade_store(found)
    return found


def ask(url, node, *, minute=0, **changes):
    wanted = {
        "cluster": "c1",
        "check": "gpu_count",
        "failure_class": "gpu_hw.missing",
        "now_us": NOW_US + minute * MINUTE_US,
        "deadline_s": 30.0,
        **changes,
    }
    return request_permit(url, node=node, **wanted)


def granted(url, node, **changes):
    return ask(url, node, **changes).granted


def incidents(url):
    with open_store(url, mode="read") as store, store.begin() as connection:
        return run_queries.incidents(connection)


def test_the_third_node_within_the_window_is_refused(url):
    assert [granted(url, node, minute=n) for n, node in enumerate(("n1", "n2", "n3", "n4"))] == [
        True,
        True,
        False,
        False,
    ]


def test_the_limit_can_be_set(url):
    assert [granted(url, f"n{n}", limit=2) for n in range(3)] == [True, False, False]


def test_a_node_that_was_granted_is_granted_again(url):
    for node in ("n1", "n2", "n3"):
        ask(url, node)

    assert granted(url, "n1", minute=1)
    assert granted(url, "n2", minute=9)


def test_checks_and_clusters_have_fuses_of_their_own(url):
    for node in ("n1", "n2", "n3"):
        ask(url, node)

    assert granted(url, "n3", check="gpu_xid")
    assert granted(url, "n3", cluster="c2")
    assert not granted(url, "n3")


@pytest.mark.parametrize(("later_us", "expected"), [(-1, False), (0, True), (1, True)])
def test_the_window_ends_after_ten_minutes(url, later_us, expected):
    ask(url, "n1")
    ask(url, "n2", minute=5)

    assert granted(url, "n3", now_us=NOW_US + 10 * MINUTE_US + later_us) is expected


def test_nodes_that_were_refused_keep_the_fuse_blown_while_they_fail(url):
    for minute in range(0, 30, 5):
        for node in ("n1", "n2", "n3", "n4", "n5", "n6"):
            ask(url, node, minute=minute)

    assert not granted(url, "n7", minute=29)


def test_a_clock_that_is_far_ahead_holds_nobody_up(url):
    ask(url, "n1", minute=100_000)
    ask(url, "n2", minute=100_000)

    assert granted(url, "n3")


def test_a_blown_fuse_is_one_incident_of_the_whole_cluster(url):
    for node in ("n1", "n2", "n3", "n4", "n3"):
        answer = ask(url, node, minute=1)

    (found,) = incidents(url)
    assert found.failure_class is FailureClass.TOOL
    assert found.state is IncidentState.OPEN
    assert found.culprits == ()
    assert "check gpu_count is suspect" in found.title
    assert "n1, n2, n3, n4" in found.evidence[0].text
    assert found.id[-8:] in answer.reason


def test_a_fuse_that_blows_again_a_day_later_is_another_incident(url):
    for minute in (0, 1440):
        for node in ("n1", "n2", "n3"):
            ask(url, node, minute=minute)

    assert len(incidents(url)) == 2


def test_of_many_nodes_at_once_two_are_granted(url):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: granted(url, f"n{n}"), range(16)))

    assert sum(answers) == 2
    assert len(incidents(url)) == 1


def test_a_store_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreUnreachableError):
        ask(f"sqlite:///{tmp_path}/file/store.db", "n1")
