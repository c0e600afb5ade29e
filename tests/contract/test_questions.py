"""The questions in docs/store.md: short, and the same right answers on both databases."""

import re
import time
from pathlib import Path

import pytest
from sqlalchemy import text
from support.stories import Teller, envelopes, node_incident

from gpuops.model import Entity, EntityKind, FailureClass, IncidentState, Side
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.queries import node_queries

DAY_US = 86_400 * 10**6
HOUR_US = DAY_US // 24
PAGE = Path(__file__).parents[2] / "docs" / "store.md"
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAMES = ("mttf", "lemons", "every_slot", "drained", "noisiest", "not_checked")


@pytest.fixture
def store(store_url):
    with open_store(store_url, mode="write") as opened, opened.begin() as connection:
        ingest(connection, envelopes(Fleet().lines), 1)
    with open_store(store_url, mode="read") as opened:
        yield opened


class Fleet:
    """Events of three nodes until now: n1 has a bad GPU, which also failed in n2 before."""

    def __init__(self):
        self.now_us = time.time_ns() // 1000
        self.teller = Teller("questions")
        for node in ("n1", "n2", "n3"):
            self.seen(node, 10)
        for days_ago in (5, 4, 3):
            self.incident("n1", "GPU-bad", days_ago)
        self.incident("n2", "GPU-bad", 8)
        self.incident("n2", "GPU-blamed", 7, then="GPU-other")
        self.incident("n3", "GPU-merged", 6, state=IncidentState.MERGED)
        self.incident("n3", "GPU-far", 9, then="GPU-farther", now_blamed="n4", side=Side.EXTERNAL)
        self.state("n1", "node.drained", 3.0)
        self.state("n1", "node.resumed", 2.0)
        self.state("n1", "node.drained", 0.5)
        for node, days_ago in (("n1", 0.1), ("n2", 2)):
            self.checked(node, days_ago)

    @property
    def lines(self):
        return self.teller.lines

    def tell(self, kind, node, days_ago, **payload):
        self.teller.now_us = self.now_us - round(days_ago * DAY_US)
        return self.teller.tell(kind, node=node, **payload)

    def seen(self, node, days_ago):
        self.tell("node.seen", node, days_ago, boot_us=1)

    def incident(self, node, gpu, days_ago, then=None, now_blamed=None, **changes):
        at_us = self.now_us - round(days_ago * DAY_US)
        values = {"first_us": at_us, "failure_class": FailureClass.GPU_FELL_OFF_BUS}
        values["id"] = f"incident-{node}-{days_ago}"
        accounts = [gpu, then] if then else [gpu]
        for rev, part in enumerate(accounts, 1):
            blamed = now_blamed if now_blamed and rev == len(accounts) else node
            culprits = (Entity(EntityKind.GPU, part), Entity(EntityKind.NODE, blamed))
            found = node_incident(node, part, rev=rev, culprits=culprits, **{**values, **changes})
            self.tell("incident.recorded", node, days_ago, **found.to_json())

    def state(self, node, kind, days_ago):
        self.tell(kind, node, days_ago, reason="gpuops: fail", actor="gpuops")

    def checked(self, node, days_ago, check="gpu_lost", status="fail"):
        at_us = self.now_us - round(days_ago * DAY_US)
        gpu = {"kind": "gpu", "id": "GPU-bad"}
        found = {"check": check, "entity": gpu, "status": status, "message": "lost"}
        run = {"suite": "health", "trigger": "periodic", "start_us": at_us, "end_us": at_us}
        event = self.tell(
            "check.ran", node, days_ago, **run, verdict=status, findings=[found], parts=[gpu]
        )
        told = {**run, "run": event.id, "first_us": at_us, "runs": 7, "verdict": status}
        self.tell("check.unchanged", node, days_ago, **told)


def lines_of_a_user():
    """Return what a user says who wants n2 to be a lemon, a GPU to be bad, a check to be noisy."""
    user = Fleet.__new__(Fleet)
    user.now_us, user.teller = time.time_ns() // 1000, Teller("user")
    for node, days_ago in (("n2", 1), ("n2", 1.5), ("n2", 2.5), ("n3", 1)):
        user.incident(node, "GPU-framed", days_ago, failure_class=FailureClass.GPU_CONFIG)
    user.checked("n3", 0.2)
    return user.teller.lines


def add(store, lines, uid=0):
    url = store.url.render_as_string(hide_password=False)
    with open_store(url, mode="write") as opened, opened.begin() as connection:
        ingest(connection, envelopes(lines, uid=uid), 1)


def asked(store, name):
    with store.begin() as connection:
        return [tuple(row) for row in connection.execute(text(QUERIES[NAMES.index(name)]))]


