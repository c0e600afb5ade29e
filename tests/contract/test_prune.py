"""What is older than its retention is deleted, in steps between which writers write."""

import contextlib

import pytest
from sqlalchemy import delete, func, select, update
from support.check_day import ROUND_S, START_US, SimulatedNode, send
from support.stories import envelopes, story

from gpuops.model import (
    Confidence,
    Event,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Severity,
    Side,
    uuid7,
)
from gpuops.store import schema
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.prune import Retention, count_prunable, prune
from gpuops.store.queries import node_queries, run_queries
from gpuops.store.schema import metadata
from gpuops.store.spool.format import SpoolLine

DAY_US = 86_400 * 10**6
ROUNDS = 40


@pytest.fixture
def store(store_url):
    with open_store(store_url, mode="write") as opened:
        yield opened


def counts(store):
    with store.begin() as connection:
        return {
            name: connection.scalar(select(func.count()).select_from(table))
            for name, table in metadata.tables.items()
        }


def checked(store, rounds=ROUNDS):
    """Fill *store* with the checks of one node that flaps; return when the last began."""
    node = SimulatedNode.drawn(1, "prune")
    node.flaps = True
    for number in range(rounds):
        send(store, node.lines(number))
    return START_US + (rounds - 1) * ROUND_S * 10**6


def test_only_what_is_older_goes_and_the_rest_can_still_be_read(store):
    last_us = checked(store)
    with store.begin() as connection:
        ingest(connection, envelopes(story(1)), 1)
    before = counts(store)
    middle_us = START_US + 20 * ROUND_S * 10**6
    newest_us = max(last_us, middle_us)

    deleted = prune(store, Retention(checks_days=1), middle_us + DAY_US, pause=lambda _s: None)

    after = counts(store)
    assert deleted["check_runs"] == before["check_runs"] - after["check_runs"] > 3
    assert deleted["check_results"] == before["check_results"] - after["check_results"] > 3
    with store.begin() as connection:
        kept = run_queries.check_runs(connection, node="n0001", limit=1000)
        node = node_queries.find_node(connection, "n0001", cluster="default")
    assert min(run.last_us for run in kept) >= middle_us
    assert node.last_seen_us >= newest_us


def test_incidents_runs_and_what_a_node_has_stay_for_ever(store):
    with store.begin() as connection:
        ingest(connection, envelopes(story(1)), 1)
    before = counts(store)
    shown = Retention(events_days=1, checks_days=1, samples_days=1, progress_days=1)

    with store.begin() as connection:
        expected = count_prunable(connection, shown, START_US + 9999 * DAY_US)
    deleted = prune(store, shown, START_US + 9999 * DAY_US, pause=lambda _s: None)

    after = counts(store)
    gone = {"events", "evidence", "check_runs", "progress", "ingest_log"}
    gone |= {"measurements", "pair_tests"}
    assert {name: deleted[name] for name in gone} == expected
    children = {"incident_evidence", "check_results"}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == gone | children
    assert not any(after[name] for name in changed)


def test_of_a_writer_without_events_nothing_is_left(store):
    """Each process of a hook is a writer of its own: their table grew for ever."""
    old, young = story(1), story(2)
    with store.begin() as connection:
        ingest(connection, envelopes(old), 1)
        ingest(connection, envelopes(young, uid=1000), 1)
    now_us = max(line.event.t_us for line in old) + DAY_US + 1
    young_us = {line.event.id: now_us for line in young}
    with store.begin() as connection:
        for event_id, t_us in young_us.items():
            statement = update(schema.events).where(schema.events.c.id == event_id)
            connection.execute(statement.values(t_us=t_us))
    with store.begin() as connection:
        expected = count_prunable(connection, Retention(events_days=1), now_us)
    pauses = []

    deleted = prune(store, Retention(events_days=1), now_us, pause=pauses.append, step_rows=1)

    with store.begin() as connection:
        left = set(connection.execute(select(schema.ingest_log.c.origin)).scalars())
    assert left == {line.origin for line in young}
    assert deleted["ingest_log"] == expected["ingest_log"] == len({x.origin for x in old})
    assert len(pauses) > deleted["events"]


