"""The bytes between keepers: what goes in comes out, and nothing else comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.transfer import wire
from gpuops.checkpoint.transfer.wire import (
    GetChunks,
    JobCredentials,
    OpenCopy,
    PushOffer,
    TransferChallenge,
    TransferHello,
    TransferRefusal,
)
from gpuops.checkpoint.types import CHUNK_BYTES, IMAGE_BYTES_MAX, Shard, StateId
from gpuops.host.net.frames import WireError
from gpuops.host.net.job_proof import nonce

ROOT = "0f" * 32
STATES = st.builds(StateId, st.integers(0, 99_999), st.integers(0, 10**12 - 1))
SHARDS = st.integers(1, 100_000).flatmap(
    lambda world: st.builds(Shard, st.integers(0, world - 1), st.just(world))
)


@given(STATES, SHARDS, st.sampled_from(["", ROOT]))
def test_open_goes_through(state, shard, root):
    asked = OpenCopy(state, shard, 4096, root)
    assert OpenCopy.from_bytes(asked.to_bytes()) == asked


@given(STATES, SHARDS, st.integers(1, IMAGE_BYTES_MAX), st.none() | STATES, st.booleans())
def test_push_goes_through(state, shard, nbytes, committed, is_remainder):
    image = (IMAGE_BYTES_MAX, "1f" * 32) if is_remainder else ()
    offer = PushOffer(state, shard, "ab" * 32, nbytes, ROOT, committed, *image)
    assert PushOffer.from_bytes(offer.to_bytes(4096)) == (offer, 4096)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans())
def test_get_goes_through(first, count, is_doubtful):
    get = GetChunks(first, count, is_doubtful)
    assert GetChunks.from_bytes(get.to_bytes()) == get


def test_the_opening_goes_through():
    hello, challenge = TransferHello(bytes(16), nonce()), TransferChallenge(nonce())
    assert TransferHello.from_bytes(hello.to_bytes()) == hello
    assert TransferChallenge.from_bytes(challenge.to_bytes()) == challenge
    assert len(hello.to_bytes()) <= wire.OPENING_BYTES_MAX


READERS = [
    OpenCopy.from_bytes,
    PushOffer.from_bytes,
    GetChunks.from_bytes,
    TransferHello.from_bytes,
    TransferChallenge.from_bytes,
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
    size = {OpenCopy.from_bytes: 56, PushOffer.from_bytes: 161}[read]
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
    for sizes in ((IMAGE_BYTES_MAX + 1, ROOT), (1, ROOT, None, IMAGE_BYTES_MAX + 1, ROOT)):
        wild = PushOffer(StateId(0, 0), Shard(0, 1), "ab" * 32, *sizes)
        with pytest.raises(WireError, match="an image of"):
            PushOffer.from_bytes(wild.to_bytes(4096))


def test_a_refusal_is_cut_and_fit_to_be_printed():
    error = wire.read_refused(wire.refused_bytes(TransferRefusal.BUSY, "a\x1b[31m" + 5000 * "é"))
    assert error.code is TransferRefusal.BUSY
    assert str(error).startswith("a?[31m")
    assert len(str(error)) <= wire.WHY_BYTES_MAX
    assert len(wire.refused_bytes(TransferRefusal.BUSY, 5000 * "é")) < wire.FRAME_BYTES_MAX - 60


def test_a_pass_is_of_one_job_and_token():
    one = JobCredentials("job", "token")
    assert JobCredentials("job", "x").job == one.job != JobCredentials("job 2", "token").job
    assert JobCredentials("job 2", "token").key == one.key != JobCredentials("job", "x").key
    assert one.key[: len(one.job)] != JobCredentials("token", "job").job


def test_an_epoch_never_goes_back():
    job = JobCredentials("job", "token", epoch=3)
    job.advance(5)
    job.advance(4)
    assert job.epoch == 5
