"""What a store does, held against SQLite and Postgres alike."""

import contextlib
import random
from dataclasses import replace

import pytest
from sqlalchemy import event
from support.stories import Teller, checks_again, decision_payload, dump, envelopes, incident, story

from gpuops.errors import UsageError
from gpuops.model import ActionKind, IncidentState
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import INGEST_LOG, ingest
from gpuops.store.ingest.envelope import EventEnvelope
from gpuops.store.ingest.merge import merge_rows, upsert
from gpuops.store.ingest.projections import nodes
from gpuops.store.migrate import upgrade_store
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import SpoolLineError


@pytest.fixture
def store(store_url):
    with open_store(store_url, mode="write") as opened:
        yield opened


def put(store, lines, now_us=7):
    with store.begin() as connection:
        return ingest(connection, envelopes(lines), now_us)


def look(store, query, *args, **kwargs):
    with store.begin() as connection:
        return query(connection, *args, **kwargs)


def test_every_event_comes_back_as_it_went_in(store):
    lines = story(1)

    counts = put(store, lines)

    found = look(store, run_queries.events)
    assert counts.new == len(lines)
    assert sorted(found, key=lambda e: e.id) == sorted((x.event for x in lines), key=lambda e: e.id)


def test_events_are_found_by_run_and_kind(store):
    lines = story(1) + story(2)
    put(store, lines)
    run = lines[2].event.run_id

    found = look(store, run_queries.events, run_id=run, kind="worker.exited")

    assert found
    assert {(event.run_id, event.kind) for event in found} == {(run, "worker.exited")}


def test_sending_again_changes_nothing(store):
    lines = story(3)
    put(store, lines)
    before = look(store, dump)

    again = put(store, lines, now_us=99)

    assert (again.new, again.already_there, again.conflicting) == (0, len(lines), ())
    assert look(store, dump) == before


def test_an_event_twice_in_one_batch_counts_once(store):
    lines = story(3)

    counts = put(store, [*lines, *lines])

    assert (counts.new, counts.already_there) == (len(lines), len(lines))
    assert look(store, dump)["ingest_log"]


def test_order_and_batches_do_not_matter(store, tmp_path):
    lines = story(4)
    put(store, lines)
    shuffled = [*lines, *lines[::3]]
    random.Random(5).shuffle(shuffled)

    with open_store(f"sqlite:///{tmp_path}/other.db", mode="write") as other:
        for start in range(0, len(shuffled), 7):
            put(other, shuffled[start : start + 7])

        assert look(other, dump) == look(store, dump)


def test_another_event_with_a_known_number_is_told_apart(store):
    first, second = story(6)[:2]
    thief = replace(second, origin=first.origin, boot_id=first.boot_id, seq=first.seq)
    put(store, [first])

    counts = put(store, [thief, second])

    assert counts.new == 1
    assert [envelope.line for envelope in counts.conflicting] == [thief]
    assert look(store, run_queries.events) == [first.event, second.event]


def test_a_payload_that_does_not_fit_its_kind_writes_nothing(store):
    teller = Teller()
    teller.tell("attempt.started", run_id="r1", attempt=0, start_us="yesterday")

    with pytest.raises(SpoolLineError, match="start_us is not a whole number"):
        put(store, teller.lines)

    assert look(store, run_queries.events) == []


def test_an_unknown_kind_is_kept_as_an_event(store):
    teller = Teller()
    teller.tell("comet.seen", tail_m=3)

    assert put(store, teller.lines).new == 1


def test_a_run_is_told_by_its_first_start_and_its_last_end(store):
    lines = story(8)
    put(store, lines)

    run = look(store, run_queries.find_run, None)

    assert (run.name, run.user, run.cluster, run.max_restarts) == ("train", "ada", "c1", 3)
    assert run.command == ("train.py", "--lr", "0.1")
    assert run.run_dir == "/runs/n1"
    assert (run.outcome, run.exit_code, run.reason) == ("completed", 0, "done")
    assert run.created_us == lines[2].event.t_us
    assert run.ended_us == max(x.event.t_us for x in lines if x.event.kind == "run.ended")


