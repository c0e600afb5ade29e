"""The bytes between client and server: what was packed comes out, and anything else is refused."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control.store import Entry
from gpuops.control.tcp import wire
from gpuops.control.tcp.wire import ControlRequest, Operation
from gpuops.host.net.frames import WireError

KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=200)
BIG = st.integers(0, 2**64 - 1)
ENTRIES = st.builds(Entry, st.binary(max_size=50), BIG, BIG)


@given(
    st.builds(
        ControlRequest,
        number=st.integers(0, 2**32 - 1),
        operation=st.sampled_from(Operation),
        key=KEYS,
        value=st.binary(max_size=50),
        expected=BIG,
        watch=KEYS,
        hold_s=st.floats(allow_nan=False),
    )
)
def test_a_request_comes_back(request):
    assert ControlRequest.from_bytes(request.to_bytes()) == request


@given(st.binary(max_size=120))
def test_any_bytes_are_an_answer_or_an_error(data):
    for read in (
        ControlRequest.from_bytes,
        wire.ControlHello.from_bytes,
        wire.ControlChallenge.from_bytes,
        wire.unpack_reply,
        wire.unpack_entry,
        wire.unpack_page,
        wire.unpack_heartbeat_reply,
    ):
        with contextlib.suppress(WireError):
            read(data)


@given(st.dictionaries(KEYS, ENTRIES, max_size=8))
def test_a_page_comes_back(entries):
    body, is_all = wire.pack_page(list(entries.items()))

    assert is_all
    assert wire.unpack_page(body) == entries


def test_pages_are_bounded_and_none_is_empty():
    large = [(f"k{number}", Entry(bytes(wire.PAGE_BYTES // 2), 1, number)) for number in range(4)]

    body, is_all = wire.pack_page(large)
    assert not is_all
    assert list(wire.unpack_page(body)) == ["k0"]
    huge, _ = wire.pack_page([("k", Entry(bytes(2 * wire.PAGE_BYTES), 1, 1)), *large])
    assert list(wire.unpack_page(huge)) == ["k"]


@given(st.floats(allow_nan=False), st.none() | ENTRIES)
def test_what_a_heartbeat_brings_comes_back(board_s, entry):
    packed = None if entry is None else wire.pack_entry(entry)

    beaten = wire.unpack_heartbeat_reply(wire.pack_heartbeat_reply(board_s, packed))

    assert (beaten.store_s, beaten.watched) == (board_s, entry)


def test_a_hold_that_is_no_number_survives_to_be_judged():
    request = ControlRequest(1, Operation.HEARTBEAT, "k", hold_s=math.nan)

    assert math.isnan(ControlRequest.from_bytes(request.to_bytes()).hold_s)


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_cut_entry_is_an_error(cut):
    body = wire.pack_entry(Entry(b"value", 1, 1))

    with pytest.raises(WireError):
        wire.unpack_entry(body[:-cut])
