"""Memory modules out of SMBIOS structures."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.host.memory_modules import Dimm, Dimms, parse_memory_device, read_dimms

GIB = 2**30


def structure(size, extended=0, length=0x28, locator=b"P1-DIMMA1"):
    """Return a structure of type 17 as firmware lays it out, its strings after it."""
    body = bytearray(length)
    body[0], body[1] = 17, length
    struct.pack_into("<H", body, 0x0C, size)
    body[0x10] = 1
    if length >= 0x20:
        struct.pack_into("<I", body, 0x1C, extended)
    return bytes(body) + locator + b"\0P0 CHANNEL A\0\0"


@pytest.mark.parametrize(
    ("size", "extended", "size_bytes"),
    [
        (0, 0, 0),
        (16384, 0, 16 * GIB),
        (0x7FFF, 65536, 64 * GIB),
        (0x8000 | 512, 0, 512 * 1024),
        (0xFFFF, 0, None),
    ],
    ids=["empty", "in MiB", "extended", "in KiB", "not told"],
)
def test_a_size_is_read_in_each_of_its_forms(size, extended, size_bytes):
    assert parse_memory_device(structure(size, extended)) == Dimm("P1-DIMMA1", size_bytes)


def test_what_is_no_such_structure_is_none():
    assert parse_memory_device(b"") is None
    assert parse_memory_device(b"\x04" + structure(1)[1:]) is None
    assert parse_memory_device(structure(1)[:20]) is None


@given(st.binary(max_size=80))
def test_any_bytes_are_read_without_an_error(raw):
    found = parse_memory_device(b"\x11" + raw)

    assert found is None or found.size_bytes is None or found.size_bytes >= 0


def test_all_entries_are_read_and_one_that_vanished_is_left_out(tmp_path):
    root, entries = FakeRoot(tmp_path), "sys/firmware/dmi/entries"
    root.write(f"{entries}/17-0/raw", structure(16384))
    root.write(f"{entries}/17-1/raw", structure(0, locator=b"P1-DIMMB1"))
    root.write(f"{entries}/4-0/raw", b"\x04")
    (root.path / entries / "17-2").mkdir()

    assert read_dimms(root.path) == Dimms((Dimm("P1-DIMMA1", 16 * GIB), Dimm("P1-DIMMB1", 0)))
    assert read_dimms(tmp_path / "none") == Dimms()
