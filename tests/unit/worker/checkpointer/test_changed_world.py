"""A changed number of ranks reads of a directory what it needs, and verifies that first.

The ranks take turns in this process, over torch's fake process group.
"""

import contextlib
import shutil

import pytest
import torch
from support.in_process_keeper import InProcessNode
from support.placed import as_rank, sharded
from torch import nn
from torch.distributed.tensor import Shard as ByRows

from gpuops.checkpoint.image import TensorSpec, plan_image, read_layout
from gpuops.checkpoint.partial_image import PieceMap
from gpuops.checkpoint.pieces import pieces_file_name
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.types import CheckpointError, Shard, StateId
from gpuops.worker.assemble import StateAssembler
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.ranks import RankContext
from gpuops.worker.restore import restore_adapters
from gpuops.worker.restore_sources import DirectoryStateSource
from gpuops.worker.state.saved_state import overlap_ranges

WORLD, OWN_WORLD = 4, 3
OLD, NEW = 2, 3
SHAPES = {"a": (1201, 1024), "b": (900, 1100), "c": (3, 7), "d": (1600, 700)}
HEADERS_BYTES = 2 * WORLD * 65_536  # of each image the header, and the values at its end


class Counting:
    """A store that counts the bytes that are read of images and of their pieces' hashes."""

    def __init__(self, store):
        self._store, self.read_bytes_total, self.whole_reads = store, 0, 0

    def read_bytes(self, *args):
        data = self._store.read_bytes(*args)
        self.read_bytes_total += len(data)
        return data

    def read_piece_hashes(self, *args):
        data = self._store.read_piece_hashes(*args)
        self.read_bytes_total += len(data)
        return data

    def fetch_shard(self, *args):
        self.whole_reads += 1
        return self._store.fetch_shard(*args)

    def read_chunks(self, *args):
        self.whole_reads += 1
        return self._store.read_chunks(*args)

    def __getattr__(self, name):
        return getattr(self._store, name)


class Model(nn.Module):
    """Parameters by rows, of the numbers that *seed* gives."""

    def __init__(self, world, seed):
        super().__init__()
        for name, shape in SHAPES.items():
            generator = torch.Generator().manual_seed(seed)
            full = torch.randn(shape, generator=generator)
            value = sharded(full, (world,), [ByRows(0)])
            self.register_parameter(name, nn.Parameter(value))

    def nbytes(self):
        return sum(p.to_local().nbytes for p in self.parameters())


@pytest.fixture(scope="module")
def saved_states(tmp_path_factory):
    """A directory with two steps of four ranks; of step n the numbers are of the seed n."""
    folder = tmp_path_factory.mktemp("saved") / "states"
    node = InProcessNode()
    ranks = []
    for rank in range(WORLD):
        with as_rank(rank, WORLD):
            keeper = node.connect(rank=rank, world=WORLD, local_rank=rank, local_world=WORLD)
            model = Model(WORLD, 1)
            ranks.append(
                (
                    model,
                    Checkpointer(
                        model=model, every=1, directory=folder, persist_every=0, keeper=keeper
                    ),
                )
            )
            assert ranks[-1][1].restore() == 0
    for step in (OLD, NEW):
        for rank, (model, ck) in enumerate(ranks):
            with as_rank(rank, WORLD):
                for ours, new in zip(
                    model.parameters(), Model(WORLD, step).parameters(), strict=True
                ):
                    ours.data.copy_(new.data)
                ck.step(step)
                assert ck.stats["off"] is None, ck.stats
    node.close()
    return folder


