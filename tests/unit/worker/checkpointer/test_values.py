"""What is not a tensor survives as JSON, of every type; hostile JSON is refused."""

import contextlib
import enum
import json
import math
import random
from collections import Counter, OrderedDict, deque
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuops.checkpoint.types import CheckpointError, CorruptError
from gpuops.convert.values import DEPTH_MAX, ValueDecoder, ValueEncoder, dumps, loads


def no_tensor(what, path):
    raise AssertionError(f"a tensor {what} at {path}")


def through_json(value, **options):
    encoded = ValueEncoder(lambda tensor, path: path, **options).encode(value, "root")
    return ValueDecoder(no_tensor, **options).decode(loads(dumps(encoded), "it"), "root")


def same(a, b):
    """Equal in type and value, at every depth; NaN is NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**53, max_value=2**200),
    st.text(),
    st.binary(max_size=64),
    st.tuples(st.integers(), st.text(max_size=3)),
)
plain = st.one_of(hashable, st.floats(), st.binary(max_size=64).map(bytearray))
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "v", "a"]), inner, max_size=3),
        st.dictionaries(hashable, inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=20,
)


@given(values)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_comes_back_with_its_types(value):
    assert same(through_json(value), value)


@given(st.sets(hashable, max_size=8))
@settings(deadline=None)
def test_sets_come_back(value):
    assert through_json(value) == value
    assert through_json(frozenset(value)) == frozenset(value)
    assert type(through_json(frozenset(value))) is frozenset


@pytest.mark.parametrize(
    "value",
    [
        complex(1.5, -0.0),
        complex(math.inf, 2),
        torch.float8_e4m3fn,
        torch.Size([3, 0, 2]),
        torch.device("cuda", 3),
        OrderedDict([("b", 1), ("a", 2)]),
        Counter({30: 2, 60: 1}),
        deque([1, 2, 3], maxlen=3),
        deque([1, 2]),
        "lone \ud800 surrogate",
        10**6000,
        -(2**64),
        [[[]]],
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) else "int",
)
def test_a_value_comes_back(value):
    back = through_json(value)

    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "maxlen", None) == getattr(value, "maxlen", None)


def test_a_stream_comes_back_with_its_position():
    stream = BytesIO(b"abcdef")
    stream.seek(2)

    back = through_json(stream)

    assert (back.getvalue(), back.tell()) == (b"abcdef", 2)


@pytest.mark.parametrize(
    "array",
    [
        np.float32(1.1),
        np.int64(-(2**63)),
        np.bool_(True),
        np.array([[1.5, np.nan], [np.inf, -0.0]]),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.zeros((0, 4), dtype=np.complex64),
        np.array(7),
        np.array(["a", "bcd"]),
        np.datetime64("2026-01-01", "ns"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) else "int",
)
def test_numpy_comes_back(array):
    back = through_json(array)

    assert type(back) is type(array)
    assert back.dtype == array.dtype
    assert np.shape(back) == np.shape(array)
    np.testing.assert_array_equal(back, array)


def test_an_array_that_comes_back_can_be_written():
    back = through_json(np.arange(3))
    back[0] = 9

    assert back.tolist() == [9, 1, 2]


def test_the_states_of_generators_come_back():
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 what is saved

    assert through_json(state) == state
    back = through_json(numpy_state)
    assert back[0] == numpy_state[0]
    np.testing.assert_array_equal(back[1], numpy_state[1])


class Colour(enum.IntEnum):
    """A number that is not quite one."""

    RED = 1


class Mine:
    """A type of the user's own."""


class Text(str):
    """A text that is not quite one."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [Colour.RED, Mine(), Mine, len, Text("a"), np.array([Mine()]), np.zeros(2, "f4,i4")],
    ids=["enum", "object", "class", "function", "str subclass", "object array", "records"],
)
def test_what_has_no_form_is_named_with_its_path(value):
    with pytest.raises(CheckpointError, match=r"root\.groups\.1\.x is a ") as info:
        through_json({"groups": [0, {"x": value}]})

    assert "allow_pickle" in str(info.value)


def test_a_value_that_contains_itself_is_an_error_with_its_path():
    endless = []
    endless.append(endless)

    with pytest.raises(CheckpointError, match="contain itself"):
        through_json({"a": endless})


def test_a_tensor_is_given_away_by_its_path():
    taken = {}

    def take(tensor, path):
        taken[path] = tensor
        return path

    ones, twos = torch.ones(2), torch.full((2,), 2.0)
    encoded = ValueEncoder(take).encode({"a": [ones], "b": (1, twos)}, "root")
    back = ValueDecoder(lambda name, path: taken[name]).decode(loads(dumps(encoded), ""), "root")

    assert list(taken) == ["root.a.0", "root.b.1"]
    assert back["a"][0] is ones
    assert back["b"] == (1, twos)


class Bomb:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("code was run",))


def test_pickles_are_neither_written_nor_read_unasked():
    with pytest.raises(CheckpointError):
        through_json(Bomb())
    encoded = ValueEncoder(no_tensor, allow_pickle=True).encode({"a": Bomb()}, "root")

    with pytest.raises(CheckpointError, match="allow_pickle"):
        ValueDecoder(no_tensor).decode(encoded, "root")


def test_with_leave_anything_comes_back():
    assert through_json(Colour.RED, allow_pickle=True) is Colour.RED


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "v", "dtype", "shape", "max", "at"]), inner),
    ),
    max_leaves=12,
)
KINDS = (
    "tensor int float complex bytes bytearray bytesio dtype size device numpy tuple set frozenset "
    "dict ordered counter deque pickle nonsense"
)
kinds = st.sampled_from(KINDS.split())


@given(kinds, json_values, st.dictionaries(st.sampled_from(["dtype", "shape", "max"]), json_values))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hostile_objects_are_refused_or_harmless(kind, value, more):
    decoder = ValueDecoder(lambda what, path: torch.zeros(1))
    with contextlib.suppress(CheckpointError):
        decoder.decode({"$": kind, "v": value, **more}, "root")


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_hostile_bytes_are_refused_or_json(data):
    with contextlib.suppress(CheckpointError):
        ValueDecoder(lambda what, path: torch.zeros(1)).decode(loads(data, "it"), "root")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 100_000,
        b"NaN",
        b"\xff",
        b"",
        b'{"$":"numpy","dtype":"O","shape":[1],"v":"AAAAAAAAAAA="}',
        b'{"$":"numpy","dtype":"<f4","shape":[100000000000],"v":"AAAA"}',
        b'{"$":"numpy","dtype":"<f4","shape":[0,100000000000],"v":"AAAA"}',
        b'{"$":"numpy","dtype":"S0","shape":[100000000000],"v":""}',
        b'{"$":"dtype","v":"__loader__"}',
        b'{"$":"int","v":"' + b"f" * 10 + b'g"}',
        b'{"$":["tuple"],"v":[]}',
        b'{"$":"deque","max":-1,"v":[]}',
    ],
    ids=lambda data: data[:40].decode("latin-1"),
)
def test_hostile_text_is_a_corrupt_checkpoint(data):
    with pytest.raises(CorruptError):
        ValueDecoder(no_tensor).decode(loads(data, "it"), "root")


def test_nesting_beyond_any_encoder_is_refused():
    text = b"[" * (3 * DEPTH_MAX) + b"]" * (3 * DEPTH_MAX)

    with pytest.raises(CorruptError, match="nested"):
        ValueDecoder(no_tensor).decode(json.loads(text), "root")
