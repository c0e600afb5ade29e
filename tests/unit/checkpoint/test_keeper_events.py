"""What the keeper has to tell: bounded, in order, and many of one kind are one."""

import json

from gpuops.checkpoint.keeper.jobs import EVENTS_MAX, EventQueue


def test_events_come_in_order_and_once():
    events = EventQueue()
    events.add("offered", state=[1, 2])
    events.add("persisted", bytes=7)

    assert [event["kind"] for event in events.take(10**6)] == ["offered", "persisted"]
    assert events.take(10**6) == []


def test_commits_that_follow_one_another_are_one_with_the_last_ones_figures():
    events = EventQueue()
    for step in range(5):
        events.add("committed", state=[0, step])
    events.add("skipped", step=5)
    events.add("committed", state=[0, 6])

    found = [(event["kind"], event["n"]) for event in events.take(10**6)]
    assert found == [("committed", 5), ("skipped", 1), ("committed", 1)]


def test_what_each_save_brings_is_counted_by_kind_and_holder():
    events = EventQueue()
    for step in range(3):
        events.add("whole", state=[0, step])
        events.add("replicated", state=[0, step], holder="a")
        events.add("replicated", state=[0, step], holder="b")
        events.add("committed", state=[0, step])
    events.add("replica_failed", holder="b")
    events.add("whole", state=[0, 3])

    found = [(event["kind"], event.get("holder"), event.get("n")) for event in events.take(10**6)]
    assert found == [
        ("whole", None, 3),
        ("replicated", "a", 3),
        ("replicated", "b", 3),
        ("committed", None, 3),
        ("replica_failed", "b", None),
        ("whole", None, 1),
    ]


def test_too_many_drop_the_oldest_and_say_how_many():
    events = EventQueue()
    for number in range(EVENTS_MAX + 3):
        events.add("persisted", number=number)
    found = events.take(10**9)

    assert found[0] == {"kind": "events_lost", "n": 3}
    assert found[1]["number"] == 3
    assert len(found) == EVENTS_MAX + 1


def test_an_answer_takes_as_many_as_fit_and_at_least_one():
    events = EventQueue()
    for _ in range(4):
        events.add("persist_failed", why="é" * 10_000)

    assert len(events.take(10)) == 1
    page = events.take(7000)
    assert len(page) == 2
    assert len(json.dumps(page)) < 10_000


def test_the_log_hears_of_all_but_those_of_each_step():
    heard = []
    events = EventQueue(on_event=heard.append)
    events.add("committed")
    events.add("skipped")
    events.add("corrupt", why=["x" * 9999] * 99)

    assert [event["kind"] for event in heard] == ["corrupt"]
    assert len(json.dumps(heard)) < 3000
