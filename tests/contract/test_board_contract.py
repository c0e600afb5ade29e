"""What every board does: in memory, on a server process, in a real Postgres, in a real etcd."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import pytest
from support.boards import etcd_boards, eventually, memory_boards, postgres_boards, tcp_boards

from gpuops.control.store import (
    KEY_CHARS_MAX,
    NO_ENTRY,
    VALUE_BYTES_MAX,
    ControlStoreError,
    ControlStoreUnreachableError,
)

KINDS = ["memory", "tcp", pytest.param("postgres", marks=pytest.mark.postgres), "etcd"]


@pytest.fixture(params=KINDS)
def boards(request):
    if request.param == "memory":
        new = memory_boards()
    elif request.param == "tcp":
        new = tcp_boards()
    elif request.param == "etcd":
        new = etcd_boards(request.getfixturevalue("etcd_url"))
    else:
        new = postgres_boards(request.getfixturevalue("postgres_url"))
    with new as found:
        yield found


@pytest.fixture
def board(boards):
    return boards.open()


def together(number, act):
    """Call *act* with 0..number-1 at the same moment, each in its thread; return the answers."""
    start = threading.Barrier(number)

    def one(index):
        start.wait(30)
        return act(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(one, range(number)))


def test_what_is_not_there_is_nothing(board):
    assert board.get("control") == NO_ENTRY
    assert board.list("") == {}


def test_a_version_is_one_more_with_each_writing(board):
    board.put("a/b", b"one")
    board.put("a/b", b"two")

    entry = board.get("a/b")
    assert (entry.value, entry.version) == (b"two", 2)


@pytest.mark.parametrize("value", [b"", b"\0\xff", bytes(range(256)) * 300], ids=len)
def test_a_value_is_bytes(board, value):
    board.put("k", value)

    assert board.get("k").value == value
    assert board.list("k")["k"].value == value


def test_another_handle_sees_it(boards):
    one, other = boards.open(), boards.open()
    one.put("k", b"v")

    assert other.get("k").value == b"v"
    assert one.instance == other.instance != ""


def test_swap_writes_where_the_version_is_the_one_seen(board):
    assert board.compare_and_set("k", b"a", version=1) == (False, NO_ENTRY)
    done, first = board.compare_and_set("k", b"a", version=0)
    assert (done, first.value, first.version) == (True, b"a", 1)
    assert board.compare_and_set("k", b"b", version=0) == (False, first)
    done, second = board.compare_and_set("k", b"b", version=1)
    assert (done, second.value, second.version, second.arrival) == (True, b"b", 2, first.arrival)
    assert board.compare_and_set("k", b"c", version=1) == (False, second)
    assert board.get("k") == second


def test_a_swap_whose_answer_was_lost_may_be_repeated(board):
    board.compare_and_set("k", b"a", version=0)
    board.compare_and_set("k", b"b", version=1)

    done, entry = board.compare_and_set("k", b"b", version=1)

    assert (done, entry.value, entry.version) == (True, b"b", 2)


def test_one_of_many_wins_each_version(boards):
    handles = [boards.open() for _ in range(6)]
    rounds = 15

    def race(index):
        won = []
        for version in range(rounds):
            value = b"%d by %d" % (version, index)
            done, entry = handles[index].compare_and_set("control", value, version=version)
            while entry.version <= version:
                entry = handles[index].get("control")
            won += [(version, value)] if done else []
        return won

    winners = sorted(chain.from_iterable(together(6, race)))

    assert [version for version, _ in winners] == list(range(rounds))
    assert handles[0].get("control").value == winners[-1][1]
    assert handles[0].get("control").version == rounds


def test_nothing_is_lost_when_many_count_by_swapping(boards):
    handles = [boards.open() for _ in range(4)]

    def count(index):
        for _ in range(10):
            done, entry = False, handles[index].get("n")
            while not done:
                mine = b"%d %d" % (int(entry.value.split()[0] if entry.value else 0) + 1, index)
                done, entry = handles[index].compare_and_set("n", mine, version=entry.version)

    together(4, count)

    assert handles[0].get("n").value.split()[0] == b"40"


def test_a_list_is_in_order_of_arrival(board):
    for key in ("r/3", "r/1", "r/2", "other"):
        board.put(key, key.encode())
    board.put("r/3", b"again")

    found = board.list("r/")

    assert list(found) == ["r/3", "r/1", "r/2"]
    assert found["r/3"].value == b"again"
    orders = [entry.arrival for entry in found.values()]
    assert orders == sorted(set(orders))
    assert found["r/1"] == board.get("r/1")


def test_one_arrival_comes_first_for_all(boards):
    handles = [boards.open() for _ in range(4)]
    together(4, lambda index: handles[index].put(f"report/{index}", b"x"))

    seen = [list(handle.list("report/")) for handle in handles]

    assert all(order == seen[0] for order in seen)
    assert sorted(seen[0]) == [f"report/{index}" for index in range(4)]


@pytest.mark.parametrize(
    ("prefix", "found"),
    [
        ("", ["a", "a/b/c", "ab/c", "a/b_c", "a/bXc"]),
        ("a", ["a", "a/b/c", "ab/c", "a/b_c", "a/bXc"]),
        ("a/", ["a/b/c", "a/b_c", "a/bXc"]),
        ("a/b", ["a/b/c", "a/b_c", "a/bXc"]),
        ("a/b_", ["a/b_c"]),
        ("a/b/", ["a/b/c"]),
        ("a%", []),
        ("zz/", []),
    ],
)
def test_list_and_delete_go_by_prefix(board, prefix, found):
    every = ["a", "a/b/c", "ab/c", "a/b_c", "a/bXc"]
    for key in every:
        board.put(key, b"")

    assert list(board.list(prefix)) == found
    board.delete(prefix)
    assert list(board.list("")) == [key for key in every if key not in found]


def test_what_was_deleted_begins_anew(board):
    board.put("k", b"1")
    board.put("l", b"1")
    board.put("k", b"2")
    board.delete("k")

    assert board.get("k") == NO_ENTRY
    assert board.compare_and_set("k", b"3", version=0)[1].version == 1
    assert list(board.list("")) == ["l", "k"]


def test_a_long_list_is_whole(board):
    value = bytes(400_000)
    keys = [f"report/{number}" for number in range(12)]
    for key in keys:
        board.put(key, value)

    found = board.list("report/")

    assert list(found) == keys
    assert all(entry.value == value for entry in found.values())


def test_the_largest_value_is_taken_and_a_larger_one_refused(board):
    board.put("k", bytes(VALUE_BYTES_MAX))

    for write in (
        lambda value: board.put("k", value),
        lambda value: board.compare_and_set("k", value, version=1),
        lambda value: board.heartbeat("k", value, watch="w", seen_version=0, hold_s=0),
    ):
        with pytest.raises(ControlStoreError, match="bytes"):
            write(bytes(VALUE_BYTES_MAX + 1))
    assert board.get("k").version == 1
    assert len(board.list("k")["k"].value) == VALUE_BYTES_MAX


@pytest.mark.parametrize("key", ["", "a b", "ä", "a\n", "x" * (KEY_CHARS_MAX + 1), "\0"], ids=repr)
def test_what_is_no_key_is_refused(board, key):
    for call in (
        lambda: board.get(key),
        lambda: board.put(key, b""),
        lambda: board.compare_and_set(key, b"", version=0),
        lambda: board.heartbeat(key, b"", watch="w", seen_version=0, hold_s=0),
        lambda: board.heartbeat("k", b"", watch=key, seen_version=0, hold_s=0),
    ):
        with pytest.raises(ControlStoreError, match="key"):
            call()


def test_the_longest_key_is_taken(board):
    key = "k" * KEY_CHARS_MAX
    board.put(key, b"v")

    assert board.get(key).value == b"v"
    assert board.heartbeat(key, b"v", watch=key[:-1], seen_version=0, hold_s=0).watched is None


def test_a_beat_answers_at_once_where_there_is_something_newer(board):
    board.put("control", b"1")

    beaten = board.heartbeat("alive/a", b"7", watch="control", seen_version=0, hold_s=60)

    assert beaten.watched == board.get("control")
    assert board.get("alive/a").value == b"7"


@pytest.mark.parametrize("hold_s", [0.0, 0.2])
def test_a_beat_without_news_ends_with_its_hold(board, hold_s):
    board.put("control", b"1")

    beaten = board.heartbeat("alive/a", b"7", watch="control", seen_version=1, hold_s=hold_s)

    assert beaten.watched is None
    assert board.get("alive/a").version == 1


def test_the_time_of_a_board_goes_on_and_is_the_same_for_all(boards, request):
    one, other = boards.open(), boards.open()
    # etcd shows its clock in whole seconds: handles differ by that much, each by itself goes on.
    resolution_s = 1.0 if "etcd" in request.node.callspec.id else 0.0
    times = [
        handle.heartbeat("alive/a", b"", watch="w", seen_version=0, hold_s=0.05).store_s
        for handle in (one, other, one, other)
    ]

    assert times[0] < times[2]
    assert times[1] < times[3]
    assert all(later >= early - resolution_s for early, later in pairwise(times))
    assert 0.1 - resolution_s <= times[-1] - times[0] < 60


@pytest.mark.parametrize("how", ["put", "swap", "beat"])
def test_a_change_wakes_all_who_wait_for_it(boards, how):
    waiters, writer = [boards.open() for _ in range(3)], boards.open()
    writer.put("control", b"old")

    def wait(index):
        return waiters[index].heartbeat(
            f"alive/{index}", b"", watch="control", seen_version=1, hold_s=60
        )

    with ThreadPoolExecutor(3) as pool:
        began_s = time.monotonic()
        held = [pool.submit(wait, index) for index in range(3)]
        eventually(lambda: len(writer.list("alive/")) == 3, "all beat")
        writer.put("unrelated", b"")
        if how == "put":
            writer.put("control", b"new")
        elif how == "swap":
            assert writer.compare_and_set("control", b"new", version=1)[0]
        else:
            writer.heartbeat("control", b"new", watch="x", seen_version=0, hold_s=0)
        seen = [future.result(30).watched for future in held]

    assert {entry.value for entry in seen} == {b"new"}
    assert {entry.version for entry in seen} == {2}
    assert time.monotonic() - began_s < 30


def test_a_held_beat_delays_no_other_call_of_the_handle(board):
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(
            board.heartbeat, "alive/a", b"", watch="control", seen_version=0, hold_s=60
        )
        eventually(lambda: board.get("alive/a").version, "it beats")
        for number in range(20):
            board.put(f"k/{number}", b"")
        assert not held.done()
        board.put("control", b"x")
        assert held.result(30).watched.value == b"x"


def test_a_handle_is_safe_from_several_threads(board):
    def work(index):
        for number in range(10):
            board.put(f"{index}/{number}", b"%d %d" % (index, number))
            assert board.get(f"{index}/{number}").value == b"%d %d" % (index, number)
        return len(board.list(f"{index}/"))

    assert together(4, work) == [10] * 4


def test_a_closed_handle_is_unreachable_and_the_others_go_on(boards):
    one, other = boards.open(), boards.open()
    one.put("k", b"v")
    one.close()
    one.close()

    for call in (
        lambda: one.get("k"),
        lambda: one.list(""),
        lambda: one.put("k", b""),
        lambda: one.compare_and_set("k", b"", version=0),
        lambda: one.heartbeat("k", b"", watch="w", seen_version=0, hold_s=0),
        lambda: one.delete(""),
    ):
        with pytest.raises(ControlStoreUnreachableError, match="closed"):
            call()
    assert other.get("k").value == b"v"


def test_closing_ends_a_held_beat(boards):
    one, other = boards.open(), boards.open()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(
            one.heartbeat, "alive/a", b"", watch="control", seen_version=0, hold_s=60
        )
        eventually(lambda: other.get("alive/a").version, "it beats")
        one.close()
        with pytest.raises(ControlStoreUnreachableError):
            held.result(30)