def test_a_writer_that_writes_while_its_row_is_looked_at_keeps_it(store):
    """The row is found without events; before it is deleted, an event of it is stored."""
    first, second = envelopes(story(1))[:2]
    with store.begin() as connection:
        ingest(connection, [first, second], 1)
        connection.execute(delete(schema.events))
        row = select(schema.ingest_log.c.rows)
        (rows,) = connection.execute(row).scalars()

    deleted = prune(
        Writing(store, lambda c: ingest(c, [first], 1)),
        Retention(events_days=1),
        START_US,
        pause=lambda _s: None,
    )

    assert "ingest_log" not in deleted
    with store.begin() as connection:
        assert list(connection.execute(row).scalars()) == [rows + 1]


class Writing:
    """A store in which someone writes after each second transaction, as one may at any time."""

    def __init__(self, store, write):
        self._store, self._write, self._left = store, write, 3

    @contextlib.contextmanager
    def begin(self):
        with self._store.begin() as connection:
            yield connection
        self._left -= 1
        if self._left == 0:
            with self._store.begin() as connection:
                self._write(connection)


def test_zero_days_keep_for_ever(store):
    with store.begin() as connection:
        ingest(connection, envelopes(story(1)), 1)
    forever = Retention(events_days=0, checks_days=0, samples_days=0, progress_days=0)

    assert prune(store, forever, START_US + 9999 * DAY_US) == {}


def test_between_its_steps_others_write(store_url, store):
    """No transaction is open while it pauses, so that not even SQLite makes anyone wait."""
    last_us = checked(store)
    lines = iter(envelopes(story(2)))
    written, waits_s = [], []

    def pause(seconds):
        waits_s.append(seconds)
        with (
            open_store(store_url, mode="write", deadline_s=5) as other,
            other.begin() as connection,
        ):
            written.append(ingest(connection, [next(lines)], 1).new)

    retention = Retention(events_days=0, samples_days=0, progress_days=0, checks_days=1)
    deleted = prune(store, retention, last_us + 2 * DAY_US, pause=pause, step_rows=5)

    assert deleted["check_runs"] > 15
    assert len(written) >= deleted["check_runs"] / 5
    assert set(written) == {1}
    assert min(waits_s) > 0


def test_a_run_that_goes_on_is_not_deleted_by_when_it_began(store):
    node = SimulatedNode.drawn(1, "steady")
    node.warns, node.broken_from, node.rebooted_at, node.flaps = True, None, None, False
    for number in range(10):
        send(store, node.lines(number))

    deleted = prune(store, Retention(checks_days=1), START_US + DAY_US + 1, pause=lambda _s: None)

    assert "check_runs" not in deleted


def incident(number, first_us):
    """Return an incident of root's whose evidence is a line that each such fault writes."""
    found = Incident(
        id=f"inc{number}",
        failure_class=FailureClass.GPU_FELL_OFF_BUS,
        side=Side.INFRA,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.OPEN,
        title="of a test",
        first_us=first_us,
        detected_us=first_us,
        evidence=(Evidence(role=Role.ROOT, text="GPU has fallen off the bus"),),
    )
    event = Event(
        id=uuid7(first_us, bytes(10)),
        kind="incident.recorded",
        t_us=first_us,
        node="n1",
        severity=Severity.ERROR,
        payload=found.to_json(),
    )
    return EventEnvelope(SpoolLine("n1.aaaaaaaaaaaa", "boot", number, event), "c1", 0)


def test_evidence_goes_with_the_last_incident_that_has_it(store):
    now_us = 2000 * DAY_US
    old, new = incident(1, now_us - 401 * DAY_US), incident(2, now_us - DAY_US)
    with store.begin() as connection:
        ingest(connection, [old, new], 1)

    assert prune(store, Retention(), now_us, pause=lambda _s: None) == {"events": 1}
    assert counts(store)["incident_evidence"] == 2

    later_us = now_us + 401 * DAY_US
    with store.begin() as connection:
        assert count_prunable(connection, Retention(), later_us)["evidence"] == 1
    prune(store, Retention(), later_us, pause=lambda _s: None)
    assert counts(store)["evidence"] == 0
