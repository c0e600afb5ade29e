"""Messages between processes: what is written comes back, and nothing else gets in."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.wire.messages import CHARS_MAX, LENIENT, Limit, Message, MessageFormatError, Using

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Colour(StrEnum):
    """A value of two."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A list of two numbers."""

    x: Annotated[int, Limit(9)]
    y: Annotated[int, Limit(9)] = 0

    def __post_init__(self):
        if self.x == self.y == 9:
            raise ValueError("no point is there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Message):
    """A message in a message."""

    name: Annotated[str, Limit(5, low=1)]


def read_even(data):
    if data % 2:
        raise ValueError("odd")
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Message):
    """A field of each type."""

    step: Annotated[int, Limit(100, low=-1)]
    seconds: float = 0.0
    is_due: bool = False
    text: str = ""
    data: bytes = b""
    colour: Colour = Colour.RED
    point: Point | None = None
    points: Annotated[tuple[Point, ...], Limit(3, is_cut=True)] = ()
    pair: tuple[Point, Annotated[str, Limit(4, is_cut=True)]] | None = None
    by_rank: Annotated[Mapping[int, Point], Limit(3)] = field(default_factory=dict)
    inner: Annotated[Inner | None, LENIENT] = None
    even: Annotated[int, Using(lambda value: value, read_even)] = 0


POINTS = st.builds(Point, x=st.integers(0, 8), y=st.integers(0, 9))
MESSAGES = st.builds(
    Outer,
    step=st.integers(-1, 100),
    seconds=st.floats(0, 1e9),
    is_due=st.booleans(),
    text=st.text("abc/é", max_size=20),
    data=st.binary(max_size=20),
    colour=st.sampled_from(Colour),
    point=st.none() | POINTS,
    points=st.lists(POINTS, max_size=3).map(tuple),
    pair=st.none() | st.tuples(POINTS, st.text("ab", max_size=4)),
    by_rank=st.dictionaries(st.integers(0, 9), POINTS, max_size=3),
    inner=st.none() | st.builds(Inner, name=st.text("ab", min_size=1, max_size=5)),
    even=st.integers(0, 9).map(lambda n: 2 * n),
)


@given(MESSAGES)
def test_a_message_comes_back_as_it_was_written(message):
    assert Outer.from_json(json.loads(json.dumps(message.to_json()))) == message


def test_what_has_its_default_is_not_written_and_what_is_too_long_is_cut():
    assert Outer(step=1).to_json() == {"step": 1}
    body = Outer(step=1, points=(Point(x=1),) * 5, pair=(Point(x=1, y=2), "abcdef")).to_json()
    assert body == {"step": 1, "points": [[1, 0]] * 3, "pair": [[1, 2], "abcd"]}


@given(JSON)
def test_anything_is_a_message_or_an_error(data):
    with pytest.raises(MessageFormatError):
        Outer.from_json(data)


@given(JSON, st.sampled_from(sorted(Outer.__dataclass_fields__)))
def test_a_field_of_anything_is_of_its_type_or_an_error(value, name):
    try:
        found = Outer.from_json({"step": 1, name: value})
    except MessageFormatError:
        return
    assert Outer.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "body",
    [
        {},
        *({"step": odd} for odd in (None, True, 1.0, "1", -2, 101, 10**400, [], {})),
        *({"seconds": odd} for odd in (math.nan, math.inf, -math.inf, True, "1", 10**400)),
        *({"is_due": odd} for odd in (0, 1, None, "true")),
        *({"text": odd} for odd in (1, "\0", "x" * (CHARS_MAX + 1), [], None)),
        *({"data": odd} for odd in (1, "x", "é", "YQ=", None)),
        *({"colour": odd} for odd in ("green", 1, None, [])),
        *({"point": odd} for odd in ([], [1], [1, 2, 3], [10, 0], [9, 9], {"x": 1}, "ab")),
        *({"points": odd} for odd in ([[1, 2]] * 4, [[1]], [None], {}, "ab", None)),
        *({"pair": odd} for odd in ([[1, 2]], [[1, 2], "abcde"], [[1, 2], 3], [])),
        *({"by_rank": odd} for odd in ({"a": [1, 2]}, {"1": 7}, {"9" * 5000: [1, 2]}, [], 1)),
        {"by_rank": {str(n): [1, 2] for n in range(4)}},
        *({"even": odd} for odd in (1, "a", None)),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_the_field_is_named(body):
    with pytest.raises(MessageFormatError, match=next(iter(body), "step")):
        Outer.from_json({"step": 1, **body} if body else body)


def test_a_lenient_field_that_cannot_be_read_has_its_default():
    for odd in (1, [], {"name": ""}, {"name": "x" * 6}, {}):
        assert Outer.from_json({"step": 1, "inner": odd}).inner is None


def test_an_error_shows_a_hostile_value_in_short():
    with pytest.raises(MessageFormatError) as caught:
        Outer.from_json({"step": "x" * 10_000})
    assert len(str(caught.value)) < 200


def test_what_a_later_release_adds_is_not_read():
    assert Outer.from_json({"step": 1, "added": 2}) == Outer(step=1)
