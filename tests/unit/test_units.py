"""Quantities: what people write, what people read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.units import (
    format_bytes,
    format_seconds,
    iso_utc,
    parse_bytes,
    parse_iso_utc,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1000", 1000), ("256MiB", 256 * 2**20), ("4 GB", 4 * 10**9), ("1.5kb", 1500)],
)
def test_sizes_are_decimal_unless_they_say_binary(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "duration_s"), [("30", 30), ("8s", 8), ("1.5h", 5400), ("250ms", 0.25), ("2d", 172800)]
)
def test_durations_are_seconds_unless_they_say_otherwise(text, duration_s):
    assert parse_seconds(text) == pytest.approx(duration_s)


@pytest.mark.parametrize("text", ["", "ten", "5 lightyears", "-1s", "1e3", "0x10", "٣s"])
def test_what_is_not_a_quantity_is_refused_with_its_text(text):
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ValueError, match="not a"):
            parse(text)


@given(st.integers(min_value=0, max_value=4_000_000_000_000_000))
def test_iso_times_lose_no_microsecond(time_us):
    assert parse_iso_utc(iso_utc(time_us)) == time_us


@given(st.lists(st.integers(0, 2**52), min_size=2, max_size=2))
def test_iso_times_sort_like_the_times(times_us):
    earlier, later = sorted(times_us)

    assert iso_utc(earlier) <= iso_utc(later)


def test_an_iso_time_without_offset_is_utc():
    assert parse_iso_utc("2026-03-02T09:14:00") == parse_iso_utc("2026-03-02T10:14:00+01:00")


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.4321, "0.43 s"), (12, "12.0 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_readable_at_every_scale(duration_s, text):
    assert format_seconds(duration_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1.5e9, "1.5 GB"), (3e15, "3000.0 TB")]
)
def test_sizes_are_readable_at_every_scale(size_bytes, text):
    assert format_bytes(size_bytes) == text
