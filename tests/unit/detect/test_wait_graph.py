"""Whom a hung job waits for, by built dumps, and by those of jobs that are played to a stop."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded_job import RecordedJob, broken_jobs, dumps_of, entry, four_by_four
from support.recorded_job import played as job_of

from gpuops.detect.recorder_dump import RankDump, parse_dump
from gpuops.detect.wait_graph import HangKind, diagnose

GROUPS, _ = four_by_four()
PARTS = [ranks for name, ranks in GROUPS.items() if name != "0"]


def built(rank: int, *entries: dict[str, object]) -> RankDump:
    return parse_dump({"entries": list(entries)}, rank)


def test_of_a_job_that_is_done_nothing_is_pending():
    assert diagnose(dumps_of(job_of())).kind is HangKind.NOTHING


@pytest.mark.parametrize("stops", [{9: 2, 14: 2}, {10: 5, 15: 5}, {3: 0}, {7: 3}])
def test_ranks_that_do_not_come_are_named_and_not_those_that_wait_for_them(stops):
    found = diagnose(dumps_of(job_of(stops_before=stops)))

    assert (found.kind, set(found.ranks)) == (HangKind.ABSENT, set(stops))
    assert not set(found.waiting) & set(stops)


def test_ranks_whose_device_does_not_get_on_are_told_from_those_that_do_not_come():
    found = diagnose(dumps_of(job_of(never_completes={12: 2, 14: 2})))

    assert (found.kind, found.ranks) == (HangKind.STALLED, (12, 14))


def test_dumps_of_what_is_pending_alone_tell_who_does_not_get_on():
    pending = [(12, 3), (13, 7), (14, 3), (15, 7)]

    found = diagnose([built(rank, *calls(number)) for rank, number in pending])

    assert (found.kind, found.ranks) == (HangKind.STALLED, (12, 14))


def calls(first: int) -> list[dict[str, object]]:
    """Return the pending calls from *first* to the eighth, which all ranks have called."""
    return [entry("58", number, "nccl:all_reduce") for number in range(first, 9)]


def test_the_collective_in_which_most_wait_is_shown():
    found = diagnose(dumps_of(job_of(stops_before={5: 3})))

    assert found.pending is not None
    assert (found.pending.group, found.pending.number, len(found.waiting)) == ("0", 1, 15)
    assert str(found.pending) == "all_reduce(1024 Float)"


def test_ranks_that_enter_two_groups_in_crossed_order_wait_for_each_other():
    groups = {"a": [0, 1], "b": [0, 1], "0": [0, 1, 2]}
    programs = {
        0: [("a", "all_reduce"), ("b", "all_reduce"), ("0", "barrier")],
        1: [("b", "all_reduce"), ("a", "all_reduce"), ("0", "barrier")],
        2: [("0", "barrier")],
    }

    found = diagnose(dumps_of(RecordedJob(groups, programs).play()))

    assert (found.kind, found.ranks) == (HangKind.DEADLOCK, (0, 1))


@pytest.mark.parametrize(
    "odd",
    [
        [("pair", "all_reduce"), ("0", "barrier")],
        [("b", "all_reduce"), ("a", "all_reduce"), ("pair", "all_reduce"), ("0", "barrier")],
        [("b", "all_reduce"), ("pair", "all_reduce"), ("0", "barrier")],
    ],
    ids=["left out both", "crossed", "left out one"],
)
def test_of_a_ring_the_rank_is_named_that_waits_elsewhere_than_most(odd):
    everybody = [0, 1, 2, 3]
    groups = {"a": everybody, "b": everybody, "0": everybody, "pair": [2, 3]}
    usual = [("a", "all_reduce"), ("b", "all_reduce")]
    of_pair = [*usual, ("pair", "all_reduce"), ("0", "barrier")]
    programs = {0: [*usual, ("0", "barrier")], 1: [*usual, ("0", "barrier")], 2: odd, 3: of_pair}

    found = diagnose(dumps_of(RecordedJob(groups, programs).play()))

    assert (found.kind, found.ranks, found.waiting) == (HangKind.DEADLOCK, (2,), (0, 1, 3))


@pytest.mark.parametrize(
    "odd",
    [
        entry("0", 4, "nccl:broadcast"),
        entry("0", 4, "nccl:all_reduce", sizes=[(512,)]),
        entry("0", 4, "nccl:all_reduce", dtype="Half"),
    ],
    ids=["operation", "size", "type"],
)
def test_a_rank_that_calls_something_else_at_one_place_is_named(odd):
    usual = entry("0", 4, "nccl:all_reduce")

    found = diagnose([built(0, usual), built(1, odd), built(2, usual)])

    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (1,))


def test_of_two_that_differ_both_are_named():
    calls = entry("0", 1, "nccl:all_reduce"), entry("0", 1, "nccl:barrier")

    found = diagnose([built(rank, call) for rank, call in enumerate(calls)])

    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (0, 1))


def test_sizes_of_an_exchange_may_differ_between_ranks():
    calls = [entry("0", 1, "nccl:all_to_all", sizes=[(size,)]) for size in (8, 16)]

    assert diagnose([built(r, c) for r, c in enumerate(calls)]).kind is HangKind.ALL_IN


@pytest.mark.parametrize("answers", [True, False])
def test_a_receive_without_its_send_waits_for_the_other_end(answers):
    received = entry("0", 0, "nccl:recv 0<-1", is_p2p=True)
    sent = [entry("0", 0, "nccl:send 1->0", is_p2p=True)] if answers else []

    found = diagnose([built(0, received), built(1, *sent)])

    expected = (HangKind.ALL_IN, ()) if answers else (HangKind.ABSENT, (1,))
    assert (found.kind, found.ranks) == expected


def test_who_waits_behind_a_link_that_is_lost_blames_neither_of_its_ends():
    """All of a pipeline wait for stage 2, whose receive has its send: the message is on its way."""
    members = {"pp": {"ranks": [0, 1, 2, 3]}}
    calls = {
        0: ["recv 0<-1"],
        1: ["send 1->2", "recv 1<-2"],
        2: ["recv 2<-1"],
        3: ["recv 3<-2"],
    }
    dumps = [
        parse_dump(
            {
                "entries": [entry("pp", 0, f"nccl:{call}", is_p2p=True) for call in of_rank],
                "pg_config": members,
            },
            rank,
        )
        for rank, of_rank in calls.items()
    ]

    found = diagnose(dumps)

    assert (found.kind, found.ranks) == (HangKind.ALL_IN, ())
    assert "what all who take part have called" in found.how


def test_ranks_that_wait_for_messages_of_one_another_are_not_blamed():
    """Rank 0 has sent, and waits for the answer; what it sent was lost on its way to rank 1."""
    sent = entry("0", 0, "nccl:send 0->1", is_p2p=True, is_complete=True, p2p_seq_id=1)
    waits = entry("0", 0, "nccl:recv 0<-1", is_p2p=True, p2p_seq_id=2)
    receives = entry("0", 0, "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=1)

    found = diagnose([built(0, sent, waits), built(1, receives)])

    assert (found.kind, found.ranks) == (HangKind.ALL_IN, ())
    assert "one is lost, or was never sent" in found.how


@pytest.mark.parametrize("sleeper", [None, 9])
def test_who_waits_behind_a_collective_that_all_have_called_blames_none_of_these(sleeper):
    """Ranks 4 to 7 are in a collective over a network that fails; the others wait for them."""
    job = job_of(
        never_completes=dict.fromkeys(range(4, 8), 4),
        stops_before={} if sleeper is None else {sleeper: 2},
    )

    found = diagnose(dumps_of(job))

    if sleeper is None:
        assert (found.kind, found.ranks) == (HangKind.ALL_IN, ())
        assert "group tp1 (ranks 4-7)" in found.how
        assert "none completed it" in found.how
        assert found.how.count("group") == 1, "what some have not called is left out"
    else:
        assert (found.kind, found.ranks) == (HangKind.ABSENT, (sleeper,))


def test_of_a_batch_of_sends_only_its_own_entry_is_complete():
    sent = entry("0", 0, "nccl:send 1->2", is_p2p=True, p2p_seq_id=5)
    batch = entry("0", 0, "nccl:coalesced", is_complete=True, is_p2p=True, p2p_seq_id=5)
    waits = entry("0", 7, "nccl:all_reduce")

    found = diagnose([built(0, waits), built(1, sent, batch), built(2, waits)])

    assert (found.kind, found.ranks) == (HangKind.ABSENT, (1,))


def test_a_send_before_one_that_is_complete_is_complete():
    sends = [
        entry("0", 0, "nccl:send 0->1", is_complete=done, is_p2p=True, p2p_seq_id=number)
        for number, done in enumerate([False, True])
    ]

    assert diagnose([built(0, *sends), built(1)]).kind is HangKind.NOTHING


def test_who_waits_behind_a_ring_for_a_rank_without_a_dump_is_in_no_ring():
    groups = {"a": [0, 1], "b": [0, 1], "c": [1, 2], "d": [2, 3]}
    members = {name: {"ranks": json.dumps(ranks)} for name, ranks in groups.items()}
    waits = {0: "a", 1: "bc", 2: "d"}
    dumps = [
        parse_dump(
            {"pg_config": members, "entries": [entry(g, 1, "nccl:all_reduce") for g in names]}, rank
        )
        for rank, names in waits.items()
    ]

    found = diagnose(dumps, 4)

    assert (found.kind, found.ranks, found.without_dump) == (HangKind.DEADLOCK, (0, 1), (3,))


def test_more_ranks_than_the_job_is_said_to_have_are_judged_too():
    sent = entry("0", 0, "nccl:send 7->0", is_p2p=True)

    assert diagnose([built(0), built(7, sent)], 4).kind is HangKind.ABSENT


def test_without_the_dump_of_the_rank_that_is_waited_for_it_is_named_as_unknown():
    job = job_of(stops_before={9: 2})

    found = diagnose([dump for dump in dumps_of(job) if dump.rank != 9])

    assert (found.ranks, found.without_dump) == ((), (9,))


def test_no_dump_at_all_says_nothing():
    found = diagnose([], 4)

    assert (found.kind, found.without_dump) == (HangKind.NOTHING, (0, 1, 2, 3))


@given(broken_jobs(), st.randoms(use_true_random=False))
def test_whoever_is_named_had_stopped_whatever_the_order_of_the_dumps(job, order: random.Random):
    dumps = dumps_of(job)
    found = diagnose(dumps)
    order.shuffle(dumps)

    assert diagnose(dumps) == found
    assert bool(found.ranks) == any(map(job.waits, job.programs))
    assert set(found.ranks) <= job.awaited()


@given(broken_jobs(), st.integers(0, 15))
def test_without_one_dump_only_that_rank_is_added(job, lost):
    dumps = dumps_of(job)
    whole, found = diagnose(dumps), diagnose([dump for dump in dumps if dump.rank != lost])

    assert set(found.ranks) <= job.awaited()
    # That one may have been the only witness: a peer that completed what this one did not.
    missed = set(whole.ranks) - {*found.ranks, lost}
    assert all(any({rank, lost} <= set(ranks) for ranks in PARTS) for rank in missed)
    assert found.without_dump == (lost,)
