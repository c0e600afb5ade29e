"""States of sharded tensors load into other worlds and placements, or say what is missing.

The ranks take turns in this process, over torch's fake process group: placements are real, and
nothing needs to be sent.
"""

import contextlib
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_keeper import InProcessNode
from support.placed import as_rank, sharded
from torch.distributed.tensor import DTensor, Replicate, Shard

from gpuops.checkpoint.image import TensorSpec
from gpuops.checkpoint.types import CheckpointError
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.state.saved_state import check_complete

SHAPES = {"rows": (7, 3), "few": (2, 5), "flat": (9,), "cube": (4, 6, 2), "none": (0, 3)}


def whole(name, shape, seed):
    generator = torch.Generator().manual_seed(hash((name, seed)) % 2**31)
    return torch.randn(shape, generator=generator)


class Holder(torch.nn.Module):
    """Parameters of all shapes, with the state of an optimizer that has stepped, or has not."""

    def __init__(self, mesh_shape, placements, seed):
        super().__init__()
        self.mesh_shape, self.placements = mesh_shape, placements
        for name, shape in SHAPES.items():
            value = sharded(whole(name, shape, seed), mesh_shape, placements)
            self.register_parameter(name, torch.nn.Parameter(value))
        self.register_buffer("plain", torch.full((2,), float(seed)))

    def stepped(self, seed):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        for index, parameter in enumerate(self.parameters()):
            full = whole(f"state {index}", tuple(parameter.shape), seed)
            moment = sharded(full, self.mesh_shape, self.placements)
            optimizer.state[parameter] = {
                "step": torch.tensor(float(seed)),
                "exp_avg": moment,
                "exp_avg_sq": sharded(-full, self.mesh_shape, self.placements),
            }
        return optimizer


def save(node, rank, world, mesh_shape, placements):
    model = Holder(mesh_shape, placements, seed=3)
    keeper = node.connect(rank=rank, world=world, local_rank=rank, local_world=world)
    return Checkpointer(
        model=model, optimizer=model.stepped(3), every=1, extra={"tokens": 5}, keeper=keeper
    )


def saved(world, mesh_shape, placements):
    """Return a node that holds step 2 of a world in those placements."""
    node = InProcessNode()
    checkpointers = []
    for rank in range(world):
        with as_rank(rank, world):
            checkpointers.append(save(node, rank, world, mesh_shape, placements))
            assert checkpointers[-1].restore() == 0
            checkpointers[-1].step(1)
    for rank, checkpointer in enumerate(checkpointers):
        with as_rank(rank, world):
            checkpointer.step(2)
            assert checkpointer.stats["off"] is None, checkpointer.stats
    return node


PLACEMENTS = {
    "plain": (1, (1,), None),
    "ddp": (2, (2,), None),
    "rows4": (4, (4,), [Shard(0)]),
    "rows3": (3, (3,), [Shard(0)]),
    "columns3": (3, (3,), [Shard(1)]),
    "grid": (4, (2, 2), [Shard(0), Shard(1)]),
    "twice": (4, (2, 2), [Shard(0), Shard(0)]),
    "copies": (4, (2, 2), [Replicate(), Shard(0)]),
    "replicated": (2, (2,), [Replicate()]),
}


@pytest.fixture(scope="module", params=sorted(PLACEMENTS))
def source(request):
    with contextlib.closing(saved(*PLACEMENTS[request.param])) as node:
        yield request.param, node


@pytest.mark.parametrize("target", sorted(PLACEMENTS))
def test_every_world_loads_every_other(source, target):
    _, node = source
    world, mesh_shape, placements = PLACEMENTS[target]
    for rank in range(world):
        with as_rank(rank, world):
            model = Holder(mesh_shape, placements, seed=8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
            keeper = node.connect(rank=rank, world=world, local_rank=rank, local_world=world)
            extra = {"tokens": 0}
            with Checkpointer(
                model=model, optimizer=optimizer, every=1, keeper=keeper, extra=extra
            ) as checkpointer:
                assert checkpointer.restore() == 2
            expected = Holder(mesh_shape, placements, seed=3)
            stepped = expected.stepped(3)
            assert_equal(model, optimizer, expected, stepped)
            assert extra == {"tokens": 5}


def assert_equal(model, optimizer, expected, stepped):
    for (name, a), (_, b) in zip(
        model.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert type(a) is type(b)
        assert torch.equal(local(a), local(b)), name
    assert optimizer.param_groups[0]["lr"] == 0.1
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        left, right = optimizer.state[a], stepped.state[b]
        assert left.keys() == right.keys()
        for key in left:
            assert type(left[key]) is type(right[key]), key
            assert torch.equal(local(left[key]), local(right[key])), key


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_the_random_states_of_another_world_are_seeded_anew_and_the_same_each_time():
    seen = []
    with contextlib.closing(saved(*PLACEMENTS["rows4"])) as node:
        for rank, _again in product(range(3), range(2)):
            with as_rank(rank, 3):
                model = Holder((3,), [Shard(0)], seed=8)
                keeper = node.connect(rank=rank, world=3, local_rank=rank, local_world=3)
                given = {"model": model, "every": 1, "keeper": keeper}
                with Checkpointer(**given) as checkpointer:
                    checkpointer.restore()
                seen.append(torch.rand(1).item())

    assert seen[0::2] == seen[1::2]
    assert len(set(seen)) == 3


def spec(offset, size, total, *, dim=0, other=3):
    shape, offsets, whole_shape = [size, other], [offset, 0], [total, other]
    if dim:
        shape, offsets, whole_shape = shape[::-1], offsets[::-1], whole_shape[::-1]
    return TensorSpec(
        "x", "F32", tuple(shape), 4 * size * other, tuple(offsets), tuple(whole_shape)
    )


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ([spec(0, 4, 8)], "missing"),
        ([spec(4, 4, 8)], "missing"),
        ([spec(0, 4, 8), spec(2, 4, 8)], "overlap"),
        ([spec(0, 4, 8), spec(4, 4, 9)], "different"),
        ([spec(0, 8, 8), spec(0, 8, 8)], "overlap"),
    ],
)
def test_parts_that_do_not_make_up_the_whole_are_refused(parts, what):
    with pytest.raises(CheckpointError, match=what):
        check_complete("x", parts)


@settings(deadline=None)
@given(st.data())
def test_a_grid_is_complete_and_no_grid_with_a_part_moved_or_dropped_is(data):
    cuts = [
        sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in (6, 5)
    ]
    spans = [list(pairwise(c)) for c in cuts]
    parts = [
        TensorSpec("x", "F32", (b - a, d - c), 4 * (b - a) * (d - c), (a, c), (6, 5))
        for (a, b), (c, d) in product(*spans)
    ]
    check_complete("x", parts)

    index = data.draw(st.integers(0, len(parts) - 1))
    with pytest.raises(CheckpointError):
        check_complete("x", parts[:index] + parts[index + 1 :] or [spec(0, 1, 6)])
    if len(parts) > 1:
        moved = list(parts)
        other = parts[index - 1]
        moved[index] = TensorSpec(
            "x", "F32", other.shape, other.nbytes, other.offsets, other.global_shape
        )
        with pytest.raises(CheckpointError):
            check_complete("x", moved)
