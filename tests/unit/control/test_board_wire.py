"""The bytes between client and server: what was packed comes out, and anything else is refused."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control import board_wire as wire
from gpuops.control.board import Entry
from gpuops.control.board_wire import Request, What
from gpuops.host.frames import WireError

KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=200)
BIG = st.integers(0, 2**64 - 1)
ENTRIES = st.builds(Entry, st.binary(max_size=50), BIG, BIG)


@given(
    st.builds(
        Request,
        number=st.integers(0, 2**32 - 1),
        what=st.sampled_from(What),
        key=KEYS,
        value=st.binary(max_size=50),
        place=BIG,
        watch=KEYS,
        hold_s=st.floats(allow_nan=False),
    )
)
def test_a_request_comes_back(request):
    assert Request.from_bytes(request.to_bytes()) == request


@given(st.binary(max_size=120))
def test_any_bytes_are_an_answer_or_an_error(data):
    for read in (
        Request.from_bytes,
        wire.Hello.from_bytes,
        wire.Challenge.from_bytes,
        wire.read_answer,
        wire.read_entry,
        wire.read_page,
        wire.read_beaten,
    ):
        with contextlib.suppress(WireError):
            read(data)


@given(st.dictionaries(KEYS, ENTRIES, max_size=8))
def test_a_page_comes_back(entries):
    body, is_all = wire.page(list(entries.items()))

    assert is_all
    assert wire.read_page(body) == entries


def test_pages_are_bounded_and_none_is_empty():
    large = [(f"k{number}", Entry(bytes(wire.PAGE_BYTES // 2), 1, number)) for number in range(4)]

    body, is_all = wire.page(large)
    assert not is_all
    assert list(wire.read_page(body)) == ["k0"]
    huge, _ = wire.page([("k", Entry(bytes(2 * wire.PAGE_BYTES), 1, 1)), *large])
    assert list(wire.read_page(huge)) == ["k"]


@given(st.floats(allow_nan=False), st.none() | ENTRIES)
def test_what_a_heartbeat_brings_comes_back(board_s, entry):
    packed = None if entry is None else wire.entry_bytes(entry)

    beaten = wire.read_beaten(wire.beaten_bytes(board_s, packed))

    assert (beaten.board_s, beaten.watched) == (board_s, entry)


def test_a_hold_that_is_no_number_survives_to_be_judged():
    request = Request(1, What.BEAT, "k", hold_s=math.nan)

    assert math.isnan(Request.from_bytes(request.to_bytes()).hold_s)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_cut_entry_is_an_error(cut):
    body = wire.entry_bytes(Entry(b"value", 1, 1))

    with pytest.raises(WireError):
        wire.read_entry(body[:-cut])
