"""Sharded tensors without processes: the ranks take turns over torch's fake process group."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import (
    _clear_fast_path_sharding_prop_cache,
    _clear_sharding_prop_cache,
)
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def as_rank(rank, world):
    """Be one rank of so many."""
    _clear_sharding_prop_cache()  # it remembers the mesh of the rank that we were before
    _clear_fast_path_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def place_of(tensor):
    chunk = create_default_local_save_plan({"x": tensor}, False).items[0].tensor_data.chunk
    ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return tuple(slice(a, b) for a, b in zip(chunk.offsets, ends, strict=True))


def sharded(full, mesh_shape, placements):
    """Return *full* as this rank has it under *placements*, all numbers in place."""
    if placements is None:
        return full.clone()
    mesh = init_device_mesh("cpu", mesh_shape)
    dims = [
        Shard(p.dim) if isinstance(p, Shard) and p.dim < full.dim() else Replicate()
        for p in placements
    ]
    empty = torch.distributed.tensor.empty(*full.shape, device_mesh=mesh, placements=dims)
    local = full[place_of(empty)].clone().contiguous()
    return DTensor.from_local(
        local, mesh, dims, run_check=False, shape=full.shape, stride=full.stride()
    )
