"""Digests: every changed bit is found, and in which chunk; streams and buffers agree."""

import mmap
import random
import tracemalloc
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lock_free import seconds_beside
from xxhash import xxh3_64_digest

from gpuops.checkpoint.digest import (
    Digester,
    check_digest,
    chunk_count,
    compute_digest,
    find_damaged_chunks,
    is_chunk_intact,
)
from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError, Digest

SEED = 1_000


@pytest.fixture(scope="module")
def image():
    """Three chunks and a bit."""
    return bytearray(random.Random(SEED).randbytes(3 * CHUNK_BYTES + 12_345))


def test_the_digest_is_what_its_documentation_says(image):
    digest = compute_digest(memoryview(image))
    pieces = [image[at : at + CHUNK_BYTES] for at in range(0, len(image), CHUNK_BYTES)]

    assert digest.nbytes == len(image)
    assert digest.table == b"".join(xxh3_64_digest(bytes(piece)) for piece in pieces)
    assert digest.root == blake3(len(image).to_bytes(8, "little") + digest.table).hexdigest()
    assert find_damaged_chunks(memoryview(image), digest) == ()


def test_digests_written_by_an_earlier_version_still_verify():
    counted = bytes(range(256)) * 4

    assert compute_digest(memoryview(b"")) == Digest(
        0, b"", "71e0a99173564931c0b8acc52d2685a8e39c64dc52e3d02390fdac2a12b155cb"
    )
    assert compute_digest(memoryview(counted), chunk_bytes=1000) == Digest(
        1024,
        bytes.fromhex("d33dd80b46f60e5034a82b3f2182e9ca"),
        "08168bf5b69ea3594105c4fd1e10c512c5f1b6a6e82f57380dc3d619154af8b8",
    )


def test_each_of_1000_random_bit_flips_is_found_with_its_chunk(image):
    rng = random.Random(SEED)
    whole = 2**16 * 16  # sixteen small chunks: the same code, a thousand times in a second
    window = memoryview(image)[:whole]
    digest = compute_digest(window, chunk_bytes=2**16)
    missed = []
    for _ in range(1000):
        at, bit = rng.randrange(whole), rng.randrange(8)
        image[at] ^= 1 << bit
        if find_damaged_chunks(window, digest, chunk_bytes=2**16) != (at // 2**16,):
            missed.append((at, bit))
        image[at] ^= 1 << bit

    assert missed == []
    assert find_damaged_chunks(window, digest, chunk_bytes=2**16) == ()


def test_flips_in_chunks_of_the_usual_size_are_found(image):
    view = memoryview(image)
    digest = compute_digest(view)
    places = [0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES, len(image) - 1]
    for at in places:
        image[at] ^= 0x10
        assert find_damaged_chunks(view, digest) == (at // CHUNK_BYTES,)
        image[at] ^= 0x10
    for at in places:
        image[at] ^= 0x01

    assert find_damaged_chunks(view, digest) == (0, 1, 3)
    for at in places:
        image[at] ^= 0x01


def test_each_of_1000_random_bit_flips_in_the_digest_itself_is_found():
    data = memoryview(random.Random(SEED).randbytes(1000))
    digest = compute_digest(data, chunk_bytes=64)
    rng = random.Random(SEED)
    for _ in range(1000):
        table = bytearray(digest.table)
        table[rng.randrange(len(table))] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptError, match="the digest's table has the root"):
            find_damaged_chunks(data, replace(digest, table=bytes(table)), chunk_bytes=64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nbytes": 999}, "the digest's table has the root"),
        ({"nbytes": 64}, "the digest of 64 bytes has a table of 128 bytes, not 8"),
        ({"nbytes": -1}, "the digest of -1 bytes"),
        ({"nbytes": 2**70}, "the digest of 1180591620717411303424 bytes"),
        ({"table": b""}, "has a table of 0 bytes, not 128"),
        ({"table": b"x" * 127}, "has a table of 127 bytes"),
        ({"root": "0" * 64}, "but 0000000000000000… was recorded"),
        ({"root": ""}, "was recorded"),
    ],
)
def test_a_digest_that_does_not_agree_with_itself_is_corrupt(change, says):
    data = memoryview(bytes(1000))
    digest = replace(compute_digest(data, chunk_bytes=64), **change)

    with pytest.raises(CorruptError, match=says):
        check_digest(digest, chunk_bytes=64)
    with pytest.raises(CorruptError, match=says):
        find_damaged_chunks(data, digest, chunk_bytes=64)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_other_length_is_corrupt(data, n_more):
    digest = compute_digest(memoryview(data), chunk_bytes=16)
    longer = data + bytes(n_more)
    says = f"there are {len(longer)} bytes, but {len(data)} were saved"

    with pytest.raises(CorruptError, match=says):
        find_damaged_chunks(memoryview(longer), digest, chunk_bytes=16)
    with pytest.raises(CorruptError):
        find_damaged_chunks(
            memoryview(data), compute_digest(memoryview(longer), chunk_bytes=16), chunk_bytes=16
        )