def test_two_agents_tell_one_attempt(store):
    lines = story(8)
    put(store, lines)
    run = look(store, run_queries.find_run, None)

    first, second = look(store, run_queries.attempts, run.id)

    payloads = [x.event.payload for x in lines if x.event.attempt == 0]
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert first.nodes == ("n1", "n2")
    assert first.outcome == "failed"
    assert second.outcome == "completed"
    assert first.start_us == min(p["start_us"] for p in payloads if "start_us" in p)
    assert first.end_us == max(p["end_us"] for p in payloads if "end_us" in p)
    assert (first.steps_first, first.steps_last, first.beats) == (1, 21, 121)
    assert first.log_dir == "/logs/n1/0"
    assert first.step_source == "optimizer_state"
    assert first.redo_done_us is None
    assert second.redo_done_us is not None


def test_an_attempt_that_failed_on_one_node_failed(store):
    teller = Teller()
    for node, outcome, code in (
        ("n1", "completed", 0),
        ("n2", "failed", 1),
        ("n3", "completed", 0),
    ):
        teller.tell(
            "attempt.ended",
            node=node,
            run_id="r1",
            attempt=0,
            end_us=1,
            outcome=outcome,
            exit_code=code,
        )
    put(store, teller.lines)

    (attempt,) = look(store, run_queries.attempts, "r1")

    assert (attempt.outcome, attempt.exit_code) == ("failed", 1)


def test_a_run_that_never_said_it_started_is_still_there(store):
    teller = Teller()
    teller.tell("attempt.progress", run_id="r1", attempt=2, minute_us=60, beats=1)
    put(store, teller.lines)

    run = look(store, run_queries.find_run, None)
    (attempt,) = look(store, run_queries.attempts, "r1")

    assert (run.id, run.name, run.created_us) == ("r1", "unknown", teller.now_us)
    assert (attempt.ordinal, attempt.outcome, attempt.nodes) == (2, None, ())


def test_the_best_account_of_an_incident_stands(store):
    teller = Teller()
    accounts = {
        "symptoms, newest": incident("r1", 0, authority=1, rev=9, title="symptoms"),
        "root, old": incident("r1", 0, authority=2, rev=1, title="old"),
        "root, new": incident(
            "r1",
            0,
            authority=2,
            rev=3,
            title="new",
            state=IncidentState.CLOSED,
            actions=(ActionKind.RESTART, ActionKind.REQUEUE),
        ),
        "root, middle": incident("r1", 0, authority=2, rev=2, title="middle"),
    }
    for account in accounts.values():
        teller.tell("incident.recorded", account.to_json())
    put(store, teller.lines)

    (found,) = look(store, run_queries.incidents)

    assert found == accounts["root, new"]
    assert len(look(store, dump)["incident_revisions"]) == 4
    assert len(look(store, dump)["actions"]) == 2


def test_of_two_equal_accounts_the_later_event_stands(store):
    teller = Teller()
    teller.tell("incident.recorded", incident("r1", 0, title="first").to_json())
    teller.tell("incident.recorded", incident("r1", 0, title="second").to_json())
    put(store, list(reversed(teller.lines)))

    (found,) = look(store, run_queries.incidents)

    assert found.title == "second"


def test_incidents_are_listed_newest_first_by_run_and_state(store):
    teller = Teller()
    shown = [
        incident("r1", 0),
        incident("r1", 1, state=IncidentState.CLOSED),
        incident("r2", 2),
    ]
    for item in shown:
        teller.tell("incident.recorded", item.to_json())
    put(store, teller.lines)

    assert look(store, run_queries.incidents) == [shown[2], shown[1], shown[0]]
    assert look(store, run_queries.incidents, run_id="r1") == [shown[1], shown[0]]
    assert look(store, run_queries.incidents, state=IncidentState.CLOSED) == [shown[1]]
    assert look(store, run_queries.incidents, limit=1) == [shown[2]]


