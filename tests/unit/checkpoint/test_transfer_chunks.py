"""Which chunks are asked for by whom, and when an image is whole."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import draws
from support.transfers import CHUNK

from gpuops.checkpoint.digest import chunk_hash, compute_digest
from gpuops.checkpoint.transfer.chunks import ChunkDamagedError, ChunkRange, ChunkTracker
from gpuops.checkpoint.transfer.wire import RANGE_BYTES_MAX
from gpuops.checkpoint.types import CorruptError, Digest

DATA = random.Random(1).randbytes(10 * CHUNK + 9)
DIGEST = compute_digest(memoryview(DATA), chunk_bytes=CHUNK)


def intake(**more):
    return ChunkTracker(memoryview(bytearray(len(DATA))), DIGEST, chunk_bytes=CHUNK, **more)


def arrive(found, number, data=DATA):
    view = found.chunk(number)
    view[:] = data[number * CHUNK : number * CHUNK + len(view)]
    found.record(number, chunk_hash(view))


def claims(found):
    taken = []
    while (claim := found.claim()) is not None:
        taken.append(claim)
    return taken


def test_every_chunk_is_claimed_once_and_the_image_is_complete_at_the_end():
    found = intake()
    taken = claims(found)
    numbers = [n for claim in taken for n in range(claim.first, claim.first + claim.count)]
    assert numbers == list(range(11))
    for number in numbers:
        assert not found.is_complete
        arrive(found, number)
    assert found.is_complete
    found.check_root()
    assert bytes(found.view) == DATA
    assert (found.received_bytes, found.n_missing) == (len(DATA), 0)


def test_what_a_connection_leaves_goes_to_another():
    found = intake()
    first = found.claim()
    found.release(first)
    found.release(first)
    assert found.claim() == first


def test_what_arrived_is_not_given_back():
    found = intake()
    taken = claims(found)
    arrive(found, 0)
    for claim in taken:
        found.release(claim)
    assert [claim.first for claim in claims(found)] == list(range(1, 11))


def test_a_damaged_chunk_is_asked_for_again_by_itself_with_doubt():
    found = intake(tries_max=3)
    claims(found)
    for _ in range(2):
        found.record(4, b"12345678")
        assert found.claim() == ChunkRange(4, 1, is_suspect=True)
    with pytest.raises(ChunkDamagedError, match="chunk 4 of 11 arrived corrupt 3 times"):
        found.record(4, b"12345678")
    with pytest.raises(ChunkDamagedError, match="chunk 4 of 11 arrived corrupt 3 times"):
        found.claim()  # by another connection, before it hears of the end
    assert found.n_damaged == 3
    found.reset_errors()
    assert found.claim() == ChunkRange(4, 1, is_suspect=False)
    arrive(found, 4)


def test_small_chunks_go_in_ranges_that_leave_work_for_others():
    data = bytes(640 * 16)
    digest = compute_digest(memoryview(data), chunk_bytes=16)
    found = ChunkTracker(memoryview(bytearray(len(data))), digest, chunk_bytes=16)
    taken = claims(found)
    assert taken[0].count == 639 // 16
    assert sum(claim.count for claim in taken) == 640
    assert max(claim.count for claim in taken) * 16 <= RANGE_BYTES_MAX


def test_what_lies_there_is_found_by_its_hash():
    found = intake()
    found.view[: 5 * CHUNK] = DATA[: 5 * CHUNK]
    found.view[2 * CHUNK] ^= 1
    assert found.find_present() == 4
    assert found.find_present([0, 5, 10]) == 0
    assert [claim.first for claim in claims(found)] == [2, 5, 6, 7, 8, 9, 10]
    assert found.found_bytes == 4 * CHUNK


def test_a_digest_that_contradicts_itself_is_refused():
    bad = Digest(DIGEST.nbytes, DIGEST.table[:-1] + b"x", DIGEST.root)
    with pytest.raises(CorruptError):
        ChunkTracker(memoryview(bytearray(len(DATA))), bad, chunk_bytes=CHUNK)
    with pytest.raises(ValueError, match="do not fit"):
        ChunkTracker(memoryview(bytearray(7)), DIGEST, chunk_bytes=CHUNK)
    with pytest.raises(ValueError, match="do not fit"):
        ChunkTracker(memoryview(DATA), DIGEST, chunk_bytes=CHUNK)


def test_who_waits_is_woken_by_work_and_by_the_end():
    found = intake()
    taken = claims(found)
    woken = threading.Event()

    def wait():
        found.wait(30)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    found.release(taken[0])
    assert woken.wait(10)
    thread.join()
    found.wait(30)


@settings(max_examples=draws(100))
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_any_order_of_arrivals_losses_and_damage_ends_whole(seed, n_lines):
    rng = random.Random(seed)
    found = intake(tries_max=1000)
    lines = [[] for _ in range(n_lines)]
    for _ in range(2000):
        if found.is_complete:
            break
        line = rng.choice(lines)
        event = rng.random()
        if event < 0.4 and len(line) < 2 and (claim := found.claim()) is not None:
            line.append(claim)
        elif event < 0.5:
            while line:
                found.release(line.pop())
        elif line:
            claim = line.pop(0)
            for number in range(claim.first, claim.first + claim.count):
                data = DATA if rng.random() < 0.8 else bytes(len(DATA))
                arrive(found, number, data)
    assert found.is_complete
    found.check_root()
    assert bytes(found.view) == DATA
