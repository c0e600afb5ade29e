"""A storage writer for DCP that writes states."""

# ruff: noqa: ARG002, ANN401 the methods and their arguments are torch's

import base64
import dataclasses
import io
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import ImageLayout, TensorSpec, plan_image, write_metadata_blob
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.persist import (
    RetentionPolicy,
    StateOrigin,
    commit_node_shards,
    persist_node_shards,
    prune,
)
from gpuops.checkpoint.types import STEP_MAX, CheckpointError, Shard, StateId
from gpuops.convert.tensors import DTYPE_NAMES, as_storable, needs_carrier, view_of
from gpuops.convert.values import STATE_FORMAT, dumps
from gpuops.errors import UsageError

_LAST_NUMBER = re.compile(r"(\d{1,12})\D*\Z", re.ASCII)
_METADATA_STEP_BYTES = 64 * 1024
# Of this process: all that one start of a job saves into a directory has one epoch.
_epochs: dict[str, int] = {}
_spare: list[SharedBuffer] = []


@dataclasses.dataclass(frozen=True, slots=True)
class _RankTask:
    """What the coordinator sends each rank with its plan."""

    state: StateId
    shard: Shard
    session: str


class GpuopsWriter(StorageWriter):
    """Writes states into *directory*, a path that all ranks see or a URL.

    *step* is the number of optimizer steps completed; None: the last number in the
    ``checkpoint_id`` of each save (``"step-1200"``). *keep_last*: how many states are kept, all
    where it is None. *job* is the name that the states are recorded under.

    Saving raises:
        UsageError: The step is unknown; or ``use_collectives=False``.
        CheckpointError: Something cannot be stored or written. Nothing of the state is stored then.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep_last: int | None = None,
        job: str = "dcp",
    ) -> None:
        super().__init__()
        self._address = os.fspath(directory)
        self._store = open_store(self._address)
        self._step = step
        self._given_step = step
        self._retention = None if keep_last is None else RetentionPolicy(keep_last)
        self._origin = StateOrigin(job, 0)
        self._task: _RankTask | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._task = None
        if self._given_step is None:
            self._step = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False does not write a complete state: leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._step is None or not 0 < self._step <= STEP_MAX:
            raise UsageError(
                f"the step of this state is unknown: GpuopsWriter({self._address!r}, step=n), or "
                "dcp.save(…, checkpoint_id='step-1200')"
            )
        state = StateId(self._epoch(self._step), self._step)
        session = secrets.token_hex(8)
        tasks = [_RankTask(state, Shard(rank, len(plans)), session) for rank in range(len(plans))]
        self._task = tasks[0]
        return [
            dataclasses.replace(plan, storage_data=share)
            for plan, share in zip(plans, tasks, strict=True)
        ]

    def _epoch(self, step: int) -> int:
        """Return an epoch newer than all that existed before this process."""
        address, states = (
            self._store.address,
            [stored.state for stored in self._store.list_states()],
        )
        if address not in _epochs:
            self._store.sweep()
            _epochs[address] = max((state.epoch for state in states), default=-1) + 1
        if any(state.epoch == _epochs[address] and state.step >= step for state in states):
            _epochs[address] += 1
        return _epochs[address]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        task: _RankTask = plan.storage_data
        paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        tensors = {}
        values = {}
        for item in plan.items:
            name = item.index.fqn
            if name in tensors or name in values:
                raise CheckpointError(
                    f"rank {task.shard.rank} has several parts of {name!r:.200}, which an image "
                    "cannot hold; save it with one local part for each rank (DTensor)"
                )
            if item.type is WriteItemType.BYTE_IO:
                values[name] = _bytes_of(planner.resolve_data(item))
            else:
                tensors[name] = item
        metadata_blob = _encode_metadata(
            task, values, {name: paths[name] for name in paths.keys() & {*tensors, *values}}
        )
        # So that the next save, whose values have more digits, reuses the memory.
        metadata_capacity_bytes = (
            -(-2 * len(metadata_blob) // _METADATA_STEP_BYTES) * _METADATA_STEP_BYTES
        )
        layout = plan_image(
            task.shard, [_spec(item) for item in tensors.values()], metadata_capacity_bytes
        )
        memory = _take_spare(layout.nbytes)
        try:
            _write_image(memory.view, layout, tensors, planner, metadata_blob)
            image = memory.view[: layout.nbytes]
            shards = {task.shard: (memory.fd, compute_digest(image))}
            persist_node_shards(self._store, task.state, shards, session=task.session)
        finally:
            _return_spare(memory)
        results = [WriteResult(item.index, _nbytes_of(item), task) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        task = self._task
        assert task is not None
        is_complete = commit_node_shards(
            self._store,
            task.state,
            task.shard.world,
            session=task.session,
            origin=self._origin,
        )
        if not is_complete:
            raise CheckpointError(
                f"not all {task.shard.world} parts of {task.state} are in {self._store.address}: "
                "do all ranks see this directory?"
            )
        if self._retention is not None:
            prune(self._store, self._retention, [task.state])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None


def step_of(checkpoint_id: str | os.PathLike[str]) -> int | None:
    """Return the last number in the name of *checkpoint_id*, such as ``"step-1200"``."""
    found = _LAST_NUMBER.search(Path(checkpoint_id).name)
    return int(found[1]) if found else None


def _bytes_of(data: torch.Tensor | io.BytesIO) -> bytes:
    assert isinstance(data, io.BytesIO)
    return data.getvalue()


def _nbytes_of(item: WriteItem) -> int:
    return 0 if item.tensor_data is None else item.tensor_storage_size() or 0


def _encode_metadata(
    task: _RankTask, values: Mapping[str, bytes], paths: Mapping[str, Sequence[object]]
) -> bytes:
    return dumps(
        {
            "format": STATE_FORMAT,
            "step": task.state.step,
            "rank": task.shard.rank,
            "world": task.shard.world,
            "torch": str(torch.__version__),
            "parts": {},
            "dcp": {
                "values": {name: base64.b64encode(data).decode() for name, data in values.items()},
                "paths": {name: list(path) for name, path in paths.items()},
            },
        }
    )


def _spec(item: WriteItem) -> TensorSpec:
    data = item.tensor_data
    assert data is not None
    name, dtype = item.index.fqn, data.properties.dtype
    if dtype not in DTYPE_NAMES:
        how = "view it as float64 (torch.view_as_real)" if needs_carrier(dtype) else "convert it"
        raise CheckpointError(f"{name!r:.200} has the unsupported dtype {dtype}: {how}")
    shape = tuple(data.chunk.sizes)
    nbytes = prod(shape) * dtype.itemsize
    return TensorSpec(
        name, DTYPE_NAMES[dtype], shape, nbytes, tuple(data.chunk.offsets), tuple(data.size)
    )


def _write_image(
    view: memoryview,
    layout: ImageLayout,
    tensors: Mapping[str, WriteItem],
    planner: SavePlanner,
    metadata_blob: bytes,
) -> None:
    view[: len(layout.header)] = layout.header
    write_metadata_blob(view, layout, metadata_blob)
    for placed in layout.tensors:
        data = planner.resolve_data(tensors[placed.spec.name])
        assert isinstance(data, torch.Tensor)
        target = view_of(view, placed)
        if tuple(data.shape) != placed.spec.shape:
            raise CheckpointError(
                f"{placed.spec.name!r:.200} is planned as {list(placed.spec.shape)} and has the "
                f"shape {list(data.shape)}"
            )
        target.copy_(as_storable(data.detach()))


def _take_spare(nbytes: int) -> SharedBuffer:
    """Return memory of that size: the memory of the last save, where it fits."""
    while _spare:
        memory = _spare.pop()
        if memory.nbytes == nbytes:
            return memory
        memory.close()
    memory = SharedBuffer.create("gpuops-dcp", nbytes)
    memory.populate()
    return memory


def _return_spare(memory: SharedBuffer) -> None:
    if _spare:
        memory.close()
    else:
        _spare.append(memory)