def test_an_id_is_found_by_its_start_or_its_end(store):
    lines = story(8)
    put(store, lines)
    run = look(store, run_queries.find_run, None)
    (found,) = look(store, run_queries.incidents, run_id=run.id)

    assert look(store, run_queries.find_run, run.id[:13]) == run
    assert look(store, run_queries.find_run, run.id[-8:]) == run
    assert look(store, run_queries.find_run, run.id) == run
    assert look(store, run_queries.find_incident, found.id[-8:].upper()) == found


@pytest.mark.parametrize(
    ("part", "words"),
    [("12", "too short"), ("%%%%", "no run has"), ("____", "no run has"), ("zzzzzzzz", "no run")],
)
def test_an_id_that_is_not_there_is_said(store, part, words):
    put(store, story(8))

    with pytest.raises(UsageError, match=words):
        look(store, run_queries.find_run, part)


def test_an_ambiguous_id_names_the_ends(store):
    teller = Teller()
    for end in ("aaaa", "bbbb"):
        teller.tell("run.started", run_id=f"0199-same-{end}", name="x")
    put(store, teller.lines)

    with pytest.raises(UsageError, match=r"fits several runs \(…ame-aaaa, …ame-bbbb\)"):
        look(store, run_queries.find_run, "0199-same")


def test_an_empty_store_has_no_newest_run(store):
    with pytest.raises(UsageError, match="no run yet"):
        look(store, run_queries.find_run, None)


def test_check_runs_keep_what_did_not_pass(store):
    put(store, story(8))

    shown = look(store, run_queries.check_runs, node="n1")
    rows = look(store, dump)

    assert [(run.suite, run.status, run.runs) for run in shown] == [("prolog", "unknown", 1)]
    assert len(rows["check_results"]) == 2


def test_decisions_are_told_with_all_that_they_rest_on(store):
    put(store, story(8, attempts=3))
    run = look(store, run_queries.find_run, None)

    first, second = look(store, run_queries.decisions, run.id)
    (only,) = look(store, run_queries.decisions, run.id, ordinal=1)

    assert only == second
    assert (first.ordinal, first.node, first.verdict) == (0, "n2", "restart")
    assert (first.rule, first.backoff_us, first.exit_code) == ("worker-failed", 1_500_000, None)
    assert (first.restarts_used, first.restarts_max, first.note) == (1, 3, "site: agreed")
    assert first.body == decision_payload(0)


def test_of_several_accounts_of_an_exclusion_the_first_stands(store):
    lines = story(8)
    put(store, list(reversed(lines)))
    run = look(store, run_queries.find_run, None)

    (found,) = look(store, run_queries.exclusions, run.id)

    first = next(x.event for x in lines if x.event.kind == "node.excluded")
    assert (found.excluded, found.ordinal, found.told_by) == ("n1", 0, "n1")
    assert (found.t_us, found.reason) == (first.t_us, "sick, says n1")


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({}, "decision is not an object"),
        ({"decision": {}}, "budget is not an object"),
        ({"decision": {}, "budget": {}}, "verdict is not present"),
        (decision_payload(0, rule="x" * 999), "rule is not at most 255"),
        (decision_payload(0, exit_code="soon"), "exit_code is not a whole number"),
    ],
)
def test_what_is_no_decision_is_refused(store, payload, words):
    teller = Teller()
    teller.tell("decision.made", payload, run_id="r1", attempt=0)

    with pytest.raises(SpoolLineError, match=words):
        put(store, teller.lines)


def test_a_back_off_that_is_no_time_is_not_known(store):
    teller = Teller()
    for backoff_s in ("long", -1, 1e300, True):
        told = decision_payload(0, backoff_s=backoff_s)
        teller.tell("decision.made", told, run_id="r1", attempt=0)
    put(store, teller.lines)

    assert {row.backoff_us for row in look(store, run_queries.decisions, "r1")} == {None}


