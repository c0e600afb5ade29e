"""What a keeper tells becomes events of the record; nonsense becomes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.agent.checkpoint.keeper_events import (
    KeeperEvent,
    SaveCounter,
    is_counted,
    journal_event,
    read_events,
    resume_report,
)
from gpuops.checkpoint.types import StateId
from gpuops.model import Severity


def event(kind, **fields):
    (found,) = read_events([{"kind": kind, **fields}])
    return found


def test_an_event_is_read_by_type():
    told = {
        "kind": "restored",
        "state": [2, 41],
        "rank": 3,
        "tier": "peer",
        "bytes": 1000,
        "seconds": 0.5,
        "why": "x" * 600,
    }

    (found,) = read_events([told])

    assert (found.state, found.rank, found.tier) == (StateId(2, 41), 3, "peer")
    assert (found.nbytes, found.seconds, len(found.why)) == (1000, 0.5, 600)
    payload = found.payload()
    assert (payload["step"], payload["epoch"], payload["bytes"]) == (41, 2, 1000)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"kind": None},
        {"kind": ""},
        {"kind": "a b"},
        {"kind": "x" * 41},
        "committed",
    ],
)
def test_what_is_no_event_is_left_out(told):
    assert read_events([told]) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", [1]),
        ("state", ["1", 2]),
        ("state", [1, 10**13]),
        ("state", [True, 1]),
        ("rank", -1),
        ("rank", True),
        ("tier", "disk"),
        ("bytes", 1.5),
        ("bytes", 2**80),
        ("seconds", float("nan")),
        ("seconds", -1),
        ("why", 7),
        ("why", "x" * 601),
        ("directory", ["/x"]),
    ],
)
def test_a_field_of_another_type_is_unknown(field, value):
    name = {"bytes": "nbytes"}.get(field, field)

    assert getattr(event("persisted", **{field: value}), name) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["kind", "state", "rank", "suspects", "tensors", "tier", "bytes", "seconds", "n"]
    ),
    JSON,
)


@given(st.lists(FIELDS, max_size=4))
def test_no_nonsense_raises(told):
    found = read_events(told)
    tally = SaveCounter()
    for item in found:
        tally.add(item) if is_counted(item) else journal_event(item)
    tally.take()
    if (loaded := resume_report(found)) is not None:
        assert loaded.to_text()


def test_commits_and_skips_are_told_together():
    tally = SaveCounter()
    for item in (
        event("committed", state=[0, 4], bytes=100, seconds=0.1, n=3),
        event("skipped", reason="in_flight", why="step 4 is still being copied", n=2),
        event("committed", state=[0, 6], bytes=100, seconds=0.3),
        event("skipped", reason="no_free_slot"),
        event("given_up"),
    ):
        assert is_counted(item)
        tally.add(item)

    assert tally.take() == [
        (
            "checkpoint.committed",
            {"count": 4, "step": 6, "epoch": 0, "bytes": 200, "seconds_max": 0.3},
            Severity.INFO,
        ),
        (
            "checkpoint.skipped",
            {"count": 3, "by_reason": {"in_flight": 2, "no_free_slot": 1}},
            Severity.INFO,
        ),
        ("checkpoint.given_up", {"count": 1}, Severity.INFO),
    ]
    assert tally.take() == []


def test_the_rest_is_told_one_by_one_and_trouble_is_grave():
    kind, payload, severity = journal_event(event("persist_failed", state=[0, 4], why="ENOSPC"))

    assert (kind, payload["why"], severity) == (
        "checkpoint.persist_failed",
        "ENOSPC",
        Severity.ERROR,
    )
    assert journal_event(event("persisted"))[2] is Severity.INFO
    assert journal_event(event("anything_new"))[0] == "checkpoint.anything_new"


def load(rank, step=41, tier="memory", epoch=1, seconds=0.5):
    return KeeperEvent(
        kind="restored",
        state=StateId(epoch, step),
        rank=rank,
        tier=tier,
        nbytes=1_000_000,
        seconds=seconds,
    )


def test_what_the_ranks_loaded_in_words():
    one = resume_report([load(0)])
    all_of_memory = resume_report([load(rank, seconds=rank / 10) for rank in range(4)])
    mixed = resume_report([load(0), load(2), load(1, tier="peer"), load(3, tier="persistent")])

    assert one.to_text() == "resumed from step 41: rank 0 from memory; 1.0 MB in 0.50 s"
    assert (
        all_of_memory.to_text()
        == "resumed from step 41: ranks 0-3 from memory; 4.0 MB in all in 0.30 s"
    )
    assert mixed.to_text() == (
        "resumed from step 41: ranks 0, 2 from memory; rank 1 from a peer's memory; rank 3 from "
        "the directory; 4.0 MB in all in 0.50 s"
    )
    assert resume_report([event("persisted", state=[0, 1])]) is None


def test_of_two_restarts_the_newer_state_counts():
    found = resume_report(
        [load(0, step=30, epoch=0), load(0, step=8, epoch=1), load(1, step=8, epoch=1)]
    )

    assert (found.state.step, len(found.tiers)) == (8, 2)