def test_a_length_that_keeps_the_number_of_chunks_is_in_the_root():
    short, long = (compute_digest(memoryview(bytes(n)), chunk_bytes=64) for n in (0, 1))

    assert short.root != long.root
    forged = Digest(65, long.table * 2, long.root)
    with pytest.raises(CorruptError):
        find_damaged_chunks(memoryview(bytes(65)), forged, chunk_bytes=64)


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0, 90), max_size=12), st.integers(1, 40))
def test_a_stream_in_any_pieces_has_the_digest_of_the_whole(data, sizes, chunk_bytes):
    digester = Digester(chunk_bytes=chunk_bytes)
    rest = data
    for size in sizes:
        digester.update(rest[:size])
        rest = rest[size:]
        so_far = data[: len(data) - len(rest)]
        assert digester.nbytes == len(so_far)
        assert digester.finish() == compute_digest(memoryview(so_far), chunk_bytes=chunk_bytes)

    assert digester.update(rest).finish() == compute_digest(
        memoryview(data), chunk_bytes=chunk_bytes
    )


def test_a_stream_of_complete_chunks_has_the_digest_of_the_whole(image):
    digester = Digester()
    for at in range(0, len(image), 5 * 2**20):
        digester.update(memoryview(image)[at : at + 5 * 2**20])

    assert digester.finish() == compute_digest(memoryview(image))


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_chunk_is_judged_alone(data, draws):
    digest = compute_digest(memoryview(data), chunk_bytes=32)
    number = draws.draw(st.integers(0, chunk_count(len(data), chunk_bytes=32) - 1))
    chunk = bytearray(data[number * 32 : (number + 1) * 32])

    assert is_chunk_intact(chunk, digest, number)
    chunk[draws.draw(st.integers(0, len(chunk) - 1))] ^= 0x80
    assert not is_chunk_intact(chunk, digest, number)


@pytest.mark.parametrize("number", [-1, -2, 4, 2**70])
def test_a_chunk_that_the_digest_does_not_have_is_not_good(number):
    digest = compute_digest(memoryview(bytes(100)), chunk_bytes=32)

    for data in (bytes(32), bytes(4), b""):
        assert not is_chunk_intact(data, digest, number)


def test_buffers_of_any_kind_and_shape_are_bytes():
    raw = bytes(range(240))
    shaped = memoryview(raw).cast("B").cast("i", (5, 12))

    assert compute_digest(shaped) == compute_digest(memoryview(raw))
    assert Digester().update(shaped).finish() == compute_digest(memoryview(raw))
    assert find_damaged_chunks(shaped, compute_digest(memoryview(raw))) == ()


def test_empty_buffers_of_other_shapes_are_empty():
    import numpy as np

    assert compute_digest(memoryview(np.zeros((0, 3), np.float32))) == compute_digest(
        memoryview(b"")
    )


def test_a_buffer_with_holes_is_refused_and_not_copied():
    with pytest.raises(TypeError):
        compute_digest(memoryview(bytes(100))[::2])


def test_the_buffer_is_free_again_after_hashing():
    buffer = bytearray(1000)
    digest = compute_digest(memoryview(buffer), chunk_bytes=64)
    find_damaged_chunks(memoryview(buffer), digest, chunk_bytes=64)
    Digester(chunk_bytes=64).update(buffer)
    buffer += b"a bytearray that is exported cannot grow"


def test_nothing_is_copied_to_be_hashed(image):
    view = memoryview(image)
    tracemalloc.start()
    try:
        find_damaged_chunks(view, compute_digest(view))
        Digester().update(view).finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2**20


@pytest.mark.parametrize(
    "hash_it",
    [
        lambda view: compute_digest(view, chunk_bytes=len(view)),
        lambda view: Digester(chunk_bytes=len(view)).update(view),
    ],
    ids=["whole", "stream"],
)
def test_other_threads_run_while_a_chunk_is_hashed(hash_it):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # zeros that are read take no memory
    zeros = memoryview(mmap.mmap(-1, 2**30, flags=flags))

    def is_beside():
        hashing_s, here_s = seconds_beside(lambda: hash_it(zeros))
        return here_s > 0.2 * hashing_s > 0.02

    # A busy machine may favour one of two threads, and not every time.
    assert any(is_beside() for _ in range(10))
