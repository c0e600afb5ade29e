"""The control record on its way over the board, and what is no record at all."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.decisions import decision, failure

from gpuops.control.record import (
    GENERATION_MAX,
    ControlRecord,
    Member,
    RecordError,
    Roster,
    RunPhase,
    pack,
    unpack,
)
from gpuops.incident.decision import HISTORY_MAX, ReportKind

RUN_ID = "01890000-0000-7000-8000-000000000001"
AGENT = "01890000-0000-4000-8000-00000000000a"

names = st.text("abc-09é", min_size=1, max_size=20)
numbers = st.integers(0, 2**40)
times_s = st.floats(0, 1e9)
members = st.builds(
    Member,
    agent=st.uuids().map(str),
    node=names,
    address=names,
    n_workers=st.integers(1, 64),
    node_rank_hint=st.none() | st.integers(0, 10**6),
    master_port=st.integers(0, 65535),
)
records = st.builds(
    ControlRecord,
    run_id=st.uuids().map(str),
    folder=st.just("20260302T091400Z-train-3e185152"),
    generation=st.integers(0, GENERATION_MAX),
    phase=st.sampled_from(RunPhase),
    since_s=times_s,
    fingerprint=names,
    reason=names,
    trigger=st.none() | st.sampled_from(ReportKind),
    decided_by=names,
    excluded=st.dictionaries(names, names, max_size=4),
    suspected=st.dictionaries(names, names, max_size=4),
    excluded_checkpoint=st.none() | numbers,
    history=st.lists(st.builds(failure, numbers, times_s), max_size=4).map(tuple),
    decision=st.none() | st.just(decision()),
    not_before_s=times_s,
    grown_at_s=st.lists(times_s, max_size=4).map(tuple),
    drain_signal=st.sampled_from([None, "SIGTERM", "SIGUSR1"]),
    drain_step=st.none() | numbers,
    exit_code=st.none() | st.integers(0, 255),
)


def record(**changes):
    fields = {
        "run_id": RUN_ID,
        "folder": "f",
        "generation": 2,
        "phase": RunPhase.RUN,
        "since_s": 1.0,
    }
    return ControlRecord(**{**fields, **changes})


def member(**changes):
    fields = {"agent": AGENT, "node": "n1", "address": "10.0.0.1", "n_workers": 2}
    return Member(**{**fields, **changes})


def changed(data, **changes):
    return json.dumps({**json.loads(data), **changes}).encode()


@settings(suppress_health_check=[HealthCheck.too_slow])  # a machine that is busy with others
@given(records)
def test_a_record_comes_back_as_it_was(made):
    assert ControlRecord.from_bytes(made.to_bytes()) == made


@given(st.lists(members, max_size=5), st.lists(members, max_size=3))
def test_a_roster_comes_back_as_it_was(seated, spares):
    made = Roster(generation=3, members=tuple(seated), spares=tuple(spares))

    assert Roster.from_bytes(made.to_bytes()) == made


def test_only_the_last_failures_are_kept():
    history = tuple(failure(generation) for generation in range(HISTORY_MAX + 5))
    read = ControlRecord.from_bytes(record(history=history).to_bytes())

    assert read.history == history[5:]


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_told_as_such(data):
    for read in (ControlRecord.from_bytes, Roster.from_bytes, unpack):
        with pytest.raises(RecordError):
            read(data)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(json.loads(record().to_bytes()))), junk)
def test_a_field_that_holds_anything_is_read_or_refused(name, value):
    try:
        read = ControlRecord.from_bytes(changed(record().to_bytes(), **{name: value}))
    except RecordError:
        return
    assert ControlRecord.from_bytes(read.to_bytes()) == read


@given(st.sampled_from(sorted(member().to_json())), junk)
def test_a_member_that_holds_anything_is_read_or_refused(name, value):
    data = json.dumps(
        {"v": 1, "generation": 0, "spares": [], "members": [{**member().to_json(), name: value}]}
    ).encode()
    try:
        read = Roster.from_bytes(data)
    except RecordError:
        return
    assert Roster.from_bytes(read.to_bytes()) == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", "../../etc"),
        ("folder", "../../etc"),
        ("folder", ".hidden"),
        ("folder", "a/b"),
        ("folder", ""),
        ("generation", -1),
        ("generation", GENERATION_MAX + 1),
        ("generation", True),
        ("phase", "party"),
        ("since_s", float("nan")),
        ("since_s", "1"),
        ("not_before_s", float("inf")),
        ("grown_s", [10**400]),
        ("excluded", ["n1"]),
        ("excluded_checkpoint", "7"),
        ("drain_signal", "SIGNIFICANT"),
        ("drain_step", "7"),
        ("exit_code", 256),
        ("exit_code", -1),
        ("v", 2),
    ],
)
def test_what_an_agent_could_not_act_on_is_refused(name, value):
    with pytest.raises(RecordError, match="not a control record"):
        ControlRecord.from_bytes(changed(record().to_bytes(), **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("agent", "x"),
        ("node", ""),
        ("node", "n" * 256),
        ("address", "a" * 256),
        ("n_workers", -1),
        ("n_workers", 10**9),
        ("n_workers", float("inf")),
        ("order", "first"),
        ("master_port", 65536),
    ],
)
def test_a_member_that_nobody_could_be_is_refused(name, value):
    body = {**member().to_json(), name: value}
    data = pack({"generation": 0, "members": [body], "spares": []})

    with pytest.raises(RecordError, match="not a roster"):
        Roster.from_bytes(data)


def test_deeply_nested_bytes_are_refused_and_not_fatal():
    with pytest.raises(RecordError):
        ControlRecord.from_bytes(b"[" * 100_000)


def test_ranks_follow_from_the_order_of_the_members():
    other = AGENT[:-1] + "b"
    roster = Roster(
        generation=0, members=(member(n_workers=3), member(agent=other, node="n2", n_workers=2))
    )

    assert roster.world_size == 5
    assert (roster.group_rank(AGENT), roster.first_rank(0)) == (0, 0)
    assert (roster.group_rank(other), roster.first_rank(1)) == (1, 3)
    assert roster.group_rank(AGENT[:-1] + "c") is None


def test_a_spare_has_no_rank():
    roster = Roster(generation=0, members=(), spares=(member(),))

    assert roster.group_rank(AGENT) is None
