"""The way to the board: in this process, at an endpoint, within a time."""

import pytest

from gpuops.agent.meeting import address_towards, meet
from gpuops.agent.plan import Meeting, MeetingKind
from gpuops.agent.ports import free_port
from gpuops.control.board import BoardUnreachableError
from gpuops.host.clock import FakeClock

PRIVATE = Meeting(kind=MeetingKind.PRIVATE, run_key="job")


def join(meeting, clock=None, waits=None, **options):
    clock = clock or FakeClock()

    def wait(seconds):
        clock.advance(seconds)
        if waits is not None:
            waits.append(seconds)

    fields = {"local_address": None, "limit_s": 10.0, "wait": wait}
    return meet(meeting, clock, **{**fields, **options})


def test_a_run_on_one_node_meets_nobody_and_opens_nothing():
    met = join(PRIVATE)

    assert (met.is_shared, met.guard, met.address) == (False, None, "127.0.0.1")
    met.board.put("key", b"1")
    assert met.board.get("key").value == b"1"
    assert join(PRIVATE, local_address="10.0.0.7").address == "10.0.0.7"


def test_two_private_runs_of_one_id_share_nothing():
    one, two = join(PRIVATE), join(PRIVATE)
    one.board.put("key", b"1")

    assert two.board.get("key").version == 0


def test_an_endpoint_that_nobody_serves_is_waited_for_and_then_given_up():
    meeting = Meeting(
        kind=MeetingKind.TCP, run_key="job", host="127.0.0.1", port=free_port(), is_host=False
    )
    waits = []

    with pytest.raises(BoardUnreachableError, match=str(meeting.port)):
        join(meeting, waits=waits, limit_s=3.0)
    assert 3 <= sum(waits) <= 4


def test_whoever_waits_may_end_the_wait():
    meeting = Meeting(
        kind=MeetingKind.TCP, run_key="job", host="127.0.0.1", port=free_port(), is_host=False
    )

    with pytest.raises(ZeroDivisionError):
        join(meeting, wait=lambda _s: 1 // 0)


def test_what_is_told_of_a_board_holds_no_secret():
    meeting = Meeting(
        kind=MeetingKind.POSTGRES,
        run_key="job",
        host="db",
        port=5432,
        url="postgresql+psycopg://app:hunter2@db/x",
        token="sesame",
    )
    told = join(PRIVATE).told(meeting)

    assert told["run_key"] == "job"
    assert "hunter2" not in str(told)
    assert "sesame" not in str(told)
    assert "hunter2" not in repr(meeting)


def test_towards_loopback_this_node_is_loopback():
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert address_towards("no such host", 9) == "127.0.0.1"
