"""How fast a keeper may send."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.transfer.pacing import BURST_S, RATE_MIN_BYTES_S, SendPace, set_socket_pacing
from gpuops.host.clock import FakeClock

RATE = 100 * 2**20


def test_no_rate_is_no_wait():
    pace = SendPace(None, FakeClock())
    assert [pace.take(2**40) for _ in range(3)] == [0, 0, 0]


def test_waits_add_up_to_the_rate():
    clock = FakeClock()
    pace = SendPace(RATE, clock)
    assert pace.take(RATE) == 0
    assert pace.take(RATE) == pytest.approx(1.0)
    assert pace.take(RATE) == pytest.approx(2.0)
    clock.advance(2.5)
    assert pace.take(0) == pytest.approx(0.5)


def test_a_pause_saves_up_no_more_than_a_burst():
    clock = FakeClock()
    pace = SendPace(RATE, clock)
    clock.advance(3600)
    assert pace.take(int(BURST_S * RATE)) == 0
    assert pace.take(RATE) == pytest.approx(0)
    assert pace.take(1) == pytest.approx(1.0)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing():
    clock = FakeClock()
    pace = SendPace(RATE, clock)
    pace.take(RATE)
    clock.advance(-5)
    assert pace.take(0) == pytest.approx(1.0)


def test_a_rate_can_change_and_has_a_least():
    clock = FakeClock()
    pace = SendPace(RATE, clock)
    pace.take(10 * RATE)
    pace.set_rate(1)
    assert pace.bytes_per_s == RATE_MIN_BYTES_S
    assert pace.take(0) == 0
    pace.set_rate(None)
    assert pace.take(2**40) == 0


@given(st.lists(st.tuples(st.integers(0, 2**22), st.floats(0, 0.2)), min_size=1, max_size=60))
def test_never_more_than_the_rate_and_one_burst(sends):
    clock = FakeClock()
    pace = SendPace(RATE, clock)
    now_s = at_s = 0.0
    sent = 0
    for nbytes, pause_s in sends:
        clock.advance(pause_s)
        now_s += pause_s
        at_s = now_s + pace.take(nbytes)
        # The slice itself may begin before its bytes are earned; those before it were.
        assert sent <= RATE * (at_s + BURST_S) * 1.0001 + 1
        sent += nbytes


def test_the_kernel_is_told_the_rate():
    with socket.socket() as sock:
        set_socket_pacing(sock, 3e8)
        told = sock.getsockopt(socket.SOL_SOCKET, 47, 8)
        assert struct.unpack("=Q", told)[0] == 300_000_000
        set_socket_pacing(sock, None)
        assert struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, 47, 8))[0] == 2**64 - 1
