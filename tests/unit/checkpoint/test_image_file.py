"""Long files are written past the page cache, and arrive whole where they cannot be."""

import mmap
import os
import random
from itertools import pairwise
from pathlib import Path

import pytest
from support.checkpoint_images import sealed

from gpuops.checkpoint.digest import chunk_hash, compute_digest
from gpuops.checkpoint.pieces import BLOCK_BYTES as HASHES_BYTES
from gpuops.checkpoint.pieces import PIECE_BYTES, parse_block
from gpuops.checkpoint.storage.image_file import (
    BLOCK_BYTES,
    DirectWriter,
    verify_image,
    write_image,
)
from gpuops.checkpoint.types import CHUNK_BYTES, CorruptError

MIB = 2**20


@pytest.fixture
def fd(tmp_path):
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    yield found
    os.close(found)


def memory_of(nbytes):
    """Return a mapping, which begins at a page, of random bytes."""
    mapped = mmap.mmap(-1, nbytes)
    mapped[:] = random.Random(nbytes).randbytes(nbytes)
    return memoryview(mapped)


def written(fd, pieces):
    """Write *pieces*; return the writer and what the file holds."""
    writer = DirectWriter(fd)
    for piece in pieces:
        writer.write(piece)
    return writer, Path(f"/proc/self/fd/{fd}").read_bytes()


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * MIB, 3 * MIB + 5])
def test_every_byte_arrives_whatever_the_length(fd, nbytes):
    view = memory_of(max(nbytes, 1))[:nbytes]
    pieces = [view[at : at + MIB] for at in range(0, nbytes, MIB)]

    writer, content = written(fd, pieces)

    assert content == view
    assert not writer.is_direct or nbytes % BLOCK_BYTES == 0


def test_pieces_that_are_no_complete_blocks_arrive_in_their_order(fd):
    view = memory_of(2 * MIB)
    cuts = [0, BLOCK_BYTES, BLOCK_BYTES + 700, 5 * BLOCK_BYTES, MIB + 1, 2 * MIB]

    _, content = written(fd, [view[a:b] for a, b in pairwise(cuts)])

    assert content == view


def test_memory_that_begins_within_a_block_goes_through_the_cache(fd):
    view = memory_of(MIB + 7)[7:]

    writer, content = written(fd, [view])

    assert content == view
    assert not writer.is_direct


def test_what_does_not_know_the_flag_is_written_through_its_cache():
    fd = os.memfd_create("no-file-system")
    try:
        view = memory_of(MIB + 1)
        _, content = written(fd, [view])
        assert content == view
    finally:
        os.close(fd)


def test_what_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            DirectWriter(fd).write(memory_of(MIB))
    finally:
        os.close(fd)


@pytest.fixture(params=["memory", "file"])
def image(request, tmp_path):
    """Return a descriptor of two chunks and a few bytes, and what is in it."""
    some = random.Random(0).randbytes(10**6 + 3)
    content = (some * 34)[: 2 * CHUNK_BYTES + 5]
    if request.param == "memory":
        found = sealed(content)
    else:
        (tmp_path / "image").write_bytes(content)
        found = os.open(tmp_path / "image", os.O_RDWR | os.O_CLOEXEC)
    yield found, content
    os.close(found)


def test_an_image_arrives_with_the_hashes_of_all_its_pieces(fd, image):
    source, content = image
    digest = compute_digest(memoryview(content))

    blocks = write_image(source, fd, digest)

    assert Path(f"/proc/self/fd/{fd}").read_bytes() == content
    assert blocks == verify_image(source, digest)
    for number, at in enumerate(range(0, len(content), CHUNK_BYTES)):
        chunk = content[at : at + CHUNK_BYTES]
        block = blocks[number * HASHES_BYTES :][:HASHES_BYTES]
        pieces = [chunk[at : at + PIECE_BYTES] for at in range(0, len(chunk), PIECE_BYTES)]
        assert parse_block(block, chunk_hash(chunk), len(chunk)) == b"".join(
            map(chunk_hash, pieces)
        )


@pytest.mark.parametrize("at", [0, CHUNK_BYTES + PIECE_BYTES, 2 * CHUNK_BYTES + 4])
def test_one_bit_in_any_chunk_is_found_and_located(fd, image, at):
    source, content = image
    digest = compute_digest(memoryview(content))
    os.pwrite(source, bytes([content[at] ^ 16]), at)

    where = f"1 of 3 chunks are not what was saved, at bytes {at // CHUNK_BYTES * CHUNK_BYTES}$"
    with pytest.raises(CorruptError, match=where):
        write_image(source, fd, digest)
    with pytest.raises(CorruptError, match=where):
        verify_image(source, digest)
