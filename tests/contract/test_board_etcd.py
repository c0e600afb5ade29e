"""The board in a real etcd whose members are killed and frozen and whose keys are tampered with."""

import base64
import contextlib
import multiprocessing
import os
import re
import signal
import time
import urllib.request

import pytest
from support.boards import DEADLINE_S, RUN_KEY, TOKEN, eventually
from support.etcd import running_etcd
from support.ports import free_port

from gpuops.control.etcd.address import EtcdAddress
from gpuops.control.etcd.session import EtcdSession, MemberClock
from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.signing import run_digest
from gpuops.control.store import (
    NO_ENTRY,
    VALUE_BYTES_MAX,
    ControlStoreError,
    ControlStoreResetError,
    ControlStoreUnreachableError,
)

ROOT = f"gpuops/{run_digest(RUN_KEY).hex()}/"


@pytest.fixture
def open_board():
    """Opens boards that are closed with the test."""
    with contextlib.ExitStack() as stack:

        def new(url, **changes):
            wanted = {"run_key": RUN_KEY, "token": TOKEN, "deadline_s": DEADLINE_S, **changes}
            return stack.enter_context(contextlib.closing(EtcdControlStore(url, **wanted)))

        yield new


@pytest.fixture
def url(etcd_url):
    """The address of an etcd without a key of these tests' run."""
    post(etcd_url, "kv/deleterange", of_the_run())
    return etcd_url


def of_the_run():
    """Return the range of all keys of these tests' run; other tests use the same etcd."""
    return {"key": encoded(ROOT), "range_end": encoded(ROOT[:-1] + "0")}


def encoded(text):
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def post(url, path, body):
    session = EtcdSession(EtcdAddress.parse(url), MemberClock())
    with contextlib.closing(session):
        return session.call(path, body, DEADLINE_S)


def raw(url, key):
    (pair,) = post(url, "kv/range", {"key": encoded(ROOT + key)})["kvs"]
    return pair


def test_runs_do_not_see_each_other(url, open_board):
    one, other = open_board(url), open_board(url, run_key="other")
    one.put("k", b"mine")

    assert other.get("k") == NO_ENTRY
    assert other.compare_and_set("k", b"theirs", version=0)[0]
    other.delete("")
    assert one.get("k").value == b"mine"
    assert one.instance != other.instance


def test_the_wrong_token_is_refused(url, open_board):
    open_board(url).put("control", b"v")

    for token in ("another", ""):
        wrong = open_board(url, token=token)
        for call in (
            lambda board=wrong: board.get("control"),
            lambda board=wrong: board.put("control", b"mine"),
            lambda board=wrong: board.delete(""),
        ):
            with pytest.raises(ControlStoreError, match="token") as caught:
                call()
            assert not isinstance(caught.value, ControlStoreUnreachableError)
    assert open_board(url).get("control").value == b"v"


def test_a_tampered_key_is_refused_by_its_name(url, open_board):
    board = open_board(url)
    board.compare_and_set("control", b"v", version=0)
    board.compare_and_set("other", b"v", version=0)
    old = raw(url, "k/control")["value"]
    board.compare_and_set("control", b"w", version=1)

    for value in (old, encoded(b"\0mine"), raw(url, "k/other")["value"]):
        post(url, "kv/put", {"key": encoded(f"{ROOT}k/control"), "value": value})
        for call in (
            lambda: board.get("control"),
            lambda: board.list(""),
            lambda: board.heartbeat("alive/a", b"", watch="control", seen_version=0, hold_s=0),
        ):
            with pytest.raises(ControlStoreError, match="'control'"):
                call()
    assert board.get("other").value == b"v"


def test_a_run_that_was_cleaned_up_is_noticed_at_the_next_call(url, open_board):
    one, other = open_board(url), open_board(url)
    one.put("control", b"v")
    other.get("control")
    known = other.instance

    one.delete("")

    with pytest.raises(ControlStoreResetError, match="cleaned up"):
        other.get("control")
    assert "kvs" not in post(url, "kv/range", of_the_run())
    assert open_board(url).get("control") == NO_ENTRY
    assert one.get("control") == NO_ENTRY
    assert one.instance != known


def test_nothing_of_a_dead_run_stays(url, open_board):
    board = open_board(url)
    board.put("control", b"v")
    board.compare_and_set("other", b"v", version=0)
    open_board(url).heartbeat("alive/a", b"", watch="control", seen_version=9, hold_s=0)
    (lease,) = {raw(url, key)["lease"] for key in ("first", "k/control", "k/other", "k/alive/a")}

    found = post(url, "lease/timetolive", {"ID": lease})
    assert 6 * 86_400 < int(found["TTL"]) <= 7 * 86_400
    post(url, "lease/revoke", {"ID": lease})

    with pytest.raises(ControlStoreResetError):
        board.get("control")


def n_proposals(etcd):
    """Return how many writes etcd's members have agreed on."""
    with urllib.request.urlopen(f"http://{etcd.url.removeprefix('etcd://')}/metrics") as page:
        found = re.search(
            rb"^etcd_server_proposals_committed_total (\S+)", page.read(), re.MULTILINE
        )
    return int(float(found[1]))


def test_reads_and_the_polls_of_a_heartbeat_are_no_writes(open_board):
    with running_etcd(1) as etcd:
        board = open_board(etcd.url)
        board.put("control", b"v")
        before = n_proposals(etcd)

        for _ in range(5):
            board.get("control")
            board.list("")
        board.heartbeat("alive/a", b"", watch="control", seen_version=1, hold_s=0.6)

        assert n_proposals(etcd) - before <= 2, "one is the heartbeat's"


