"""Proofs and seals: what they bind, and that nothing opens them but the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control import seal
from gpuops.control.seal import Channel, Handshake, Sealed, SealError

TOKEN = "t"
SOME = st.binary(max_size=20)


def test_proofs_differ_by_side_token_and_connection():
    key = seal.token_key(TOKEN)
    proofs = {
        Handshake(key, b"one").proof("client"),
        Handshake(key, b"one").proof("server"),
        Handshake(key, b"two").proof("client"),
        Handshake(seal.token_key("u"), b"one").proof("client"),
    }

    assert len(proofs) == 4
    assert Handshake(key, b"one").proof("client") in proofs


def test_a_nonce_is_never_the_same():
    assert len({seal.nonce() for _ in range(100)}) == 100


@given(st.lists(SOME, max_size=4), st.lists(SOME, max_size=4))
def test_parts_do_not_grow_into_each_other(left, right):
    assert (seal.sign(b"k", *left) == seal.sign(b"k", *right)) == (left == right)


def test_a_channel_takes_each_frame_once_and_in_order():
    ours, theirs = Channel(b"k"), Channel(b"k")
    first, second = ours.tag(b"a"), ours.tag(b"a")

    assert first != second
    assert theirs.is_next(first, b"a")
    assert not theirs.is_next(first, b"a")
    late = Channel(b"k")
    assert not late.is_next(second, b"a")


def test_directions_have_keys_of_their_own():
    shake = Handshake(seal.token_key(TOKEN), b"x")

    assert shake.channel("client").tag(b"a") != shake.channel("server").tag(b"a")


@given(SOME, st.integers(0, 5))
def test_a_sealed_value_opens_for_its_place(value, version):
    sealed = Sealed("run", TOKEN).close("k", value, version)

    assert Sealed("run", TOKEN).open("k", sealed, version) == value


@pytest.mark.parametrize(
    ("run", "token", "key", "version"),
    [
        ("other", TOKEN, "k", 3),
        ("run", "other", "k", 3),
        ("run", "", "k", 3),
        ("run", TOKEN, "l", 3),
        ("run", TOKEN, "k", 4),
    ],
)
def test_it_opens_for_no_other_run_token_key_or_version(run, token, key, version):
    sealed = Sealed("run", TOKEN).close("k", b"v", 3)

    with pytest.raises(SealError):
        Sealed(run, token).open(key, sealed, version)


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data):
    sealed = bytearray(Sealed("run", TOKEN).close("k", b"value", 1))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))

    with pytest.raises(SealError):
        Sealed("run", TOKEN).open("k", bytes(sealed), 1)


@given(st.binary(max_size=80))
def test_no_bytes_are_a_sealed_value(data):
    with pytest.raises(SealError):
        Sealed("run", TOKEN).open("k", data, 1)


def test_a_bare_value_is_not_taken_where_there_is_a_token():
    bare = Sealed("run", "").close("k", b"v")

    assert Sealed("run", "").open("k", bare, 1) == b"v"
    with pytest.raises(SealError):
        Sealed("run", TOKEN).open("k", bare, 1)
