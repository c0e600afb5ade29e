"""Host lists: names and back without loss, bounds, and patterns of node names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.hostlist import NAMES_MAX, compress, expand, matches

NAME = st.from_regex(r"[a-z]{1,4}([0-9]{1,5}(-?[a-z]{1,2}[0-9]{0,3})?)?", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("login1", ("login1",)),
        ("gpu[1-3]", ("gpu1", "gpu2", "gpu3")),
        ("gpu[008-010,130]", ("gpu008", "gpu009", "gpu010", "gpu130")),
        ("gpu[8-10]", ("gpu8", "gpu9", "gpu10")),
        ("a1,b[2,4]-ib, c", ("a1", "b2-ib", "b4-ib", "c")),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
        ("a[1-2],a2", ("a1", "a2")),
    ],
)
def test_a_host_list_is_its_names_in_order_each_once(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["gpu003", "gpu001", "gpu002"], "gpu[001-003]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n9"], "n[9,09-10]"),
        (["n1", "n3", "login"], "n[1,3],login"),
        (["n5"], "n5"),
    ],
)
def test_names_become_the_shortest_ranges(names, text):
    assert compress(names) == text


@given(st.lists(NAME, max_size=40))
def test_names_survive_being_compressed_and_expanded(names):
    assert sorted(expand(compress(names))) == sorted(set(names))


@given(st.lists(NAME, min_size=1, max_size=20), NAME)
def test_a_host_list_matches_its_names_and_no_other(names, other):
    text = compress(names)

    assert all(matches(text, name) for name in names)
    assert matches(text, other) == (other in names)


@given(st.text(max_size=60))
def test_any_text_is_a_host_list_or_a_value_error(text):
    try:
        names = expand(text)
    except ValueError:
        return
    assert all(name and not set(name) & set("[],*? ") for name in names)


@given(st.text(alphabet="a1*?[]-,", max_size=30), st.text(alphabet="a1-", max_size=30))
def test_any_pattern_is_answered_or_refused(pattern, name):
    try:
        answer = matches(pattern, name)
    except ValueError:
        return
    assert answer in {True, False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[1-3", "'[' at 2"),
        ("n]1", "']' at 2"),
        ("n[[1]]", "'[' at 2"),
        ("a,,b", "a name is missing at 3"),
        ("a, ,b", "a name is empty"),
        ("a,", "a name is missing at 3"),
        ("n[3-1]", "'3-1' runs backwards"),
        ("n[]", "'' is no range of numbers"),
        ("n[a-c]", "'a-c' is no range of numbers"),
        ("n[1-2-3]", "'1-2-3' is no range of numbers"),
        ("n[٣]", "'٣' is no range of numbers"),
        ("a b", "' ' is in no name"),
        ("gpu*", "is a pattern, not a host list"),
    ],
)
def test_what_is_no_host_list_is_refused_with_the_place(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        expand(text)


def test_a_list_of_more_names_than_any_cluster_has_is_refused_before_it_is_made():
    assert len(expand(f"n[1-{NAMES_MAX}]")) == NAMES_MAX
    for text in (f"n[0-{NAMES_MAX}]", "n[1-999999999999]", "a[1-300]b[1-300]", "a[1-9],b[1-65530]"):
        with pytest.raises(ValueError, match="more than 65536 names"):
            expand(text)


@pytest.mark.parametrize("name", ["", "a,b", "a[1]", "a b", "a*"])
def test_what_cannot_be_in_a_host_list_is_not_compressed(name):
    with pytest.raises(ValueError, match="is no name of a host"):
        compress([name])


@pytest.mark.parametrize(
    ("pattern", "name", "is_one"),
    [
        ("gpu-a*", "gpu-a17", True),
        ("gpu-a*", "gpu-b17", False),
        ("*", "anything", True),
        ("gpu[001-128,130]", "gpu130", True),
        ("gpu[001-128,130]", "gpu129", False),
        ("gpu[001-128]", "gpu1", False),
        ("gpu[1-128]", "gpu001", False),
        ("gpu[1-999999999999]", "gpu77", True),
        ("rack?-gpu[1-4]*", "rack7-gpu3.site.org", True),
        ("rack?-gpu[1-4]*", "rack77-gpu3", False),
        ("*[12-13]", "n12", True),
        ("login1,gpu[1-2]", "gpu2", True),
        ("", "gpu2", False),
    ],
)
def test_a_pattern_holds_globs_and_ranges(pattern, name, is_one):
    assert matches(pattern, name) is is_one


def test_a_hostile_pattern_is_answered_at_once():
    assert matches("*a" * 500 + "b", "a" * 1000) is False
