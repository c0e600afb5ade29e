"""The parts of a tensor that the ranks saved: each once, and together the whole."""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from math import prod

from gpuops.checkpoint.image import PlacedTensor, TensorSpec
from gpuops.checkpoint.states import CheckpointError

Piece = tuple[memoryview, PlacedTensor]


def distinct(parts: Iterable[Piece]) -> list[Piece]:
    """Return each part once, the first that is given of several: replicas say the same.

    Empty parts are left out.
    """
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Piece] = {}
    for memory, placed in parts:
        if placed.begin != placed.end:
            found.setdefault((placed.spec.offsets, placed.spec.shape), (memory, placed))
    return list(found.values())


def check_whole(name: str, parts: Sequence[TensorSpec]) -> None:
    """Say nothing where *parts* make up the whole tensor, each place of it once.

    torch's reader takes what it is told: a part that is missing would leave old values.

    Raises:
        CheckpointError: A part is missing, two overlap, or they tell of different tensors.
    """
    kinds = {(part.global_shape, part.dtype) for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(f"the ranks saved different tensors as {name}: {sorted(kinds)}")
    whole = prod(parts[0].global_shape) if parts else 0
    volume = sum(prod(part.shape) for part in parts)
    if volume != whole:
        raise CheckpointError(
            f"the saved parts of {name} have {volume} of its {whole} items: a rank's part is "
            "missing, or two overlap"
        )
    dims = [
        dim
        for dim, size in enumerate(parts[0].global_shape if parts else ())
        if any(part.shape[dim] != size for part in parts)
    ]
    if len(dims) == 1:
        spans = sorted((part.offsets[dims[0]], part.shape[dims[0]]) for part in parts)
        overlap = any(a[0] + a[1] > b[0] for a, b in pairwise(spans))
    else:
        overlap = any(_overlap(a, b, dims) for a, b in combinations(parts, 2))
    if overlap:
        raise CheckpointError(f"two saved parts of {name} overlap: they were not saved together")


def _overlap(a: TensorSpec, b: TensorSpec, dims: Sequence[int]) -> bool:
    return all(
        a.offsets[dim] < b.offsets[dim] + b.shape[dim]
        and b.offsets[dim] < a.offsets[dim] + a.shape[dim]
        for dim in dims
    )
