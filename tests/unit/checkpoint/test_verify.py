"""Verifying: each of a thousand flipped bits is found, and where it is."""

import os
import random

import pytest
from support.checkpoint_images import ORIGIN, content_of, images

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.inspection import FileProblemKind, verify_state
from gpuops.checkpoint.storage.persist import persist
from gpuops.checkpoint.types import CHUNK_BYTES, CheckpointError, Shard, StateId

STATE = StateId(1, 1)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_a_thousand_random_flips_on_disk_are_all_found(tmp_path, store):
    """One at a time, over three shards, their pieces' hashes and the manifest; and undone."""
    random_ = random.Random(20260311)
    with images(3, nbytes=100_000) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
    files = sorted((tmp_path / STATE.name).iterdir())
    assert len(files) == 7

    for _ in range(1000):
        path = random_.choice(files)
        bit = random_.randrange(8 * path.stat().st_size)
        flip(path, bit)
        (problem,) = verify_state(store, STATE)
        assert problem.file == path.name
        flip(path, bit)
    assert verify_state(store, STATE) == []


def test_flips_in_several_chunks_are_named_with_their_offsets(tmp_path, store):
    with images(1, nbytes=5 * CHUNK_BYTES) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
    path = tmp_path / STATE.name / Shard(0, 1).file_name
    for at in (CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 3):
        flip(path, 8 * at)

    (problem,) = verify_state(store, STATE)

    assert problem.kind is FileProblemKind.FLIPPED
    assert problem.offsets == (0, CHUNK_BYTES, 5 * CHUNK_BYTES)
    whole = path.stat().st_size
    assert f"3 of 6 chunks are not what was saved: bytes 0-{CHUNK_BYTES - 1}, " in problem.detail
    assert f"{5 * CHUNK_BYTES}-{whole - 1}" in str(problem)


def test_swapped_chunks_and_swapped_shards_are_found(tmp_path, store):
    with images(2, nbytes=2 * CHUNK_BYTES) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
    folder = tmp_path / STATE.name
    first, second = (folder / Shard(rank, 2).file_name for rank in range(2))

    content = first.read_bytes()
    end = 2 * CHUNK_BYTES
    first.write_bytes(content[CHUNK_BYTES:end] + content[:CHUNK_BYTES] + content[end:])
    (problem,) = verify_state(store, STATE)
    assert problem.offsets == (0, CHUNK_BYTES)

    first.write_bytes(content)
    middle = folder / "swap"
    first.rename(middle)
    second.rename(first)
    middle.rename(second)
    assert {problem.file for problem in verify_state(store, STATE)} == {first.name, second.name}


def test_sizes_only_reads_no_bytes(tmp_path, store):
    with images(1) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
    path = tmp_path / STATE.name / Shard(0, 1).file_name
    flip(path, 8 * 4096)
    assert verify_state(store, STATE, sizes_only=True) == []
    assert len(verify_state(store, STATE)) == 1

    os.truncate(path, 5)
    (problem,) = verify_state(store, STATE, sizes_only=True)
    assert problem.kind is FileProblemKind.TRUNCATED


def test_what_is_no_regular_file_is_named_and_not_opened(tmp_path, store):
    with images(4) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
        folder = tmp_path / STATE.name
        paths = [folder / Shard(rank, 4).file_name for rank in range(4)]
        for path in paths:
            path.unlink()
        os.mkfifo(paths[0])
        paths[1].mkdir()
        (tmp_path / "elsewhere").write_bytes(content_of(shards[Shard(2, 4)]))
        paths[2].symlink_to(tmp_path / "elsewhere")
        paths[3].symlink_to("/dev/zero")

        problems = verify_state(store, STATE)

    assert [problem.kind for problem in problems] == [FileProblemKind.UNREADABLE] * 4
    for rank in range(4):
        with pytest.raises(CheckpointError):
            list(store.read_chunks(STATE, Shard(rank, 4)))
        with pytest.raises(CheckpointError):
            store.local_shard_path(STATE, Shard(rank, 4))


def test_names_that_would_harm_a_terminal_are_shown_without_harm(tmp_path, store):
    with images(1) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
    for name in (b"\x1b[2Jgone", b"\xff\xfe"):
        (tmp_path / STATE.name / os.fsdecode(name)).touch()

    problems = verify_state(store, STATE)
    assert len(problems) == 2
    for problem in problems:
        assert problem.kind is FileProblemKind.EXTRA
        assert str(problem).isprintable()
        assert str(problem).encode()


def test_a_file_that_grows_or_shrinks_meanwhile_is_told(tmp_path, store):
    with images(1, nbytes=2 * CHUNK_BYTES) as shards:
        persist(store, STATE, shards, origin=ORIGIN)
    path = tmp_path / STATE.name / Shard(0, 1).file_name

    def cut(done_bytes, _all_bytes):
        if done_bytes == CHUNK_BYTES:
            os.truncate(path, CHUNK_BYTES + 9)

    (problem,) = verify_state(store, STATE, progress=cut)

    assert problem.kind is FileProblemKind.UNREADABLE
    assert f"ends at byte {CHUNK_BYTES}" in problem.detail
