"""The heartbeat ring that a worker writes and its agent reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.wire import (
    HEADER_BYTES,
    RECORD_BYTES,
    RING_BYTES,
    SLOTS,
    Beat,
    Phase,
    RingError,
    RingHeader,
    StepSource,
    read_beats,
    read_header,
    write_beat,
    write_header,
)


def ring(beats=0, slots=SLOTS):
    buffer = bytearray(HEADER_BYTES + slots * RECORD_BYTES)
    write_header(buffer, RingHeader(rank=3, generation=1, pid=42, start_mono_ns=7, slots=slots))
    for seq in range(1, beats + 1):
        write_beat(buffer, beat(seq), slots)
    return buffer


def beat(seq, step=None):
    step = seq if step is None else step
    return Beat(seq, step, seq * 10, Phase.STEPPING, StepSource.OPTIMIZER_STATE, seq)


def test_a_fresh_ring_names_its_writer_and_holds_nothing():
    buffer = ring()

    assert len(buffer) == RING_BYTES
    assert read_header(buffer) == RingHeader(3, 1, 42, 7, SLOTS, 0)
    assert read_beats(buffer) == []


@given(st.integers(0, 40), st.integers(0, 45))
def test_a_reader_gets_each_beat_after_the_last_it_saw(written, seen):
    assert [b.seq for b in read_beats(ring(written), seen)] == list(range(seen + 1, written + 1))


@given(st.integers(1, 60))
def test_a_slow_reader_gets_the_newest_beats_the_ring_still_holds(written):
    slots = 8

    assert [b.seq for b in read_beats(ring(written, slots))] == list(
        range(max(1, written - slots + 1), written + 1)
    )


def test_a_half_written_beat_is_left_for_the_next_poll():
    buffer = ring(3)
    buffer[HEADER_BYTES + 2 * RECORD_BYTES] ^= 0xFF

    assert [b.seq for b in read_beats(buffer)] == [1, 2]


def test_a_beat_keeps_every_field():
    buffer = ring()
    sent = Beat(1, -1, 2**63, Phase.RAISED, StepSource.UNKNOWN, 9)
    write_beat(buffer, sent)

    assert read_beats(buffer) == [sent]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[:10],
        lambda b: b"NOTARING" + b[8:],
        lambda b: b[:8] + b"\xff" + b[9:],
        lambda b: b[:12] + b"\xff\xff\xff\xff" + b[16:],
        lambda b: b[:-1],
    ],
)
def test_bytes_that_are_no_ring_are_refused(spoil):
    with pytest.raises(RingError):
        read_beats(spoil(bytes(ring(2))))
