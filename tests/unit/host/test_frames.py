"""Frames: whatever way they come cut up they come out whole, and too long a one never begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.host.net.frames import (
    LENGTH,
    FrameGreeting,
    WireError,
    framed,
    length_of,
    take_frame,
)

HELLO = FrameGreeting("hello", b"magic", "4sB")


@given(st.lists(st.binary(max_size=20), max_size=5), st.integers(1, 7))
def test_frames_come_out_as_they_went_in(messages, piece_bytes):
    sent = b"".join(map(framed, messages))
    buffer, found = bytearray(), []
    for begin in range(0, len(sent), piece_bytes):
        buffer += sent[begin : begin + piece_bytes]
        while (body := take_frame(buffer, 20)) is not None:
            found.append(body)

    assert found == messages
    assert not buffer


def test_parts_are_one_frame():
    assert framed(b"ab", b"", b"c") == framed(b"abc")


def test_a_frame_that_would_be_too_long_is_refused_by_its_length_alone():
    with pytest.raises(WireError, match="a frame of 21 bytes"):
        take_frame(bytearray(LENGTH.pack(21)), 20)


@pytest.mark.parametrize("length", [0, 4, 11, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused(length):
    with pytest.raises(WireError, match=f"a frame of {length} bytes"):
        length_of(LENGTH.pack(length), 10, bytes_min=5)


@given(st.binary(min_size=4, max_size=4), st.integers(0, 255))
def test_a_greeting_goes_through(name, number):
    assert HELLO.unpack(HELLO.pack(name, number)) == (name, number)


@given(st.binary(max_size=12))
def test_anything_else_is_no_greeting(body):
    if len(body) == 10 and body.startswith(b"magic"):
        return
    with pytest.raises(WireError, match="not a hello"):
        HELLO.unpack(body)
