"""The heartbeat ring that a worker writes and its agent reads."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.wire.ring import (
    HEADER_BYTES,
    RECORD_BYTES,
    RING_BYTES,
    SLOTS,
    STEP_UNKNOWN,
    AgentRequest,
    Beat,
    RingError,
    RingHeader,
    StepSource,
    WorkerFlag,
    WorkerPhase,
    raise_flag,
    read_beats,
    read_flags,
    read_header,
    read_request,
    write_beat,
    write_flags,
    write_header,
    write_request,
)


def ring(beats=0, slots=SLOTS):
    buffer = bytearray(HEADER_BYTES + slots * RECORD_BYTES)
    write_header(buffer, RingHeader(rank=3, generation=1, pid=42, start_mono_ns=7, slots=slots))
    for seq in range(1, beats + 1):
        write_beat(buffer, beat(seq), slots)
    return buffer


def beat(seq, step=None):
    step = seq if step is None else step
    return Beat(seq, step, seq * 10, WorkerPhase.STEPPING, StepSource.OPTIMIZER_STATE, seq)


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
    sent = Beat(1, -1, 2**63, WorkerPhase.RAISED, StepSource.UNKNOWN, 9)
    write_beat(buffer, sent)

    assert read_beats(buffer) == [sent]


def test_a_step_keeps_its_times_and_tokens_and_no_name():
    buffer = ring()
    sent = [
        replace(beat(1), data_us=7, optimizer_us=8, tokens=9),
        replace(beat(2), data_us=2**32 - 1, optimizer_us=0x41414141, tokens=2**64 - 1),
        beat(3),
    ]
    for each in sent:
        write_beat(buffer, each)

    assert read_beats(buffer) == sent


def test_a_step_of_hours_and_absurd_tokens_are_clipped():
    buffer = ring()
    hours_us = 2 * 3600 * 10**6
    write_beat(buffer, replace(beat(1), data_us=hours_us, optimizer_us=hours_us, tokens=2**70))

    (read,) = read_beats(buffer)
    assert (read.data_us, read.optimizer_us, read.tokens) == (2**32 - 1, 2**32 - 1, 2**64 - 1)
    assert (read.seq, read.step, read.mono_ns) == (1, 1, 10)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_ring_of_another_version_is_refused_by_its_number(version):
    buffer = ring(2)
    struct.pack_into("<I", buffer, 8, version)

    with pytest.raises(RingError, match=rf"version 3: b'GPUOPSHB' {version}$"):
        read_beats(buffer)


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


@pytest.mark.parametrize(
    ("said", "read"),
    [("eval", "eval"), ("x" * 40, "x" * 16), ("é" * 20, "é" * 8), ("a\x1b[2J", "a?[2J"), ("", "")],
)
def test_the_name_of_a_phase_is_cut_and_printable(said, read):
    buffer = ring()
    write_beat(buffer, Beat(1, 1, 1, WorkerPhase.OTHER, StepSource.REPORTED, 0, said))

    assert read_beats(buffer)[0].name == read


def test_a_request_and_the_flags_go_their_own_ways_beside_the_beats():
    buffer = ring()
    assert (read_request(buffer), read_flags(buffer)) == (
        (AgentRequest.NONE, STEP_UNKNOWN),
        WorkerFlag(0),
    )
    write_request(buffer, AgentRequest.DRAIN, 70)
    raise_flag(buffer, WorkerFlag.STOP_POLLED)
    raise_flag(buffer, WorkerFlag.HANDLER_RAN)
    raise_flag(buffer, WorkerFlag.SIGNALLED)
    write_flags(
        buffer, WorkerFlag.HANDLES_SIGTERM, WorkerFlag.HANDLES_SIGTERM | WorkerFlag.HANDLES_SIGUSR2
    )
    write_flags(buffer, WorkerFlag(0), WorkerFlag.HANDLES_SIGTERM | WorkerFlag.HANDLES_SIGUSR2)
    write_beat(buffer, beat(1))

    assert read_request(buffer) == (AgentRequest.DRAIN, 70)
    assert (
        read_flags(buffer) == WorkerFlag.STOP_POLLED | WorkerFlag.HANDLER_RAN | WorkerFlag.SIGNALLED
    )
    assert read_beats(buffer) == [beat(1)]
    assert read_header(buffer) == RingHeader(3, 1, 42, 7, SLOTS, 1)