def test_names_of_nodes_belong_to_their_cluster(store):
    line = story(9)[0]
    with store.begin() as connection:
        ingest(connection, [EventEnvelope(line, "east")], 1)
        other = replace(line, seq=99, event=replace(line.event, id=line.event.id[:-1] + "0"))
        ingest(connection, [EventEnvelope(other, "west")], 1)

        assert len(dump(connection)["nodes"]) == 2


def written(connection):
    """Return what changes when any row is written: SQLite's count, or Postgres' row version."""
    if connection.dialect.name == "sqlite":
        return connection.exec_driver_sql("SELECT total_changes()").scalar_one()
    return connection.exec_driver_sql("SELECT ctid::text FROM nodes").scalar_one()


def test_an_account_that_adds_nothing_writes_no_row(store):
    node = {"id": "n", "cluster_id": "c", "hostname": "n1", "first_seen_us": 5, "last_seen_us": 9}
    with store.begin() as connection:
        upsert(connection, nodes.CLUSTERS, [{"id": "c", "name": "east"}])
        upsert(connection, nodes.NODES, [node])
        before = written(connection)
        upsert(connection, nodes.NODES, [{**node, "first_seen_us": 6, "last_seen_us": 7}])
        same = written(connection)
        upsert(connection, nodes.NODES, [{**node, "last_seen_us": 10}])
        later = written(connection)

    assert before == same
    assert later != same


@pytest.mark.postgres
def test_the_same_stream_leaves_the_same_rows_on_both(tmp_path, postgres_url):
    lines = [*story(10), *story(11, nodes=("n3", "n1"), attempts=3)]
    lines += checks_again(lines)
    shuffled = lines[:]
    random.Random(12).shuffle(shuffled)
    upgrade_store(postgres_url)
    with (
        open_store(f"sqlite:///{tmp_path}/store.db", mode="write") as sqlite,
        open_store(postgres_url, mode="write") as postgres,
    ):
        put(sqlite, lines)
        for start in range(0, len(shuffled), 11):
            put(postgres, shuffled[start : start + 11], now_us=start)
        rows = look(sqlite, dump)

        assert look(postgres, dump) == rows
    assert min(len(found) for found in rows.values()) > 0


def test_two_writers_put_the_same_events_in_the_same_order(store):
    """In other orders each could wait for a row that the other holds."""
    lines, seen = story(1), []

    class RolledBackError(Exception):
        """Ends the transaction."""

    def note(_connection, _cursor, statement, parameters, _context, _many):
        if statement.startswith("INSERT INTO events"):
            seen.append(str(parameters))

    for seed in range(2):
        random.Random(seed).shuffle(lines)
        with contextlib.suppress(RolledBackError), store.begin() as connection:
            event.listen(connection, "before_cursor_execute", note)
            ingest(connection, envelopes(lines), 7)
            raise RolledBackError

    assert seen
    half = len(seen) // 2
    assert seen[:half] == seen[half:]


def test_what_an_event_with_a_known_number_says_is_not_taken_over(store):
    lines, others = story(6), story(7)
    put(store, lines)
    before = look(store, dump)
    places = zip(others, lines, strict=False)
    thieves = [replace(o, origin=x.origin, boot_id=x.boot_id, seq=x.seq) for o, x in places]

    counts = put(store, thieves)

    assert thieves
    assert (counts.new, len(counts.conflicting)) == (0, len(thieves))
    assert look(store, dump) == before


def test_rows_are_joined_in_the_order_of_their_keys():
    rows = [
        {
            "origin": origin,
            "boot_id": "b",
            "origin_uid": 1,
            "first_seq": 1,
            "last_seq": 1,
            "rows": 1,
        }
        for origin in ("n2", "n1", "n3", "n1")
    ]

    found = merge_rows(INGEST_LOG, rows)

    assert [(row["origin"], row["rows"]) for row in found] == [("n1", 2), ("n2", 1), ("n3", 1)]
