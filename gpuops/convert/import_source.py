"""The source of an import, before its tensors are read: names, shapes, and how to read them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from gpuops.checkpoint.storage.inspection import first_overlap
from gpuops.checkpoint.types import CorruptError

FillTensor = Callable[[torch.Tensor], None]


@dataclass(slots=True)
class ImportSource:
    """A file or directory of another format, open.

    ``tree`` is nested as it was saved, with a tensor on the meta device for each tensor of
    ``fills``, which fills a tensor of the same shape and dtype; keys are `id`s. ``is_flat``: the
    names of ``tree`` are those of the tensors in a state. ``gpuops_metadata`` is what an export of
    gpuops recorded of the state.
    """

    tree: dict[Any, Any] = field(default_factory=dict)
    fills: dict[int, FillTensor] = field(default_factory=dict)
    is_flat: bool = False
    gpuops_metadata: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    def placeholder(
        self, shape: Sequence[int], dtype: torch.dtype, fill: FillTensor
    ) -> torch.Tensor:
        """Return the placeholder in the tree for a tensor that *fill* reads."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.fills[id(tensor)] = fill
        return tensor

    def fill(self, placeholder: torch.Tensor, target: torch.Tensor) -> None:
        """Read the data of *placeholder* into *target*; a tensor with data is copied."""
        fill = self.fills.get(id(placeholder))
        if fill is None:
            target.copy_(placeholder)
        else:
            fill(target)


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A part of a tensor, and the function that reads it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    fill: FillTensor


def combine_fills(name: str, shape: tuple[int, ...], regions: Sequence[TensorRegion]) -> FillTensor:
    """Return a function that reads all *regions* of a tensor of *shape*.

    Raises:
        CorruptError: They do not cover it exactly once.
    """
    distinct = {(box.offsets, box.shape): box for box in regions if prod(box.shape)}
    for box in distinct.values():
        if any(a + n > whole for a, n, whole in zip(box.offsets, box.shape, shape, strict=True)):
            raise CorruptError(f"a part of {name!r:.200} lies outside of its shape {list(shape)}")
    n_there = sum(prod(box.shape) for box in distinct.values())
    if n_there != prod(shape) or first_overlap(list(distinct)) is not None:
        raise CorruptError(
            f"the {len(distinct)} parts of {name!r:.200} do not cover its shape {list(shape)}: "
            "one is missing, or two overlap"
        )

    def fill(target: torch.Tensor) -> None:
        for box in distinct.values():
            where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))
            box.fill(target[where])

    return fill
