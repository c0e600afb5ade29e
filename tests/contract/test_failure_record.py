"""How many failures the store has in how many node hours, and what becomes of it at the workers."""

import threading

import pytest
from support.stories import Teller, envelopes, incident, node_incident

from gpuops.agent.checkpoint.failure_history import (
    REFRESH_S,
    WINDOW_DAYS,
    FailureRecord,
    failures_on_record,
)
from gpuops.errors import StoreError
from gpuops.host.clock import FakeClock
from gpuops.model import IncidentState, Side
from gpuops.plan.failure_rate import FAILURES_VARIABLE, FailureRate
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest

HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
NOW_US = 1_800_000_000_000_000
CLUSTER = "c1"


def attempt(teller, run, ordinal, begin_us, hours, *, n_nodes, sides=(), ends=True):
    """Tell of an attempt of so many hours, and of an incident of each of *sides*."""
    tell = {"run_id": run, "attempt": ordinal}
    end_us = begin_us + round(hours * HOUR_US)
    teller.tell("attempt.started", start_us=begin_us, n_nodes=n_nodes, world_size=8, **tell)
    teller.tell("attempt.first_step", first_step_us=begin_us, step=1, step_source="api", **tell)
    if ends:
        outcome = "failed" if sides else "completed"
        teller.tell("attempt.ended", end_us=end_us, outcome=outcome, exit_code=0, **tell)
    for n, side in enumerate(sides):
        body = incident(run, ordinal, id=f"{run}-{ordinal}-{n}", side=side, first_us=end_us)
        teller.tell("incident.recorded", body.to_json(), **tell)


def put(store_url, teller, cluster=CLUSTER):
    with open_store(store_url, mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes(teller.lines, cluster=cluster), NOW_US)


def on_record(store_url, tmp_path):
    return failures_on_record(store_url, CLUSTER, tmp_path, FakeClock(now_us=NOW_US))


def test_failures_and_node_hours_are_counted_beside_each_other(store_url, tmp_path):
    teller = Teller()
    run, day = teller.run_id(), NOW_US - DAY_US
    attempt(teller, run, 0, day, 2, n_nodes=4, sides=[Side.INFRA, Side.AMBIGUOUS])
    attempt(teller, run, 1, day + 2 * HOUR_US, 1, n_nodes=3, sides=[Side.USER])
    attempt(teller, run, 2, day + 3 * HOUR_US, 5, n_nodes=4)
    body = node_incident(first_us=day)
    teller.tell("incident.recorded", body.to_json())  # of a node, not of a run
    put(store_url, teller)

    assert on_record(store_url, tmp_path) == FailureRate(1, 8 + 3 + 20)


def test_only_the_window_counts_and_only_this_cluster(store_url, tmp_path):
    teller, others = Teller(1), Teller(2)
    window = NOW_US - WINDOW_DAYS * DAY_US
    attempt(teller, teller.run_id(), 0, window - HOUR_US, 0.5, n_nodes=9, sides=[Side.INFRA])
    attempt(teller, teller.run_id(), 0, window - HOUR_US, 3, n_nodes=2, sides=[Side.EXTERNAL])
    attempt(teller, teller.run_id(), 0, NOW_US - HOUR_US, 8, n_nodes=2)
    attempt(others, others.run_id(), 0, NOW_US - HOUR_US, 1, n_nodes=9, sides=[Side.INFRA])
    put(store_url, teller)
    put(store_url, others, cluster="c2")

    assert on_record(store_url, tmp_path) == FailureRate(1, 2 * 2 + 2 * 1)


def test_what_was_merged_into_another_and_what_never_ended_count_for_nothing(store_url, tmp_path):
    teller = Teller(3)
    run = teller.run_id()
    attempt(teller, run, 0, NOW_US - HOUR_US, 0.5, n_nodes=2, ends=False)
    body = incident(run, 0, first_us=NOW_US - 1, state=IncidentState.MERGED, side=Side.INFRA)
    teller.tell("incident.recorded", body.to_json(), run_id=run, attempt=0)
    put(store_url, teller)

    assert on_record(store_url, tmp_path) == FailureRate(0, 0)


def test_an_empty_store_is_the_published_rate(store_url, tmp_path):
    assert on_record(store_url, tmp_path).source == "published"


def told(record):
    assert record.join(30)
    return FailureRate.from_env(record.env())


def test_a_store_that_is_not_there_is_no_error(tmp_path):
    url, clock = f"sqlite:///{tmp_path}/none/store.db", FakeClock()
    record = FailureRecord(lambda: failures_on_record(url, CLUSTER, tmp_path, clock), clock)

    assert told(record) == FailureRate()
    assert record.env() == {}
    assert list(tmp_path.iterdir()) == []


def test_workers_that_start_meanwhile_wait_for_nothing():
    go_on = threading.Event()

    def read():
        assert go_on.wait(30)
        return FailureRate(7, 1000.0)

    record = FailureRecord(read, FakeClock())
    assert record.env() == {}
    go_on.set()
    assert told(record) == FailureRate(7, 1000.0)


def test_later_generations_hear_of_what_happened_since():
    rates, clock = [FailureRate(1, 10.0), FailureRate(2, 20.0)], FakeClock()
    record = FailureRecord(lambda: rates.pop(0), clock)
    assert told(record) == FailureRate(1, 10.0)
    assert told(record) == FailureRate(1, 10.0)

    clock.advance(REFRESH_S + 1)
    record.env()
    assert told(record) == FailureRate(2, 20.0)
    clock.advance(REFRESH_S + 1)
    record.env()
    # There is nothing more to be had, and what was read stands.
    assert told(record) == FailureRate(2, 20.0)


@pytest.mark.parametrize("error", [StoreError("locked"), RuntimeError("a driver's own")])
def test_whatever_a_store_raises_is_no_news(error):
    def read():
        raise error

    assert told(FailureRecord(read, FakeClock())) == FailureRate()


def test_the_variable_is_one_that_a_worker_reads():
    record = FailureRecord(lambda: FailureRate(3, 8123.5), FakeClock())
    assert record.join(30)
    assert record.env() == {FAILURES_VARIABLE: "3/8123.500000"}
