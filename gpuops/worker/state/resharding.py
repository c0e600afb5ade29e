"""Loads tensors that were saved in other parts than they are wanted in: torch does the work.

torch's planner of checkpoints says which pieces of which saved parts make up what is wanted; this
reader gives it the pieces out of images that are mapped into memory. What it trusts is checked
before: the parts of a tensor must make up the whole, each place once.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
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

from gpuops.convert.tensors import DTYPES, view_of
from gpuops.worker.state.saved_state import SavedPiece, check_complete


class ShardImageReader(StorageReader):
    """A reader for ``torch.distributed.checkpoint.load`` over the pieces of each tensor."""

    def __init__(self, pieces: Mapping[str, Sequence[SavedPiece]]) -> None:
        """Take the pieces by the names of their tensors; see `pieces.distinct`."""
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
    targets: Mapping[str, torch.Tensor], pieces: Mapping[str, Sequence[SavedPiece]]
) -> None:
    """Fill the tensors of *targets*, DTensors or not, from the *pieces* of the same names.

    Raises:
        CheckpointError: The pieces of one do not make up the whole, or it is of another shape.
    """
    for name, parts in pieces.items():
        check_complete(name, [placed.spec for _, placed in parts])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load(dict(targets), storage_reader=ShardImageReader(pieces), planner=planner, no_dist=True)


def _metadata(parts: Sequence[SavedPiece]) -> TensorStorageMetadata:
    spec = parts[0][1].spec
    chunks = [
        ChunkStorageMetadata(torch.Size(placed.spec.offsets), torch.Size(placed.spec.shape))
        for _, placed in parts
    ]
    properties = TensorProperties(dtype=DTYPES[spec.dtype])
    return TensorStorageMetadata(properties, torch.Size(spec.global_shape), chunks)
