"""The board in a real Postgres that is stopped, restarted, tampered with and written to at once."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from support.boards import DEADLINE_S, RUN_KEY, TOKEN, eventually
from support.ports import free_port
from support.postgres import START_S, running_server

from gpuops.control.postgres.store import PostgresControlStore
from gpuops.control.store import (
    NO_ENTRY,
    ControlStoreError,
    ControlStoreResetError,
    ControlStoreUnreachableError,
)

pytestmark = pytest.mark.postgres
_VALUE = "SELECT value FROM gpuops_board WHERE key ="


@pytest.fixture
def server():
    """A server of this test alone, which it may break."""
    with running_server() as found:
        yield found


@pytest.fixture
def open_board():
    """Opens boards that are closed with the test."""
    with contextlib.ExitStack() as stack:

        def new(url, **changes):
            wanted = {"run_key": RUN_KEY, "token": TOKEN, "deadline_s": DEADLINE_S, **changes}
            return stack.enter_context(contextlib.closing(PostgresControlStore(url, **wanted)))

        yield new


def execute(url, statement, *values):
    plain = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(plain, autocommit=True, connect_timeout=10) as line:
        cursor = line.execute(statement, values)
        return cursor.fetchall() if cursor.description else cursor.rowcount


def test_many_make_the_table_at_once(postgres_url, open_board):
    boards = [open_board(postgres_url) for _ in range(8)]
    start = threading.Barrier(8)

    def first(index):
        start.wait(30)
        boards[index].put(f"k/{index}", b"v")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(first, range(8)))

    assert len(boards[0].list("k/")) == 8
    assert len({board.instance for board in boards}) == 1


def test_runs_do_not_see_each_other(postgres_url, open_board):
    one, other = open_board(postgres_url), open_board(postgres_url, run_key="other")
    one.put("k", b"mine")

    assert other.get("k") == NO_ENTRY
    assert other.compare_and_set("k", b"theirs", version=0)[0]
    other.delete("")
    assert one.get("k").value == b"mine"
    assert one.instance != other.instance


def test_the_wrong_token_is_refused(postgres_url, open_board):
    open_board(postgres_url).put("control", b"v")

    for token in ("another", ""):
        wrong = open_board(postgres_url, token=token)
        for call in (
            lambda board=wrong: board.get("control"),
            lambda board=wrong: board.put("control", b"mine"),
            lambda board=wrong: board.delete(""),
        ):
            with pytest.raises(ControlStoreError, match="token") as caught:
                call()
            assert not isinstance(caught.value, ControlStoreUnreachableError)
    assert open_board(postgres_url).get("control").value == b"v"


def test_without_a_token_it_works_unsealed(postgres_url, open_board):
    open_board(postgres_url, token="").put("k", b"v")

    assert open_board(postgres_url, token="").get("k").value == b"v"
    with pytest.raises(ControlStoreError, match="token"):
        open_board(postgres_url).get("k")


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE gpuops_board SET value = '\\x00' || convert_to('mine', 'UTF8') WHERE key = %s",
        "UPDATE gpuops_board SET value = value || '\\x41' WHERE key = %s",
        "UPDATE gpuops_board SET value = '' WHERE key = %s",
        "UPDATE gpuops_board SET version = version + 1 WHERE key = %s",
        f"UPDATE gpuops_board SET value = ({_VALUE} 'other') WHERE key = %s",
        f"UPDATE gpuops_board SET value = ({_VALUE} 'beaten') WHERE key = %s",
    ],
    ids=["unsealed", "longer", "emptied", "moved on", "another key's", "a put's"],
)
def test_a_tampered_row_is_refused_by_its_name(postgres_url, open_board, tampering):
    board = open_board(postgres_url)
    board.compare_and_set("control", b"v", version=0)
    board.compare_and_set("other", b"v", version=0)
    board.put("beaten", b"v")
    assert execute(postgres_url, tampering, "control") == 1

    for call in (
        lambda: board.get("control"),
        lambda: board.list(""),
        lambda: board.heartbeat("alive/a", b"", watch="control", seen_version=0, hold_s=0),
        lambda: board.compare_and_set("control", b"w", version=0),
    ):
        with pytest.raises(ControlStoreError, match="'control'"):
            call()
    assert board.get("other").value == b"v"


def test_an_old_record_cannot_be_brought_back(postgres_url, open_board):
    board = open_board(postgres_url)
    board.compare_and_set("control", b"run", version=0)
    (old,) = execute(postgres_url, "SELECT value FROM gpuops_board WHERE key = 'control'")[0]
    board.compare_and_set("control", b"stop", version=1)
    execute(postgres_url, "UPDATE gpuops_board SET value = %s WHERE key = 'control'", old)

    with pytest.raises(ControlStoreError, match="'control'"):
        board.get("control")


def test_a_record_of_an_earlier_run_with_the_same_id_cannot_be_brought_back(
    postgres_url, open_board
):
    """The exploit: the user's own token is that of all their runs, and ids are used again."""
    open_board(postgres_url).compare_and_set("control", b"over", version=0)
    kept = execute(postgres_url, "SELECT value FROM gpuops_board WHERE key = 'control'")[0]
    execute(postgres_url, "DELETE FROM gpuops_board")
    board = open_board(postgres_url)
    board.compare_and_set("control", b"run", version=0)
    assert board.get("control").value == b"run"
    execute(postgres_url, "UPDATE gpuops_board SET value = %s WHERE key = 'control'", *kept)

    with pytest.raises(ControlStoreError, match="'control'"):
        board.get("control")


