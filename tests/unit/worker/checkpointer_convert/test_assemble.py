"""Tensors put together from shards, and what shards that make no whole are told."""

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import draws
from support.made_states import DTYPES, make_state, part, raw, whole
from support.small_disk import small_disk

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard
from gpuops.convert.state_reader import StateReader, scratch_memory


def opened(store, state, scratch):
    return StateReader(store, store.read_manifest(state), scratch)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "states")


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_a_grid_of_parts_is_put_together(store, tmp_path, dtype):
    w = torch.arange(7 * 5).reshape(7, 5).to(dtype)
    cuts = [(slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 5)), (slice(4, 7),)]
    state = make_state(store, [{"w": part(w, *cut)} for cut in cuts])

    with opened(store, state, tmp_path) as reader:
        assert bytes(reader.bytes_of(reader.tensors["w"])) == raw(w)


@given(st.data())
@settings(max_examples=draws(40))
def test_any_cut_along_any_dimension(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    w = torch.randint(0, 2**30, shape, dtype=torch.int32)
    n_ranks = data.draw(st.integers(1, 4))
    dim = data.draw(st.integers(0, len(shape) - 1)) if shape else None
    parts = [whole(w)] * n_ranks
    if dim is not None:
        cuts = sorted(data.draw(st.integers(0, shape[dim])) for _ in range(n_ranks - 1))
        edges = [0, *cuts, shape[dim]]
        before = (slice(None),) * dim
        parts = [part(w, *before, slice(a, b)) for a, b in pairwise(edges)]
    folder = tmp_path_factory.mktemp("s")
    store = DirectoryStore(folder / "states")
    state = make_state(store, [{"w": one} for one in parts])

    with opened(store, state, folder) as reader:
        assert bytes(reader.bytes_of(reader.tensors["w"])) == raw(w)
    assert [path.name for path in folder.iterdir()] == ["states"], "scratch files have no name"


def test_what_all_ranks_have_is_taken_from_the_first(store, tmp_path):
    mean = torch.ones(3)
    state = make_state(store, [{"mean": whole(mean * rank)} for rank in range(4)])

    with opened(store, state, tmp_path) as reader:
        tensor = reader.tensors["mean"]
        assert (tensor.n_copies, tensor.sharding) == (4, "whole")
        assert bytes(reader.bytes_of(tensor)) == raw(mean * 0)


def test_every_shard_is_verified_once_before_a_byte_is_used(store, tmp_path):
    w = torch.arange(8.0)
    state = make_state(store, [{"w": part(w, slice(0, 4))}, {"w": part(w, slice(4, 8))}])
    path = store.local_shard_path(state, Shard(1, 2))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with (
        opened(store, state, tmp_path) as reader,
        pytest.raises(CorruptError, match=r"shard-00001.*1 of 1 chunks.*verify --all"),
    ):
        reader.bytes_of(reader.tensors["w"])


def test_progress_is_the_bytes_verified(store, tmp_path):
    state = make_state(store, [{"w": whole(torch.ones(4))}])
    told = []
    manifest = store.read_manifest(state)
    with StateReader(store, manifest, tmp_path, told.append) as reader:
        for _ in range(3):
            reader.bytes_of(reader.tensors["w"])

    assert told == [manifest.nbytes]


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([{"w": part(torch.ones(4), slice(0, 3))}], "has 4 elements; its 1 parts have 3"),
        (
            [{"w": part(torch.ones(4), slice(0, 3))}, {"w": part(torch.ones(4), slice(2, 4))}],
            "overlap",
        ),
        ([{"w": whole(torch.ones(4))}, {"w": whole(torch.ones(5))}], r"\[4\] in shard 0 and"),
        ([{"w": whole(torch.ones(4))}, {"w": whole(torch.ones(4).int())}], "I32"),
    ],
)
def test_parts_that_make_no_whole_are_reported(store, tmp_path, ranks, why):
    state = make_state(store, ranks)

    with pytest.raises(CorruptError, match=why):
        opened(store, state, tmp_path)


@pytest.mark.parametrize("n_bits", range(0, 4096 * 8, 1511))
def test_a_bit_of_a_header_is_found(store, tmp_path, n_bits):
    state = make_state(store, [{"w": whole(torch.ones(4))}])
    path = store.local_shard_path(state, Shard(0, 1))
    content = bytearray(path.read_bytes())
    content[n_bits // 8] ^= 1 << n_bits % 8
    path.write_bytes(content)

    with pytest.raises(CorruptError):
        opened(store, state, tmp_path)


def test_a_shard_that_was_cut_short(store, tmp_path):
    state = make_state(store, [{"w": whole(torch.ones(4000))}])
    path = store.local_shard_path(state, Shard(0, 1))
    os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(CorruptError), opened(store, state, tmp_path) as reader:
        reader.bytes_of(reader.tensors["w"])


def test_a_full_disk_is_an_error_and_no_signal(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(CheckpointError) as caught:
            scratch_memory(disk, 2_000_000)
        assert str(caught.value) == (
            f"cannot allocate 2000000 bytes of scratch in {disk}: No space left on device:"
            " free some space, or keep fewer states"
        )
        scratch_memory(disk, 500_000)[:] = bytes(500_000)
