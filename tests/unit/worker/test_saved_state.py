"""A rank's tensors through the images that name others: from memory, and from disk."""

import pytest
import torch

from gpuops.checkpoint.image import TensorSpec, plan_image, write_metadata_blob
from gpuops.checkpoint.partial_image import CompleteImage
from gpuops.checkpoint.sharing import SharedTensors
from gpuops.checkpoint.types import CorruptError, Shard
from gpuops.convert.values import STATE_FORMAT, dumps
from gpuops.worker.state.saved_state import SavedState

pytestmark = pytest.mark.torch
WORLD = 3
SPEC = TensorSpec("w", "F32", (4,), 16, (0,), (4,))


def image(rank, owner):
    """Return the image of *rank*; "w" is in that of *owner*, with the number of that rank."""
    stored = () if rank == owner else (0,)
    shared = SharedTensors(tuple(range(WORLD)), "0" * 16, ("w",), (owner,), stored)
    layout = plan_image(Shard(rank, WORLD), [SPEC], 200, {}, (shared,))
    data = bytearray(layout.nbytes)
    data[: len(layout.header)] = layout.header
    for placed in layout.tensors:
        data[placed.begin : placed.end] = torch.full((4,), float(rank)).numpy().tobytes()
    write_metadata_blob(
        memoryview(data), layout, dumps({"format": STATE_FORMAT, "step": 5, "parts": {}})
    )
    return CompleteImage(memoryview(data))


def load(*owners):
    images = {Shard(rank, WORLD): image(rank, owner) for rank, owner in enumerate(owners)}
    saved = SavedState(images.__getitem__, step=5, world=WORLD, rank=0, own_world=WORLD)
    found = torch.zeros(4)
    saved.request("w", found)
    saved.fetch()
    saved.load(1)
    return found.tolist()


def test_an_image_in_memory_may_name_one_on_disk_that_names_the_rank_that_has_it():
    assert load(0, 0, 0) == [0.0] * 4
    assert load(1, 1, 0) == [1.0] * 4
    assert load(1, 2, 2) == [2.0] * 4


@pytest.mark.parametrize("owners", [(1, 0, 0), (1, 2, 1), (1, 2, 0)])
def test_images_that_name_each_other_and_have_it_not_are_damaged(owners):
    with pytest.raises(CorruptError, match="w is not in the image of rank"):
        load(*owners)
