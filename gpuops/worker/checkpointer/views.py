"""The tensors of an image as torch sees them: over its memory, nothing copied."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod

import torch

from gpuops.checkpoint.image import ITEMSIZE_BYTES, ImageLayout, PlacedTensor
from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer.tensors import DTYPES


def view_of(memory: memoryview, placed: PlacedTensor) -> torch.Tensor:
    """Return one tensor of the image *memory*; it must not be written where the memory is not."""
    spec = placed.spec
    dtype = _dtype(spec.dtype)
    count = prod(spec.shape)
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=placed.begin)
    return flat.view(spec.shape)


def views_of(
    memory: memoryview, layout: ImageLayout, names: Sequence[str]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of that image called *names*, in that order.

    Many small tensors are cut out of a few long ones, which takes torch a tenth of the time.
    """
    cut: dict[str, torch.Tensor] = {}
    for run in _runs(layout.tensors):
        cut.update(_cut(memory, run))
    return tuple(cut[name] for name in names)


def _runs(tensors: Iterable[PlacedTensor]) -> list[list[PlacedTensor]]:
    """Return the tensors by width: all of one width lie without holes between them."""
    by_width: dict[int, list[PlacedTensor]] = {}
    for placed in tensors:
        by_width.setdefault(ITEMSIZE_BYTES[placed.spec.dtype], []).append(placed)
    return list(by_width.values())


def _cut(memory: memoryview, run: list[PlacedTensor]) -> dict[str, torch.Tensor]:
    width = ITEMSIZE_BYTES[run[0].spec.dtype]
    begin, end = run[0].begin, run[-1].end
    holes = any(a.end != b.begin for a, b in pairwise(run))
    if begin == end or holes:  # the extra may lie between tensors of bytes
        return {placed.spec.name: view_of(memory, placed) for placed in run}
    counts = [(placed.end - placed.begin) // width for placed in run]
    pieces = {}
    for name in {placed.spec.dtype for placed in run}:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            whole = torch.frombuffer(
                memory, dtype=_dtype(name), count=(end - begin) // width, offset=begin
            )
        pieces[name] = whole.split(counts)
    return {
        placed.spec.name: pieces[placed.spec.dtype][index]
        if len(placed.spec.shape) == 1
        else pieces[placed.spec.dtype][index].view(placed.spec.shape)
        for index, placed in enumerate(run)
    }


def _dtype(name: str) -> torch.dtype:
    found = DTYPES.get(name)
    if found is None:
        raise CheckpointError(f"this torch ({torch.__version__}) has no dtype for {name}")
    return found
