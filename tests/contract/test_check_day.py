"""What a day of health checks comes to in the store, in small (the day: tests/benchmarks)."""

import itertools
import random

import pytest
from sqlalchemy import select
from support.check_day import SimulatedNode, WriteCounter, send
from support.stories import dump

from gpuops.model import Status
from gpuops.store.checks import check_samples
from gpuops.store.engine import memory_store, open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.queries import node_queries, run_queries

NODES, ROUNDS, ROUNDS_AN_HOUR = 20, 36, 12


@pytest.fixture
def store(store_url):
    with open_store(store_url, mode="write") as opened:
        yield opened


def drawn(rounds=ROUNDS):
    nodes = [SimulatedNode.drawn(number, "small", rounds) for number in range(NODES)]
    nodes[3].broken_from, nodes[4].flaps, nodes[5].rebooted_at = 20, True, 9
    return nodes


def test_a_run_that_changes_nothing_is_one_write(store):
    nodes = drawn()
    send(store, [line for node in nodes for line in node.lines(0)])
    counted = WriteCounter(store)

    for number in range(1, ROUNDS):
        send(store, [line for node in nodes for line in node.lines(number)])

    runs = NODES * (ROUNDS - 1)
    samples = NODES * (ROUNDS // ROUNDS_AN_HOUR)
    changes = sum(before != after for node in nodes for before, after in _pairs(node))
    assert changes > 10
    assert runs < counted.rows < runs + samples + 25 * changes


def _pairs(node):
    shown = [
        [(x.check, x.entity, x.status) for x in made.findings if x.status > Status.SKIP]
        + [made.moment.boot_id]
        for made in node.truth
    ]
    return itertools.pairwise(shown)


def test_the_store_tells_what_every_run_found(store):
    nodes = drawn()
    for number in range(ROUNDS):
        send(store, [line for node in nodes for line in node.lines(number)])

    with store.begin() as connection:
        rows = {row.name: row for row in node_queries.nodes(connection)}
        for node in nodes:
            assert rows[node.name].verdict == node.truth[-1].verdict.word
            assert rows[node.name].last_seen_us >= node.truth[-1].start_us
            assert _told(connection, rows[node.name].id) == _happened(node)
            runs = run_queries.check_runs(connection, node=node.name, limit=1000)
            assert sum(run.runs for run in runs) == ROUNDS


def _told(connection, node_id):
    found = node_queries.list_findings(connection, node_id, since_us=0)
    return {(x.check, x.entity_id, x.status): (x.first_us, x.last_us, x.count) for x in found}


def _happened(node):
    seen = {}
    for made in node.truth:
        for x in made.findings:
            if x.status not in (Status.PASS, Status.SKIP):
                key = (x.check, x.entity.id, x.status.word)
                first, _, count = seen.get(key, (made.start_us, 0, 0))
                seen[key] = (first, made.start_us, count + 1)
    return seen


def test_values_are_kept_by_the_hour(store):
    (node, *_) = drawn()
    for number in range(ROUNDS):
        send(store, node.lines(number))

    with store.begin() as connection:
        query = select(check_samples.c.numbers).order_by(check_samples.c.hour_us)
        kept = list(connection.execute(query).scalars())
    assert len(kept) in (3, 4)
    assert kept[0]["measured_00[GB/s]"] == node.truth[0].findings[0].value


def test_any_order_and_doubling_of_the_lines_leaves_the_same_rows():
    lines = [
        line for node in drawn()[3:6] for number in range(ROUNDS) for line in node.lines(number)
    ]
    orders = [lines, random.Random(1).sample([*lines, *lines[::3]], k=len(lines) + len(lines[::3]))]

    found = []
    for order in orders:
        with memory_store() as store, store.begin() as connection:
            for start in range(0, len(order), 7):
                ingest(connection, order[start : start + 7], 0)
            found.append(dump(connection))

    assert found[0] == found[1]


def test_a_user_extends_no_run_of_roots():
    (node, *_) = drawn()
    first, lie = node.lines(0), node.lines(1)

    with memory_store() as store, store.begin() as connection:
        ingest(connection, first, 0)
        before = dump(connection)
        ingest(connection, [type(line)(line.line, line.cluster, 1000) for line in lie], 0)

        assert dump(connection) == before
