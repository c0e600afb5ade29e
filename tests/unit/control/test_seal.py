"""Seals: what they bind, and that nothing opens them but the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.control.signing import SignatureError, ValueSigner, run_digest, token_key

TOKEN = "t"
SOME = st.binary(max_size=20)


def test_a_token_and_a_run_of_the_same_text_are_not_the_same():
    assert token_key("x") != run_digest("x")
    assert token_key("x") == token_key("x") != token_key("y")


@given(SOME, st.integers(0, 5))
def test_a_sealed_value_opens_for_its_place(value, version):
    sealed = ValueSigner("run", TOKEN).sign_value("k", value, version)

    assert ValueSigner("run", TOKEN).verify_value("k", sealed, version) == value


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
    sealed = ValueSigner("run", TOKEN).sign_value("k", b"v", 3)

    with pytest.raises(SignatureError):
        ValueSigner(run, token).verify_value(key, sealed, version)


def test_a_value_of_an_earlier_run_with_the_same_key_and_token_is_refused():
    earlier, now = ValueSigner("run", TOKEN), ValueSigner("run", TOKEN)
    earlier.instance, now.instance = b"1", b"2"

    with pytest.raises(SignatureError):
        now.verify_value("k", earlier.sign_value("k", b"v", 3), 3)
    # The row that says which instance it is, is read before that is known.
    assert now.verify_value("", earlier.sign_value("", b"1", 1), 1) == b"1"


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data):
    sealed = bytearray(ValueSigner("run", TOKEN).sign_value("k", b"value", 1))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))

    with pytest.raises(SignatureError):
        ValueSigner("run", TOKEN).verify_value("k", bytes(sealed), 1)


@given(st.binary(max_size=80))
def test_no_bytes_are_a_sealed_value(data):
    with pytest.raises(SignatureError):
        ValueSigner("run", TOKEN).verify_value("k", data, 1)


def test_a_bare_value_is_not_taken_where_there_is_a_token():
    bare = ValueSigner("run", "").sign_value("k", b"v")

    assert ValueSigner("run", "").verify_value("k", bare, 1) == b"v"
    with pytest.raises(SignatureError):
        ValueSigner("run", TOKEN).verify_value("k", bare, 1)
