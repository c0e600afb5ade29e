"""Pickles read as data: nothing in them runs."""

import collections
import contextlib
import os
import pathlib
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.types import CorruptError
from gpuops.convert.pickle_reader import (
    PickleCall,
    PickleDict,
    PickleGlobal,
    RefusedPickleError,
    read_pickle,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def as_plain(value):
    match value:
        case PickleDict():
            return {key: as_plain(item) for key, item in value.items}
        case list():
            return [as_plain(item) for item in value]
        case tuple():
            return tuple(as_plain(item) for item in value)
    return value


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@given(PLAIN, st.integers(2, 5))
def test_plain_values_come_back(value, protocol):
    assert as_plain(read_pickle(pickle.dumps(value, protocol), [])) == value


def test_the_textual_protocol_is_refused():
    with pytest.raises(RefusedPickleError, match="instruction"):
        read_pickle(pickle.dumps({"a": [1, "b"]}, 0), [])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_bomb_is_refused_by_name_and_does_not_go_off(tmp_path, protocol):
    proof = tmp_path / "ran"
    data = pickle.dumps({"a": _Bomb(proof)}, protocol)

    with pytest.raises(RefusedPickleError, match=r"names '(posix|os)\.system'"):
        read_pickle(data, ["torch.Size"])

    assert not proof.exists()
    pickle.loads(data)
    assert proof.exists(), "the bomb is none"


def test_an_admitted_name_is_noted_and_not_called():
    value = read_pickle(pickle.dumps(pathlib.PurePosixPath("/a/b")), ["pathlib.PurePosixPath"])

    assert isinstance(value, PickleCall)
    assert (value.kind, value.args) == ("pathlib.PurePosixPath", ("/", "a", "b"))


def test_a_constant_is_noted():
    value = read_pickle(
        pickle.dumps(os.system), [], is_allowed=lambda name: name.endswith(".system")
    )

    assert isinstance(value, PickleGlobal)


def test_an_ordered_dict_is_pairs():
    data = pickle.dumps(collections.OrderedDict(a=1, b=2))
    value = read_pickle(data, ["collections.OrderedDict"])

    assert value.state.by_name() == {"a": 1, "b": 2}


def test_shared_and_self_referring_lists_are_one():
    inner = [1]
    inner.append(inner)
    value = read_pickle(pickle.dumps((inner, inner)), [])

    assert value[0] is value[1]
    assert value[0][1] is value[0]


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_value_or_one_error(data):
    with contextlib.suppress(CorruptError, RefusedPickleError):
        read_pickle(data, [])


@given(PLAIN, st.data())
def test_a_cut_pickle_is_corrupt(value, data):
    whole = pickle.dumps(value, 4)
    cut = data.draw(st.integers(0, len(whole) - 1))

    with pytest.raises(CorruptError):
        read_pickle(whole[:cut], [])


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04r" + struct.pack("<I", 2**32 - 1) + b".",  # a memo of 32 GB
        b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",  # a text of an exabyte
        b"\x80\x04b.",
        b"\x80\x04NNb.",
        b"\x80\x04(NN.",
        b"\x80\x04]Nu.",
        b"\x80\x04\x87.",
        b"",
    ],
)
def test_hostile_programs_are_corrupt_at_once(data):
    with pytest.raises((CorruptError, RefusedPickleError)):
        read_pickle(data, [])


def test_a_billion_laughs_are_not_heard():
    # 2 ** 60 tuples, were they hashed, compared or shown.
    data = b"\x80\x04}N" + b"2\x86" * 60 + b"Ns."
    with pytest.raises(RefusedPickleError, match="DUP"):
        read_pickle(data, [])
    data = b"\x80\x04}N" + b"\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(60))

    value = read_pickle(data + b"Ns.", [])

    assert value.by_name() == {}