def test_a_run_that_was_cleaned_up_is_noticed_on_the_next_connection(server, open_board):
    with server.database() as url:
        one, other = open_board(url), open_board(url)
        one.put("control", b"v")
        other.get("control")
        known = other.instance
        one.delete("")
        assert one.list("") == {}
        execute(url, "DELETE FROM gpuops_board")
        server.kill()
        server.start()
        with pytest.raises(ControlStoreResetError):
            other.get("control")
        fresh = open_board(url)
        assert fresh.get("control") == NO_ENTRY
        assert fresh.instance != known


def test_rows_of_old_runs_are_removed_when_a_new_one_begins(postgres_url, open_board):
    for run_key in ("old", "young"):
        open_board(postgres_url, run_key=run_key).put("k", b"v")
    age = "UPDATE gpuops_board SET changed = now() - interval '8 days' WHERE run_key = 'old'"
    execute(postgres_url, age)
    open_board(postgres_url).put("k", b"v")

    runs = execute(postgres_url, "SELECT DISTINCT run_key FROM gpuops_board ORDER BY 1")

    assert [run for (run,) in runs] == [RUN_KEY, "young"]


def test_a_restarted_server_costs_no_error(server, open_board):
    with server.database() as url:
        board = open_board(url, deadline_s=START_S)
        board.compare_and_set("control", b"1", version=0)
        server.kill()
        with ThreadPoolExecutor(2) as pool:
            swapped = pool.submit(board.compare_and_set, "control", b"2", version=1)
            beaten = pool.submit(
                board.heartbeat, "alive/a", b"", watch="control", seen_version=1, hold_s=START_S
            )
            server.start()
            assert swapped.result(2 * START_S)[0]
            assert beaten.result(2 * START_S).watched.value == b"2"


def test_a_frozen_server_costs_the_deadline(server, open_board):
    with server.database() as url:
        patient, board = open_board(url), open_board(url, deadline_s=2)
        patient.put("k", b"1")
        eventually(lambda: written(board, b"1"), "it is connected")
        server.signal(signal.SIGSTOP)
        try:
            for call in (
                lambda: board.get("k"),
                lambda: board.put("k", b"2"),
                lambda: board.heartbeat("alive/a", b"", watch="w", seen_version=0, hold_s=0.1),
                lambda: open_board(url, deadline_s=2).get("k"),
            ):
                began_s = time.monotonic()
                with pytest.raises(ControlStoreUnreachableError, match=r"in time|does not answer"):
                    call()
                assert time.monotonic() - began_s < 20
        finally:
            server.signal(signal.SIGCONT)

        eventually(lambda: written(board, b"3"), "the thawed server is used again")
        assert patient.get("k").value == b"3"


def written(board, value):
    """Say whether *value* could be written within the board's own short time."""
    with contextlib.suppress(ControlStoreUnreachableError):
        board.put("k", value)
        return True
    return False


def test_no_server_is_unreachable(open_board):
    url = f"postgresql+psycopg://app:s3cret@127.0.0.1:{free_port()}/nowhere"
    with pytest.raises(ControlStoreUnreachableError, match=r"[Rr]efused") as caught:
        open_board(url, deadline_s=1).get("k")
    assert "s3cret" not in str(caught.value)


def test_a_wrong_password_is_final_and_not_shown(guarded_postgres, open_board):
    with guarded_postgres.database():
        url = guarded_postgres.url("postgres", password="wr0ng-secret")
        began_s = time.monotonic()
        with pytest.raises(ControlStoreError, match="authentication") as caught:
            open_board(url, deadline_s=60).get("k")
    assert not isinstance(caught.value, ControlStoreUnreachableError)
    assert time.monotonic() - began_s < 50
    assert "wr0ng" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("url", ["postgresql://u:s3cret@[bad", "nonsense s3cret"])
def test_a_malformed_url_is_an_error_that_hides_the_password(url):
    with pytest.raises(ControlStoreError, match="malformed") as caught:
        PostgresControlStore(
            url.replace("nonsense s3cret", "password=s3cret nonsense"), run_key="r"
        )
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("run_key", ["", "a\0b", "x" * 256], ids=["empty", "nul", "long"])
def test_a_run_key_that_cannot_be_kept_is_an_error(run_key):
    with pytest.raises(ControlStoreError, match="run's key"):
        PostgresControlStore("postgresql://app@127.0.0.1/x", run_key=run_key)


def _count(url, index, writing):
    """Count up by swapping until killed."""
    board = PostgresControlStore(url, run_key=RUN_KEY, token=TOKEN, deadline_s=DEADLINE_S)
    entry = board.get("n")
    while True:
        number = int(entry.value.split()[0]) if entry.value else 0
        mine = b"%d by %d" % (number + 1, index)
        done, entry = board.compare_and_set("n", mine, version=entry.version)
        if done:
            board.put(f"alive/{index}", mine)
            writing.set()


def _counts_on(board):
    """Check that each version is one more than the one before; return whether the next one is."""
    entry = board.get("n")
    assert int(entry.value.split()[0]) == entry.version
    mine = b"%d by me" % (entry.version + 1)
    done, after = board.compare_and_set("n", mine, version=entry.version)
    return done and after.version == entry.version + 1


def test_writers_that_are_killed_leave_a_count_without_holes(postgres_url, open_board):
    context = multiprocessing.get_context("spawn")
    board = open_board(postgres_url)
    board.put("first", b"")
    for round_ in range(3):
        started = [(context.Event(), index) for index in range(3)]
        processes = [
            context.Process(target=_count, args=(postgres_url, index, event), daemon=True)
            for event, index in started
        ]
        for process in processes:
            process.start()
        try:
            for event, _index in started:
                assert event.wait(60)
            wanted = board.get("n").version + 20
            eventually(lambda version=wanted: board.get("n").version >= version, "they count")
        finally:
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
                process.join(30)
        # The server may still carry out the last request of each writer.
        eventually(lambda: _counts_on(board), f"the count goes on in round {round_}")
