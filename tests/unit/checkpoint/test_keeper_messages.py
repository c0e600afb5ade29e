"""Messages on the keeper's socket: what is sent comes out, and nothing else gets in."""

import json
import math
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.in_process_keeper import InProcessNode

from gpuops.checkpoint.keeper import messages
from gpuops.checkpoint.keeper.messages import (
    CheckpointPolicy,
    EventsPage,
    FlushResult,
    HandOver,
    HelloReply,
    InventoryPage,
    Lease,
    MessageError,
    OpenedShard,
    RankInfo,
    ReservedSlots,
    Restore,
    SaveDecision,
    Skipped,
)
from gpuops.checkpoint.keeper.requests import ClientSession, KeeperRequests, NotReadyError
from gpuops.checkpoint.types import (
    CheckpointError,
    Digest,
    RestorePoint,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.wire.messages import MessageFormatError, read

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
STATES = st.builds(StateId, st.integers(0, 99_999), st.integers(0, 10**12 - 1))
OFFERS = st.builds(
    RestorePoint,
    state=STATES,
    world=st.integers(1, 100_000),
    tier=st.sampled_from(Tier),
    epoch=st.integers(0, 99_999),
    why=st.lists(st.text("abc/é", max_size=300), max_size=16).map(tuple),
    stored_by=st.none() | st.text("abc-", max_size=60),
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
COPY = ShardCopy(StateId(1, 2), Shard(0, 2), "ab", Digest(9, b"", "f" * 64), Tier.MEMORY, "n0")
RANK = RankInfo(Shard(0, 1), 0, 1, 0)
REPLIES = [
    HelloReply(7),
    ReservedSlots((1, 2)),
    SaveDecision(Lease(1, StateId(1, 2), 3, "look")),
    SaveDecision(skipped=Skipped("too early", is_due=False)),
    Restore(),
    OpenedShard(path="/x"),
    OpenedShard(nbytes=8),
    FlushResult(StateId(1, 2), 0.5, 10, ""),
    InventoryPage((COPY,), is_all=True),
    EventsPage(({"kind": "committed", "n": 1},)),
    HandOver(3, is_ending=True),
]


def sent(**fields):
    return messages.from_bytes(messages.to_bytes({"v": messages.VERSION, **fields}))


@given(OFFERS)
def test_an_offer_arrives_as_it_was_sent(offer):
    assert read(Restore, sent(ok=Restore(offer))["ok"]).restore_point == offer


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: type(reply).__name__)
def test_a_reply_arrives_as_it_was_sent(reply):
    assert read(type(reply), sent(ok=reply)["ok"]) == reply


def test_the_longest_offer_fits_into_a_message():
    offer = RestorePoint(
        StateId(99_999, 10**12 - 1),
        10**5,
        Tier.PERSISTENT,
        99_999,
        ("é" * 300,) * 16,
        stored_by="é" * 256,
    )

    assert read(RestorePoint, sent(ok=offer)["ok"]) == offer


@given(POLICIES)
def test_a_policy_arrives_as_it_was_sent(policy):
    assert read(CheckpointPolicy, sent(policy=policy)["policy"]) == policy


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_message_or_an_error(data):
    try:
        fields = messages.from_bytes(data)
    except MessageError:
        return
    assert fields["v"] == messages.VERSION


@given(JSON)
def test_a_policy_of_anything_is_a_policy_or_an_error(value):
    with pytest.raises(MessageFormatError):
        read(CheckpointPolicy, [value] * 6)


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
    with pytest.raises(MessageFormatError, match="seconds"):
        read(FlushResult, {"state": None, "seconds": value})


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(MessageError, match="more than"):
        messages.to_bytes({"text": "x" * messages.MESSAGE_BYTES_MAX})


@pytest.mark.parametrize(
    "rank",
    [[[0, 1], 0, 1], [[1, 1], 0, 1, 0], [[0, 1], 1, 1, 0], [[0, 1], 0, 2, 0], [[0, 1], 0, 0, 0]],
)
def test_a_rank_that_no_node_has_is_refused(rank):
    with pytest.raises(MessageFormatError):
        read(RankInfo, rank)


COMMANDS = sorted(
    {
        (role, command)
        for role, handlers in KeeperRequests(InProcessNode().core)._handlers.items()
        for command in handlers
    }
)


@pytest.mark.parametrize(("role", "command"), COMMANDS)
@given(fields=st.dictionaries(st.sampled_from(["state", "step", "epoch", "role", "shard"]), JSON))
def test_any_fields_of_a_request_are_answered_or_refused(role, command, fields):
    node = InProcessNode()
    if role == "rank":
        node.connect()
    session = ClientSession(None, role=role, rank_info=RANK if role == "rank" else None)
    with closing(node), suppress(CheckpointError, NotReadyError):
        KeeperRequests(node.core).handle(session, command, fields, 0.0)


def test_what_a_role_cannot_ask_for_is_refused():
    requests = KeeperRequests(InProcessNode().core)
    for role, command in (("", "stats"), ("rank", "end"), ("probe", "events"), ("agent", "hello")):
        with pytest.raises(MessageError):
            requests.handle(ClientSession(None, role=role), command, {}, 0.0)


def test_a_state_of_which_not_all_holders_were_named_is_not_restored():
    requests, session = KeeperRequests(InProcessNode().core), ClientSession(None, role="agent")
    with pytest.raises(MessageError, match="2 shards"):
        requests.handle(session, "choose", {"state": [1, 2], "epoch": 3, "n_sources": 2}, 0.0)
