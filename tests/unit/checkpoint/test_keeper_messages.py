"""Messages on the keeper's socket: what is sent comes out, and nothing else gets in."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.keeper import messages
from gpuops.checkpoint.keeper.api import CheckpointPolicy
from gpuops.checkpoint.keeper.messages import MessageError, MessageFields
from gpuops.checkpoint.types import CheckpointError, RestorePoint, Shard, StateId, Tier

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
OFFERS = st.builds(
    RestorePoint,
    state=st.builds(StateId, st.integers(0, 99_999), st.integers(0, 10**12 - 1)),
    world=st.integers(1, 100_000),
    tier=st.sampled_from(Tier),
    epoch=st.integers(0, 99_999),
    why=st.lists(st.text(max_size=300), max_size=16).map(tuple),
)
POLICIES = st.builds(
    CheckpointPolicy,
    directory=st.none() | st.text("abc/é", min_size=1, max_size=50),
    persist_every_s=st.none() | st.floats(0, 1e9),
    keep_last=st.integers(1, 1000),
    keep_every=st.integers(0, 1000),
    slots=st.integers(2, 8),
    every_s=st.floats(0, 1e9),
)


def sent(**fields):
    return messages.from_bytes(messages.to_bytes({"v": messages.VERSION, **fields}))


@given(OFFERS)
def test_an_offer_arrives_as_it_was_sent(offer):
    fields = sent(offer=messages.restore_point_to_json(offer)).nested("offer")

    assert messages.restore_point_from_json(fields) == offer


def test_the_longest_offer_fits_into_a_message():
    offer = RestorePoint(
        StateId(99_999, 10**12 - 1), 10**5, Tier.PERSISTENT, 99_999, ("é" * 300,) * 16
    )

    assert messages.restore_point_from_json(sent(**messages.restore_point_to_json(offer))) == offer


@given(POLICIES)
def test_a_policy_arrives_as_it_was_sent(policy):
    fields = sent(policy=messages.policy_to_json(policy)).nested("policy")

    assert messages.policy_from_json(fields) == policy


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_an_error(data):
    try:
        fields = messages.from_bytes(data)
    except MessageError:
        return
    assert fields.values["v"] == messages.VERSION


@given(JSON)
def test_a_field_is_what_was_asked_for_or_an_error(value):
    fields = MessageFields({"x": value})
    for read, kind in (
        (lambda: fields.integer("x", 0, 10), int),
        (lambda: fields.number("x"), float),
        (lambda: fields.text("x", 10), str),
        (lambda: fields.flag("x"), bool),
        (lambda: fields.items("x", 3), list),
        (lambda: fields.nested("x"), MessageFields),
        (lambda: fields.state("x"), StateId),
        (lambda: fields.shard("x"), Shard),
    ):
        try:
            found = read()
        except MessageError:
            continue
        assert type(found) is kind
    with pytest.raises(MessageError):
        fields.integer("y", 0, 10)


@given(JSON)
def test_a_policy_of_anything_is_a_policy_or_an_error(value):
    fields = dict.fromkeys(
        ("directory", "persist_every_s", "keep_last", "keep_every", "slots", "every_s"), value
    )
    try:
        messages.policy_from_json(MessageFields(fields))
    except CheckpointError:
        return
    raise AssertionError


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"v":1,"n":' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b" " * (messages.MESSAGE_BYTES_MAX + 1),
        b'{"v":true}',
        b"{}",
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(MessageError):
        messages.from_bytes(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, 1e10, True, "1"])
def test_seconds_that_cannot_be_are_refused(value):
    with pytest.raises(MessageError, match="seconds"):
        MessageFields({"seconds": value}).number("seconds")


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(MessageError, match="more than"):
        messages.to_bytes({"text": "x" * messages.MESSAGE_BYTES_MAX})


def test_errors_show_hostile_values_in_short():
    with pytest.raises(MessageError) as caught:
        MessageFields({"step": "x" * 10_000}).integer("step", 0, 1)

    assert len(str(caught.value)) < 200
