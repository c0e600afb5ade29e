"""Facts survive JSON, and parameters of another type are refused with their place."""

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.errors import ConfigError
from gpuops.host.records import from_json, to_json


@dataclass(frozen=True)
class Inner:
    """A record within a record."""

    name: str
    size: int | None = None


@dataclass(frozen=True)
class Outer:
    """A record of every kind of field."""

    flag: bool
    ratio: float
    inner: Inner
    many: tuple[Inner, ...] = ()
    words: frozenset[str] = field(default_factory=frozenset)


inners = st.builds(Inner, st.text(), st.none() | st.integers(-(2**64) + 1, 2**64 - 1))
outers = st.builds(
    Outer,
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    inners,
    st.lists(inners).map(tuple),
    st.frozensets(st.text()),
)


@given(outers)
def test_a_record_survives_json(record):
    assert from_json(Outer, json.loads(json.dumps(to_json(record))), "it") == record


def test_a_whole_number_may_stand_for_a_real_one():
    record = from_json(Outer, {"flag": True, "ratio": 1, "inner": {"name": "a"}}, "it")

    assert record == Outer(flag=True, ratio=1.0, inner=Inner("a"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"flag": 1, "ratio": 1, "inner": {"name": "a"}},
            "flag of it must be true or false, got 1",
        ),
        ({"flag": True, "ratio": True, "inner": {"name": "a"}}, "ratio of it must be a number"),
        ({"flag": True, "ratio": 1, "inner": 3}, "inner of it must be a table, got 3"),
        ({"flag": True, "ratio": 1, "inner": {"name": 3}}, "name of inner of it must be a string"),
        ({"flag": True, "ratio": 1}, "it lacks 'inner'"),
        (
            {"flag": True, "ratio": 1, "inner": {"name": "a"}, "many": 1},
            "many of it must be a list",
        ),
        ([], "it must be a table"),
        ({"flag": True, "ratio": math.nan, "inner": {"name": "a"}}, "finite number, got nan"),
        ({"flag": True, "ratio": -math.inf, "inner": {"name": "a"}}, "finite number, got -inf"),
        ({"flag": True, "ratio": 2**64, "inner": {"name": "a"}}, "of at most 64 bits"),
        ({"flag": True, "ratio": 1, "inner": {"name": "a", "size": 2**64}}, "of at most 64 bits"),
    ],
)
def test_another_type_is_refused_with_its_place(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(Outer, data, "it")


def test_an_unknown_key_is_refused_and_the_valid_ones_are_listed():
    data = {"flag": True, "ratio": 1, "inner": {"name": "a", "sise": 1}}

    with pytest.raises(ConfigError, match=r"unknown key 'sise'; did you mean 'size'.*name, size"):
        from_json(Outer, data, "it")
