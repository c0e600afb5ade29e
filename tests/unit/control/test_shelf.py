"""The bounds of what a board holds in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control.memory import ENTRY_OVERHEAD_BYTES, KvMap, is_own_write
from gpuops.control.store import NO_ENTRY, ControlStoreError


def test_the_bytes_of_all_values_are_bounded():
    shelf = KvMap(bytes_max=2 * ENTRY_OVERHEAD_BYTES + 10)
    shelf.put("a", b"12345")
    shelf.put("b", b"12345")

    with pytest.raises(ControlStoreError, match="full"):
        shelf.put("a", b"123456")
    with pytest.raises(ControlStoreError, match="full"):
        shelf.put("c", b"")
    shelf.put("a", b"123")
    shelf.put("b", b"1234567")
    shelf.delete("a")
    shelf.put("c", b"123")
    assert shelf.get("a") == NO_ENTRY


def test_the_number_of_keys_is_bounded():
    shelf = KvMap(keys_max=2)
    shelf.put("a", b"")
    shelf.put("b", b"")

    with pytest.raises(ControlStoreError, match="full"):
        shelf.put("c", b"")
    shelf.put("a", b"again")
    shelf.delete("b")
    shelf.put("c", b"")


@given(st.lists(st.tuples(st.sampled_from("pd"), st.sampled_from(["a", "a/b", "c"]), st.binary())))
def test_the_count_is_what_is_there(steps):
    shelf = KvMap()
    for what, key, value in steps:
        if what == "p":
            shelf.put(key, value)
        else:
            shelf.delete(key)

    held = shelf.list("")
    assert shelf.n_keys == len(held)
    assert shelf.size_bytes == sum(len(entry.value) + ENTRY_OVERHEAD_BYTES for _, entry in held)


def test_a_list_goes_on_behind_an_order():
    shelf = KvMap()
    for key in "abc":
        shelf.put(f"k/{key}", b"")

    assert [key for key, _ in shelf.list("k/", after=1)] == ["k/b", "k/c"]


@pytest.mark.parametrize(
    ("value", "version", "expected"),
    [(b"v", 2, True), (b"v", 1, False), (b"v", 3, False), (b"w", 2, False)],
)
def test_only_what_this_swap_would_have_left_is_its_own(value, version, expected):
    shelf = KvMap()
    for text in (b"a", b"b", b"v"):
        shelf.put("k", text)

    assert is_own_write(shelf.get("k"), value, version) is expected


@pytest.mark.parametrize("version", [0, 2, 4])
def test_a_swap_of_any_version_but_the_newest_writes_nothing(version):
    shelf = KvMap()
    for text in (b"a", b"b", b"c"):
        shelf.put("k", text)

    assert shelf.compare_and_set("k", b"new", version) == (False, shelf.get("k"))
    assert shelf.get("k").value == b"c"
