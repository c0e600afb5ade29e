"""The reading end of a spool: what is whole is delivered, whatever stands around it."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stories import story

from gpuops.store.spool.format import LINE_BYTES_MAX, encode_line
from gpuops.store.spool.read import HEAD_BYTES, read_lines

LINES = [line for line in story(1) if line.event.node == "n1"]
ORIGIN = LINES[0].origin
RAW = [encode_line(line) for line in LINES]


def reads(data, tmp_path, **changes):
    path = tmp_path / "segment"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return list(read_lines(fd, **{"origin": ORIGIN, **changes}))
    finally:
        os.close(fd)


def test_whole_lines_come_in_order(tmp_path):
    found = reads(b"".join(RAW), tmp_path)

    assert [read.line for read in found] == LINES
    assert found[-1].end == sum(map(len, RAW))


def test_reading_goes_on_where_it_stopped(tmp_path):
    found = reads(b"".join(RAW), tmp_path, offset=len(RAW[0]))

    assert [read.line for read in found] == LINES[1:]


def test_a_torn_last_line_is_counted_when_the_writer_is_gone(tmp_path):
    *whole, last = reads(b"".join(RAW)[:-20], tmp_path)

    assert [read.line for read in whole] == LINES[:-1]
    assert last.is_torn
    assert last.bad_line is None


def test_a_torn_last_line_is_waited_for_while_the_writer_lives(tmp_path):
    found = reads(b"".join(RAW)[:-20], tmp_path, is_closed=False)

    assert [read.line for read in found] == LINES[:-1]


def test_a_last_line_that_only_lacks_its_end_is_delivered(tmp_path):
    found = reads(b"".join(RAW)[:-1], tmp_path)

    assert [read.line for read in found] == LINES


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"\n", "no checksum"),
        (b"noise \xff\x00\n", "no checksum"),
        (RAW[0].replace(b"kernel", b"kernal"), "checksum"),
        (b"x" * (LINE_BYTES_MAX + 5) + b"\n", "longer than"),
        (b"x" * (3 * LINE_BYTES_MAX) + b"\n", "longer than"),
        (RAW[0][: len(RAW[0]) // 2] + b"\n", "checksum"),
    ],
)
def test_a_bad_line_in_the_middle_stops_none_of_the_others(bad, words, tmp_path):
    first, middle, *rest = reads(RAW[0] + bad + b"".join(RAW[1:]), tmp_path)

    assert first.line == LINES[0]
    assert words in middle.bad_line.reason
    assert len(middle.bad_line.raw) <= HEAD_BYTES
    assert [read.line for read in rest] == LINES[1:]


def test_a_line_of_another_writer_is_refused(tmp_path):
    (found,) = reads(RAW[0], tmp_path, origin="n9.000000000000")

    assert ORIGIN in found.bad_line.reason


@given(st.binary(max_size=400))
def test_noise_never_stops_reading(tmp_path_factory, noise):
    found = reads(noise + b"\n" + RAW[0], tmp_path_factory.mktemp("noise"))

    assert found[-1].line == LINES[0]


@given(st.integers(0, sum(map(len, RAW))))
def test_cut_anywhere_everything_whole_before_the_cut_is_delivered(tmp_path_factory, cut):
    found = reads(b"".join(RAW)[:cut], tmp_path_factory.mktemp("cut"))

    whole = [read.line for read in found if read.line]
    assert whole == LINES[: len(whole)]
    assert not [read for read in found if read.bad_line]
    assert sum(read.is_torn for read in found) <= 1