@pytest.fixture
def states(saved_states, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(saved_states, tmp_path / "states")


def path_of(states, step, rank):
    return states / StateId(0, step).name / Shard(rank, WORLD).file_name


def flip(states, step, rank, tensor):
    """Flip a bit in the middle of a tensor of a shard."""
    path = path_of(states, step, rank)
    data = bytearray(path.read_bytes())
    (placed,) = [p for p in read_layout(bytes(data)).tensors if p.spec.name.endswith(tensor)]
    data[(placed.begin + placed.end) // 2] ^= 1
    path.write_bytes(data)


class WithKeeper:
    """Each rank has a node of its own, whose keeper reads for it."""

    def __init__(self, states):
        self.states, self.store = states, None

    def restore(self, model, rank):
        def open_counting(folder):
            self.store = Counting(open_store(folder))
            return self.store

        with contextlib.closing(InProcessNode(open_store=open_counting)) as node:
            keeper = node.connect(
                rank=rank, world=OWN_WORLD, local_rank=rank, local_world=OWN_WORLD
            )
            with Checkpointer(model=model, every=1, directory=self.states, keeper=keeper) as ck:
                return ck.restore(), ck.stats["restored"]["why"]


class WithoutKeeper:
    """Each rank reads the directory itself."""

    def __init__(self, states):
        self.states, self.store = states, None

    def restore(self, model, rank):
        self.store = Counting(open_store(str(self.states)))
        ranks = RankContext(rank, OWN_WORLD, rank, OWN_WORLD, "")
        parts = StateAssembler(allow_pickle=False, warn=print)
        parts.add_model(model)
        source = DirectoryStateSource(self.store, ranks)
        found = restore_adapters(parts.adapters, source, ranks, allow_pickle=False)
        return found.step, found.why


@pytest.fixture(params=[WithKeeper, WithoutKeeper])
def reader(request, states):
    return request.param(states)


def loads(reader, rank, step):
    """Load as a rank of three; return its model and why newer states were skipped."""
    with as_rank(rank, OWN_WORLD):
        model = Model(OWN_WORLD, 99)
        restored, why = reader.restore(model, rank)
        assert restored == step
        for ours, expected in zip(
            model.parameters(), Model(OWN_WORLD, step).parameters(), strict=True
        ):
            assert torch.equal(ours.to_local(), expected.to_local())
        return model, why


@pytest.mark.parametrize("rank", range(OWN_WORLD))
def test_a_rank_of_three_reads_little_more_than_its_own(reader, rank):
    model, why = loads(reader, rank, NEW)

    assert reader.store.read_bytes_total <= 1.1 * model.nbytes() + HEADERS_BYTES
    assert reader.store.whole_reads == 0
    assert not why


def parts_of(shape, dim, n):
    """Return *n* equal parts of a tensor, cut along *dim*."""
    found = []
    size = -(-shape[dim] // n)
    for begin in range(0, shape[dim], size):
        part, offsets = list(shape), [0, 0]
        part[dim], offsets[dim] = min(size, shape[dim] - begin), begin
        nbytes = 4 * part[0] * part[1]
        found.append(TensorSpec("w", "F32", tuple(part), nbytes, tuple(offsets), shape))
    return found


@pytest.mark.parametrize(
    ("shape", "saved", "loaded", "times_own"),
    [
        ((2000, 8192), (1, 4), (1, 2), 1.01),
        ((2000, 8192), (1, 4), (1, 3), 1.51),
        ((2000, 8192), (1, 2), (1, 4), 2.01),
        ((2000, 8192), (0, 4), (1, 4), 4.01),
        ((200, 2**20), (1, 4), (1, 3), 1.2),  # rows of a part have 1 MiB
    ],
)
def test_of_columns_a_node_reads_each_piece_once_and_a_rank_alone_may_read_more(
    shape, saved, loaded, times_own
):
    images = [
        plan_image(Shard(rank, saved[1]), [part], 200)
        for rank, part in enumerate(parts_of(shape, *saved))
    ]
    of_node = [PieceMap(image.nbytes) for image in images]
    node_bytes = 0
    for part in parts_of(shape, *loaded):
        rank_bytes = 0
        for image, pieces in zip(images, of_node, strict=True):
            ranges = overlap_ranges(image.tensors[0], part)
            rank_bytes += sum(e - b for b, e in PieceMap(image.nbytes).missing(ranges))
            for begin, end in pieces.missing(ranges):
                node_bytes += end - begin
                pieces.mark(begin, end)
        assert part.nbytes <= rank_bytes <= times_own * part.nbytes

    assert node_bytes <= 1.01 * 4 * shape[0] * shape[1]


def test_damage_in_what_a_rank_does_not_need_is_not_read(reader, states):
    flip(states, NEW, rank=3, tensor="a")

    loads(reader, 0, NEW)


def test_where_a_part_is_damaged_the_state_before_serves(reader, states):
    flip(states, NEW, rank=1, tensor="d")

    _, why = loads(reader, 1, OLD)

    assert any(f"step {NEW}" in each and "corrupt in piece" in each for each in why), why
    stored = open_store(str(states)).list_states()
    assert [it.state.step for it in stored if it.is_damaged] == [NEW]


def test_where_all_are_damaged_nothing_is_changed_and_the_error_says_where(reader, states):
    for step in (OLD, NEW):
        flip(states, step, rank=1, tensor="d")

    with as_rank(1, OWN_WORLD):
        model = Model(OWN_WORLD, 99)
        with pytest.raises(CheckpointError, match="corrupt in piece"):
            reader.restore(model, 1)
        for ours, before in zip(model.parameters(), Model(OWN_WORLD, 99).parameters(), strict=True):
            assert torch.equal(ours.to_local(), before.to_local())


@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_without_good_hashes_of_pieces_the_state_is_read_all_the_same(reader, states, damage):
    """As of a directory that an older gpuops wrote."""
    for rank in range(WORLD):
        path = states / StateId(0, NEW).name / pieces_file_name(Shard(rank, WORLD))
        data = bytearray(path.read_bytes())
        path.unlink()
        if damage == "flipped":
            data[40] ^= 1
            path.write_bytes(data)

    _, why = loads(reader, 2, NEW)

    assert not why