def test_one_member_of_three_may_die_and_two_may_not(open_board):
    with running_etcd(3) as etcd:
        board, short = open_board(etcd.url), open_board(etcd.url, deadline_s=2.0)
        board.compare_and_set("control", b"0", version=0)
        short.get("control")

        etcd.members[0].kill()
        for version in range(1, 20):
            assert board.compare_and_set("control", b"%d" % version, version=version)[0]
        etcd.members[1].signal(signal.SIGSTOP)

        began_s = time.monotonic()
        with pytest.raises(ControlStoreUnreachableError, match="etcd://127"):
            short.put("k", b"v")
        assert time.monotonic() - began_s < 20
        etcd.members[1].signal(signal.SIGCONT)
        assert board.get("control").value == b"19"


def test_no_server_is_unreachable(open_board):
    with pytest.raises(ControlStoreUnreachableError, match="refused"):
        open_board(f"etcd://127.0.0.1:{free_port()}", deadline_s=0.3).get("k")


def test_what_etcd_takes_for_too_large_names_the_flag(open_board):
    with running_etcd(max_request_bytes=1_500_000) as etcd:
        board = open_board(etcd.url)

        with pytest.raises(ControlStoreError, match="--max-request-bytes=") as caught:
            board.put("k", bytes(VALUE_BYTES_MAX))
        assert not isinstance(caught.value, ControlStoreUnreachableError)


def test_users_and_an_expired_login(open_board):
    with running_etcd(1, "--auth-token-ttl=1") as etcd:
        for path, body in (
            ("auth/role/add", {"name": "root"}),
            ("auth/user/add", {"name": "root", "password": "s3cr@t"}),
            ("auth/user/grant", {"user": "root", "role": "root"}),
            ("auth/enable", {}),
        ):
            post(etcd.url, path, body)
        named = etcd.url.replace("//", "//root:s3cr%40t@")
        board = open_board(named)
        board.put("k", b"1")
        # Every token is forgotten, as after a restart of the member.
        etcd.members[0].kill()
        etcd.members[0].start()
        eventually(lambda: board.get("k").value == b"1", "it logs in again")

        assert "s3cr" not in str(board.address)
        assert EtcdAddress.parse(str(board.address)).user == "root"
        for wrong in (etcd.url, named.replace("s3cr", "other")):
            with pytest.raises(ControlStoreError, match="refuses: ") as caught:
                open_board(wrong).get("k")
            assert not isinstance(caught.value, ControlStoreUnreachableError)
            assert "other" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "members"),
    [
        ("etcd://h", [("h", 2379)]),
        ("etcd://h:1,i:2", [("h", 1), ("i", 2)]),
        ("etcd://[::1]:3", [("::1", 3)]),
    ],
)
def test_an_address(url, members):
    found = EtcdAddress.parse(url)

    assert list(found.members) == members
    assert EtcdAddress.parse(str(found)) == found
    assert found.tls_context() is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("etcd://", "malformed"),
        ("etcd://u:s3cret@h:x", "malformed"),
        ("etcd://u:s3cret@h,:1", "malformed"),
        ("etcd://u:s3cret@h:1/path", "path"),
        ("etcd://u:s3cret@h:1?tls", "malformed"),
        ("etcd://u:s3cret@h:1?ca=x", "'ca'.* cacert, cert, key"),
        ("etcd://u:s3cret@h:1?cacert=/none/such", "/none/such"),
    ],
)
def test_a_malformed_address_is_an_error_that_hides_the_password(url, said):
    with pytest.raises(ControlStoreError, match=said) as caught:
        EtcdControlStore(url, run_key="r")
    assert "s3cret" not in str(caught.value)


def test_the_clock_of_the_member_narrows_and_never_goes_back():
    clock = MemberClock()
    clock.observe(1000.0, sent_s=10.0, received_s=10.1)
    first_s = clock.read_s(10.1)
    assert 1000.0 <= first_s <= 1001.1
    clock.observe(1001.0, sent_s=10.2, received_s=10.3)  # the second has just turned
    assert first_s <= clock.read_s(10.3)
    assert clock.read_s(20.0) == pytest.approx(1010.85, abs=0.16)
    clock.observe(4000.0, sent_s=20.0, received_s=20.1)  # the clock of another member
    assert clock.read_s(21.0) == pytest.approx(1011.85, abs=0.16)
    assert clock.read_s(1.0) == clock.read_s(21.0)


def _count(url, index, writing):
    board = EtcdControlStore(url, run_key=RUN_KEY, token=TOKEN)
    while True:
        entry = board.get("n")
        number = int(entry.value.split()[0] if entry.value else 0)
        value = b"%d %d" % (number + 1, index)
        if board.compare_and_set("n", value, version=entry.version)[0]:
            board.put(f"done/{number + 1}", value)
            writing.set()


def test_writers_that_are_killed_leave_a_count_without_holes(url, open_board):
    context = multiprocessing.get_context("fork")
    for index in range(3):
        writing = context.Event()
        writer = context.Process(target=_count, args=(url, index, writing), daemon=True)
        writer.start()
        assert writing.wait(30)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(30)

    board = open_board(url)
    count, entry = int(board.get("n").value.split()[0]), board.get("n")
    assert entry.version == count
    # The last of each writer may have been counted and not noted.
    assert count - 3 <= len(board.list("done/")) <= count
