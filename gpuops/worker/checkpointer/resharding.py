"""Loads tensors that were saved in other parts than they are wanted in: torch does the work.

torch's planner of checkpoints says which pieces of which saved parts make up what is wanted; this
reader gives it the pieces out of images that are mapped into memory. What it trusts is checked
before: the parts of a tensor must make up the whole, each place once.
"""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gpuops.checkpoint.image import PlacedTensor, TensorSpec
from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer.tensors import DTYPES
from gpuops.worker.checkpointer.views import view_of

Piece = tuple[memoryview, PlacedTensor]


class ImageReader(StorageReader):
    """A reader for ``torch.distributed.checkpoint.load`` over the pieces of each tensor."""

    def __init__(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Take the pieces by the names of their tensors; see `distinct`."""
        self._pieces = {
            (name, placed.spec.offsets): (memory, placed)
            for name, parts in pieces.items()
            for memory, placed in parts
        }
        self._metadata = Metadata({name: _metadata(parts) for name, parts in pieces.items()})

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is one checkpoint."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:  # noqa: ANN401 torch's
        """Return what there is."""
        return self._metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,  # noqa: ANN401 torch's
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: all is there."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each piece that *plan* names to where *planner* has it."""
        for item in plan.items:
            offsets = item.storage_index.offset
            assert offsets is not None
            memory, placed = self._pieces[item.storage_index.fqn, tuple(offsets)]
            place = tuple(
                slice(begin, begin + length)
                for begin, length in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(view_of(memory, placed)[place])
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Return False: no path names what this reads."""
        return False


def load_resharded(
    wanted: Mapping[str, torch.Tensor], pieces: Mapping[str, Sequence[Piece]]
) -> None:
    """Fill the tensors of *wanted*, DTensors or not, from the *pieces* of the same names.

    Raises:
        CheckpointError: The pieces of one do not make up the whole, or it is of another shape.
    """
    for name, parts in pieces.items():
        check_whole(name, [placed.spec for _, placed in parts])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(dict(wanted), storage_reader=ImageReader(pieces), planner=planner, no_dist=True)


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


def _metadata(parts: Sequence[Piece]) -> TensorStorageMetadata:
    spec = parts[0][1].spec
    chunks = [
        ChunkStorageMetadata(torch.Size(placed.spec.offsets), torch.Size(placed.spec.shape))
        for _, placed in parts
    ]
    properties = TensorProperties(dtype=DTYPES[spec.dtype])
    return TensorStorageMetadata(properties, torch.Size(spec.global_shape), chunks)
