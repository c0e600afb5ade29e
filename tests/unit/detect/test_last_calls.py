"""The last calls of a rank: as telling as its whole dump, and bounded, whatever comes."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded_job import broken_jobs, dumps_of, entry, four_by_four, played

from gpuops.detect.last_calls import BYTES_MAX, CALLS_MAX, from_json, last_calls, to_json
from gpuops.detect.recorder_dump import RankDump, parse_dump
from gpuops.detect.wait_graph import HangKind, diagnose

GROUPS, PROGRAMS = four_by_four()


def sent(dump: RankDump) -> RankDump | None:
    return from_json(json.loads(json.dumps(to_json(dump))), dump.rank)


def in_words(found):
    return replace(found, pending=str(found.pending))


def built(rank: int, *entries: dict[str, object], **groups: list[int]) -> RankDump:
    config = {name: {"ranks": ranks} for name, ranks in groups.items()}
    return parse_dump({"entries": list(entries), "pg_config": config}, rank)


@given(broken_jobs(), st.randoms(use_true_random=False))
def test_of_the_last_calls_is_said_what_is_said_of_whole_dumps(job, order: random.Random):
    dumps = dumps_of(job)
    found = [sent(dump) for dump in dumps]
    order.shuffle(found)

    assert in_words(diagnose(found)) == in_words(diagnose(dumps))


def test_the_last_calls_survive_their_json_form():
    calls = (
        entry("tp", 3, "nccl:all_gather", is_complete=True, sizes=[(4, 8), (2,)], dtype="Half"),
        entry("tp", 4, "nccl:all_gather", frames=[{"filename": "/job/a.py", "line": 7}]),
        entry("pp", 0, "nccl:send 0->1", is_p2p=True, p2p_seq_id=5),
    )
    dump = built(3, *calls, tp=[0, 1, 2, 3], pp=[3, 11, 19, 40])

    found = sent(dump)

    assert found == last_calls(dump)
    assert {str(call) for call in found.calls} == {str(call) for call in dump.calls}
    assert found.members == dump.members
    assert next(call.place for call in found.calls if call.place) == "/job/a.py:7"


def test_of_many_pending_calls_the_first_and_the_last_are_there():
    """The first is where the rank waits, the last how far it has called."""
    dump = built(0, *(entry("0", number, "nccl:all_reduce") for number in range(3, 500)))

    found = sent(dump)

    assert [call.number for call in found.calls][:2] == [3, 499]
    assert len(found.calls) == CALLS_MAX


def test_a_group_of_every_eighth_of_sixteen_thousand_ranks_fits_and_an_odd_one_is_left_out():
    calls = [entry(name, 1, "nccl:all_reduce") for name in ("dp", "odd", "world")]
    odd = sorted(random.Random(1).sample(range(16_384), 500))
    dump = built(0, *calls, dp=list(range(0, 16_384, 8)), odd=odd, world=list(range(16_384)))

    found = sent(dump)

    assert found.members == {"dp": dump.members["dp"]}
    assert len(found.calls) == 3


@pytest.mark.parametrize("n_groups", [CALLS_MAX + 1, 30])
def test_a_rank_that_is_in_more_groups_than_fit_is_not_described_by_a_part_of_them(n_groups):
    sizes = [(1, 2, 3, 4, 5, 6, 7, 8)] * 8
    names = [f"group-{number:020}" for number in range(n_groups)]
    dump = built(0, *(entry(name, 1, "nccl:all_reduce", sizes=sizes) for name in names))

    assert last_calls(dump) is None
    assert to_json(dump) is None


texts = st.text(max_size=400)
numbers = st.integers(0, 2**63 - 1)
entries = st.builds(
    entry,
    texts,
    numbers,
    texts.map("nccl:{}".format),
    is_complete=st.booleans(),
    sizes=st.lists(st.lists(numbers, max_size=20), max_size=70),
    dtype=texts,
    is_p2p=st.booleans(),
    p2p_seq_id=numbers,
)


@given(st.lists(entries, max_size=40), st.dictionaries(texts, st.lists(numbers, max_size=40)))
def test_whatever_a_rank_recorded_it_is_bounded_and_reads_back(calls, groups):
    dump = built(0, *calls, **{f"g{name}": ranks for name, ranks in groups.items()})

    body = to_json(dump)

    assert len(json.dumps(body)) <= BYTES_MAX
    assert body is None or from_json(json.loads(json.dumps(body)), 0) is not None


def test_secrets_in_it_are_hidden():
    frames = [{"filename": "https://me:pass@host/job.py", "line": 3}]
    dump = built(0, entry("token=abcdefgh", 1, "nccl:all_reduce", frames=frames))

    text = json.dumps(to_json(dump))

    assert "abcdefgh" not in text
    assert "pass@" not in text


GOOD = ["0", 1, "all_reduce", [[8]], ["Float"], False, False, None, ""]
HOSTILE = [
    None,
    [],
    "calls",
    {"calls": []},
    {"calls": 5, "members": {}},
    {"calls": [GOOD[:-1]], "members": {}},
    {"calls": [[*GOOD, 1]], "members": {}},
    {"calls": [["0", "1", *GOOD[2:]]], "members": {}},
    {"calls": [["0", -1, *GOOD[2:]]], "members": {}},
    {"calls": [[None, *GOOD[1:]]], "members": {}},
    {"calls": [[*GOOD[:-1], 7]], "members": {}},
    {"calls": [GOOD] * (CALLS_MAX + 1), "members": {}},
    {"calls": [GOOD], "members": []},
    {"calls": [GOOD], "members": {"0": [[0, 1]]}},
    {"calls": [GOOD], "members": {"0": [[0, 1, 2**62]]}},
    {"calls": [GOOD], "members": {"0": [[0, 0, 5]]}},
    {"calls": [GOOD], "members": {"0": [[0.5, 1, 5]]}},
    {"calls": [GOOD], "members": {str(n): [[0, 1, 8000]] for n in range(CALLS_MAX)}},
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_something_else_says_nothing(data):
    assert from_json(data, 0) is None


def test_members_that_are_no_ranks_are_left_out():
    for run in ([2**70, 1, 5], [-9, 1, 3], [0, 2**70, 3]):
        assert from_json({"calls": [GOOD], "members": {"0": [run]}}, 0).members == {}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda each: st.lists(each, max_size=9) | st.dictionaries(texts, each, max_size=3),
)
rows = st.tuples(*[json_values | st.just(part) for part in GOOD]).map(list)


@given(
    json_values
    | st.fixed_dictionaries({"calls": st.lists(rows | json_values), "members": json_values})
)
def test_no_data_raises_or_grows(data):
    found = from_json(data, 0)

    assert found is None or len(found.calls) <= CALLS_MAX
    diagnose([] if found is None else [found], 4)


def test_calls_of_sixteen_thousand_ranks_name_the_one_that_is_missing():
    calls = [entry("0", 9, "nccl:all_reduce"), entry("0", 8, "nccl:all_reduce", is_complete=True)]
    dumps = [built(rank, *calls[rank == 9_999 :]) for rank in range(16_384)]

    found = diagnose(dumps)

    assert (found.kind, found.ranks) == (HangKind.ABSENT, (9_999,))
    assert "rank 9999 has not called all_reduce(1024 Float), call 9 of group 0" in found.how


def test_played_jobs_say_how_in_words():
    def how(**faults):
        return diagnose([sent(dump) for dump in dumps_of(played(**faults))]).how

    assert how(stops_before={5: 3}) == (
        "rank 5 has not called all_reduce(1024 Float), call 1 of group 0 (all ranks),"
        " in which ranks 0-4,6-15 wait"
    )
    assert how(never_completes={12: 2}) == (
        "rank 12 called all_reduce(1024 Float), call 1 of group dp0 (ranks 0,4,8,12),"
        " which a peer completed"
    )
