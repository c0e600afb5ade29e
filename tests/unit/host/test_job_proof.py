"""Proofs of a token and tags of frames: what they bind, and that nothing else is taken."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.host.net import job_proof as proof
from gpuops.host.net.frames import LENGTH, WireError
from gpuops.host.net.job_proof import JobHandshake, ProofWelcome

KEY = proof.derived("test", "token")
SOME = st.binary(max_size=20)


def test_proofs_differ_by_side_token_and_what_was_said():
    proofs = {
        JobHandshake(KEY, b"one").proof("client"),
        JobHandshake(KEY, b"one").proof("server"),
        JobHandshake(KEY, b"two").proof("client"),
        JobHandshake(proof.derived("test", "other"), b"one").proof("client"),
    }

    assert len(proofs) == 4
    assert JobHandshake(KEY, b"one").proof("client") in proofs


def test_a_key_is_for_one_use():
    assert proof.derived("test", "token") != proof.derived("tes", "token")
    assert proof.derived("a", "b") != proof.derived("a\0b", "")


def test_what_was_once_agreed_on_stays_so():
    """Agents and keepers of two releases may meet."""
    shake = JobHandshake(b"key", b"said")

    assert shake.proof("client").hex().startswith("dc28aa6fee0974a4")
    assert shake.proof("server").hex().startswith("d3028e547ade0d9c")
    channel = shake.channel("client")
    assert channel.tag(b"one").hex() == "216199ebe819f1b0afbd7257c6b0366a"
    assert channel.tag(b"two").hex() == "e71f58537c42cbee936817f2c48cdc29"


def test_a_nonce_is_never_the_same():
    assert len({proof.nonce() for _ in range(100)}) == 100


@given(st.lists(SOME, max_size=4), st.lists(SOME, max_size=4))
def test_parts_do_not_grow_into_each_other(left, right):
    assert (proof.sign(b"k", *left) == proof.sign(b"k", *right)) == (left == right)


def channel(side="client"):
    return JobHandshake(KEY, b"said").channel(side)


def bodies(*messages):
    """Return the bodies of frames, in the order in which one side sends them."""
    ours = channel()
    return [ours.frame(message)[LENGTH.size :] for message in messages]


def test_a_channel_takes_each_frame_once_and_in_order():
    first, second = bodies(b"a", b"a")
    theirs = channel()

    assert first != second
    assert (theirs.message(first), theirs.message(second)) == (b"a", b"a")
    again = channel()
    again.message(first)
    for line, body in ((again, first), (channel(), second), (channel("server"), first)):
        with pytest.raises(WireError, match="did not send"):
            line.message(body)


@given(SOME, st.data())
def test_no_changed_byte_goes_unnoticed(message, data):
    body = bytearray(bodies(message)[0])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(WireError):
        channel().message(bytes(body))


@given(st.binary(max_size=40))
def test_no_bytes_are_a_frame(body):
    with pytest.raises(WireError):
        channel().message(body)


@pytest.mark.parametrize("code", ProofWelcome)
def test_a_welcome_goes_through(code):
    assert proof.read_welcome(proof.welcome(code, KEY)) == (code, KEY)


@given(st.binary(max_size=80))
def test_anything_else_is_no_welcome(data):
    with contextlib.suppress(WireError):
        proof.read_welcome(data)
