"""What is read of an image in memory is verified where it was read to."""

import random
from pathlib import Path

import pytest

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.hashed_image import READ_BYTES, HashedImage
from gpuops.checkpoint.memory.node_memory import duplicate_fd
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, CorruptError

OWN_FDS = Path("/proc/self/fd")
NBYTES = CHUNK_BYTES + 3 * READ_BYTES + 5


@pytest.fixture(scope="module")
def data():
    return random.Random(0).randbytes(NBYTES)


@pytest.fixture
def memory(data):
    with SharedBuffer.create("image", NBYTES) as found:
        found.view[:] = data
        yield found


@pytest.fixture(params=["read", "mapped before"])
def image(memory, request):
    digest = compute_digest(memory.view)
    with HashedImage.open(duplicate_fd(memory, writable=False), digest) as found:
        if request.param == "mapped before":
            found.copy_from(
                SharedBuffer.attach(duplicate_fd(memory, writable=False), writable=False)
            )
        yield found


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(0, CHUNK_BYTES)],
        [(CHUNK_BYTES - 3, CHUNK_BYTES)],
        [(7, 7), (7, 8), (8, 2 * READ_BYTES + 3), (4 * READ_BYTES, CHUNK_BYTES - 1)],
    ],
)
def test_parts_of_a_chunk_are_read_and_all_of_it_is_verified(image, memory, data, ranges):
    parts = [(begin, memoryview(bytearray(end - begin))) for begin, end in ranges]
    image.read_chunk(0, parts)
    assert all(part == data[begin : begin + len(part)] for begin, part in parts)

    for at in (0, 7, CHUNK_BYTES // 2, CHUNK_BYTES - 1):
        memory.view[at] ^= 1
        with pytest.raises(CorruptError, match="corrupt in piece 0 of 2"):
            image.read_chunk(0, parts)
        memory.view[at] ^= 1


def test_the_last_chunk_is_short(image, memory, data):
    part = memoryview(bytearray(NBYTES - CHUNK_BYTES))
    image.read_chunk(1, [(CHUNK_BYTES, part)])
    assert part == data[CHUNK_BYTES:]
    memory.view[NBYTES - 1] ^= 128
    with pytest.raises(CorruptError, match="corrupt in piece 1 of 2"):
        image.read_chunk(1, [(CHUNK_BYTES, part)])


def test_ranges_are_verified_once_and_only_their_chunks(image, memory):
    memory.view[3] ^= 1
    image.ensure([(CHUNK_BYTES, NBYTES), (9, 9)])
    with pytest.raises(CorruptError, match="piece 0"):
        image.ensure([(CHUNK_BYTES - 1, CHUNK_BYTES + 1)])
    memory.view[3] ^= 1
    image.ensure([(0, 1)])
    memory.view[3] ^= 1
    image.ensure([(0, NBYTES)])


def test_a_damaged_digest_or_another_size_is_refused_and_nothing_stays_open(memory):
    digest = compute_digest(memory.view)
    n_open = len(list(OWN_FDS.iterdir()))
    for wrong in (
        compute_digest(b"other"),
        type(digest)(NBYTES, digest.table[::-1], digest.root),
    ):
        with pytest.raises(CheckpointError, match=r"bytes, not|was recorded"):
            HashedImage.open(duplicate_fd(memory, writable=False), wrong)
    assert len(list(OWN_FDS.iterdir())) == n_open


def resident_bytes(name):
    """Return how much of a memory all of its mappings here have in their page tables."""
    _, *found = Path("/proc/self/smaps").read_text().split(f"/memfd:{name} ")
    return sum(int(each.partition("Rss:")[2].split()[0]) * 1024 for each in found)


def test_what_was_mapped_before_is_unmapped_and_closed_with_the_image(memory):
    n_open, before = len(list(OWN_FDS.iterdir())), resident_bytes("image")
    image = HashedImage.open(duplicate_fd(memory, writable=False), compute_digest(memory.view))
    mapped = SharedBuffer.attach(duplicate_fd(memory, writable=False), writable=False)
    mapped.populate()
    image.copy_from(mapped)
    image.read_chunk(0, [(0, memoryview(bytearray(CHUNK_BYTES)))])
    assert resident_bytes("image") >= before + NBYTES
    image.unmap()
    assert resident_bytes("image") == before
    image.close()
    assert len(list(OWN_FDS.iterdir())) == n_open