@pytest.mark.parametrize("name", ["lemons", "every_slot", "drained", "noisiest"])
def test_a_user_changes_no_answer_about_nodes_and_parts(store, name):
    before = asked(store, name)
    url = store.url.render_as_string(hide_password=False)
    with open_store(url, mode="write") as opened, opened.begin() as connection:
        ingest(connection, envelopes(lines_of_a_user(), uid=1000), 1)
        origins = connection.execute(text("SELECT DISTINCT by_root FROM v_culprits")).all()

    assert {bool(row[0]) for row in origins} == {True, False}
    assert [row[:-1] for row in asked(store, name)] == [row[:-1] for row in before]


def test_users_incidents_count_as_failures_and_the_answer_says_how_many_are_roots(store):
    add(store, lines_of_a_user(), uid=1000)

    counts = {row[0]: tuple(map(int, row[1:3])) for row in asked(store, "mttf")}
    assert counts == {"gpu_hw.fell_off_bus": (5, 5), "gpu_sw.config": (4, 0)}


def test_a_users_checks_and_incidents_change_no_figure_of_a_node(store):
    """The user checks n3, which root never did, and n2 later than root did; and blames all."""
    figures = "SELECT node, status, last_check FROM v_nodes ORDER BY node"
    with store.begin() as connection:
        before = node_queries.nodes(connection)
        seen = [tuple(row) for row in connection.execute(text(figures))]
    user = Fleet.__new__(Fleet)
    user.now_us, user.teller = time.time_ns() // 1000, Teller("user")
    user.checked("n2", 0.1)
    url = store.url.render_as_string(hide_password=False)
    with open_store(url, mode="write") as opened, opened.begin() as connection:
        for lines in (lines_of_a_user(), user.teller.lines):
            ingest(connection, envelopes(lines, uid=1000), 1)
        after = node_queries.nodes(connection)

        assert [tuple(row) for row in connection.execute(text(figures))] == seen
    for name in ("verdict", "open_incidents"):
        assert [getattr(row, name) for row in after] == [getattr(row, name) for row in before]


def test_each_has_at_most_ten_lines():
    assert len(QUERIES) == len(NAMES)
    assert max(query.count("\n") for query in QUERIES) <= 10


def test_the_time_between_failures_is_by_class(store):
    ((failure_class, incidents, by_root, mttf_days),) = asked(store, "mttf")

    # n1 to n3 were seen for 9.9, 8 and 4 days: what happened to them last.
    assert (failure_class, incidents, by_root) == ("gpu_hw.fell_off_bus", 5, 5)
    assert float(mttf_days) == pytest.approx((9.9 + 8 + 4) / 5, abs=0.6)


def test_a_lemon_has_three_incidents_that_root_recorded(store):
    assert asked(store, "lemons") == [("c1", "n1", 3, 1)]


def test_a_gpu_that_failed_wherever_it_was_is_named(store):
    assert asked(store, "every_slot") == [("GPU-bad", 2, 4)]


def test_a_drain_lasts_until_the_resume_or_now(store):
    ((cluster, node, drains, hours),) = asked(store, "drained")

    assert (cluster, node, drains) == ("c1", "n1", 2)
    assert float(hours) == pytest.approx(36, abs=1)


def test_noise_is_how_often_a_check_changed_its_mind(store):
    assert asked(store, "noisiest") == [("gpu_lost", "fail", 2, 2, 14)]
    fleet = Fleet.__new__(Fleet)
    fleet.now_us, fleet.teller = time.time_ns() // 1000, Teller("noise")
    for days_ago in (1, 5, 29):
        fleet.checked("n3", days_ago, "load", "warn")
    for days_ago, status in ((4, "pass"), (6, "skip"), (31, "warn")):
        fleet.checked("n3", days_ago, "load", status)
    add(store, fleet.teller.lines)

    assert asked(store, "noisiest") == [
        ("load", "warn", 3, 1, 21),
        ("gpu_lost", "fail", 2, 2, 14),
    ]


def test_a_node_that_nobody_checked_is_named(store):
    found = asked(store, "not_checked")

    assert sorted((row[0], row[3]) for row in found) == [("n2", "fail"), ("n3", None)]


def test_a_culprit_stands_while_the_incident_blames_it(store):
    query = "SELECT entity_id, stands FROM v_culprits WHERE incident_id = 'incident-n2-7'"
    with store.begin() as connection:
        found = {row[0]: bool(row[1]) for row in connection.execute(text(query))}

    assert found == {"GPU-blamed": False, "GPU-other": True, "n2": True}


def test_a_node_that_is_no_longer_blamed_has_no_open_incident(store):
    with store.begin() as connection:
        rows = {row.name: row.open_incidents for row in node_queries.nodes(connection)}

    assert rows == {"n1": 3, "n2": 2, "n3": 0}


@pytest.mark.parametrize(
    "view", ["v_nodes", "v_check_runs", "v_findings", "v_incidents", "v_culprits", "v_drains"]
)
def test_times_are_timestamps(store, view):
    with store.begin() as connection:
        row = connection.execute(text(f"SELECT * FROM {view}")).mappings().first()

    name = next(key for key in row if key in ("first_seen", "since", "drained"))
    assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", str(row[name]))
