"""The bytes between keepers: what goes in comes out, and nothing else comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint import transfer_wire as wire
from gpuops.checkpoint.states import CHUNK_BYTES, IMAGE_BYTES_MAX, Shard, StateId
from gpuops.checkpoint.transfer_auth import JobPass
from gpuops.checkpoint.transfer_wire import (
    Challenge,
    Get,
    Hello,
    Open,
    Push,
    Refusal,
)
from gpuops.host.frames import WireError
from gpuops.host.job_proof import nonce

ROOT = "0f" * 32
STATES = st.builds(StateId, st.integers(0, 99_999), st.integers(0, 10**12 - 1))
SHARDS = st.integers(1, 100_000).flatmap(
    lambda world: st.builds(Shard, st.integers(0, world - 1), st.just(world))
)


@given(STATES, SHARDS, st.sampled_from(["", ROOT]))
def test_open_goes_through(state, shard, root):
    asked = Open(state, shard, 4096, root)
    assert Open.from_bytes(asked.to_bytes()) == asked


@given(STATES, SHARDS, st.integers(1, IMAGE_BYTES_MAX), st.none() | STATES)
def test_push_goes_through(state, shard, nbytes, committed):
    offer = Push(state, shard, "ab" * 32, nbytes, ROOT, committed)
    assert Push.from_bytes(offer.to_bytes(4096)) == (offer, 4096)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans())
def test_get_goes_through(first, count, is_doubtful):
    get = Get(first, count, is_doubtful)
    assert Get.from_bytes(get.to_bytes()) == get


def test_the_opening_goes_through():
    hello, challenge = Hello(bytes(16), nonce()), Challenge(nonce())
    assert Hello.from_bytes(hello.to_bytes()) == hello
    assert Challenge.from_bytes(challenge.to_bytes()) == challenge
    assert len(hello.to_bytes()) <= wire.OPENING_BYTES_MAX


READERS = [
    Open.from_bytes,
    Push.from_bytes,
    Get.from_bytes,
    Hello.from_bytes,
    Challenge.from_bytes,
    wire.read_copy,
    wire.read_refused,
]


@given(st.sampled_from(READERS), st.binary(max_size=200))
def test_anything_else_is_a_wire_error(read, data):
    try:
        read(data)
    except WireError:
        return


@given(st.sampled_from(READERS[:2]), st.data())
def test_the_right_length_is_not_enough(read, data):
    size = {Open.from_bytes: 56, Push.from_bytes: 121}[read]
    try:
        read(data.draw(st.binary(min_size=size, max_size=size)))
    except WireError:
        return


def test_sizes_that_cannot_be_are_refused():
    assert wire.table_bytes(IMAGE_BYTES_MAX, CHUNK_BYTES) == wire.TABLE_BYTES_MAX
    with pytest.raises(WireError, match="a table of"):
        wire.table_bytes(IMAGE_BYTES_MAX, 4096)
    with pytest.raises(WireError, match="an image of 0 bytes"):
        wire.read_copy(wire.copy_bytes(0, ROOT))
    with pytest.raises(WireError, match="an image of"):
        wire.read_copy(wire.copy_bytes(IMAGE_BYTES_MAX + 1, ROOT))
    wild = Push(StateId(0, 0), Shard(0, 1), "ab" * 32, IMAGE_BYTES_MAX + 1, ROOT)
    with pytest.raises(WireError, match="an image of"):
        Push.from_bytes(wild.to_bytes(4096))


def test_a_refusal_is_cut_and_fit_to_be_printed():
    error = wire.read_refused(wire.refused_bytes(Refusal.BUSY, "a\x1b[31m" + 5000 * "é"))
    assert error.code is Refusal.BUSY
    assert str(error).startswith("a?[31m")
    assert len(str(error)) <= wire.WHY_BYTES_MAX
    assert len(wire.refused_bytes(Refusal.BUSY, 5000 * "é")) < wire.FRAME_BYTES_MAX - 60


def test_a_pass_is_of_one_job_and_token():
    one = JobPass("job", "token")
    assert JobPass("job", "x").job == one.job != JobPass("job 2", "token").job
    assert JobPass("job 2", "token").key == one.key != JobPass("job", "x").key
    assert one.key[: len(one.job)] != JobPass("token", "job").job


def test_an_epoch_never_goes_back():
    job = JobPass("job", "token", epoch=3)
    job.advance(5)
    job.advance(4)
    assert job.epoch == 5
