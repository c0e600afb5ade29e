"""A storage reader for DCP over states: it returns only verified bytes."""

# ruff: noqa: ARG002, ANN401 the methods and their arguments are torch's

import base64
import binascii
import io
import os
from collections.abc import Mapping
from contextlib import closing
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from gpuops.checkpoint.image import ImageLayout, PlacedTensor, read_metadata_blob
from gpuops.checkpoint.manifest import Manifest
from gpuops.checkpoint.partial_image import PartialImage
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.api import StoredState
from gpuops.checkpoint.storage.inspection import assemble_tensors, read_layouts
from gpuops.checkpoint.storage.stored_ranges import open_partial
from gpuops.checkpoint.types import CheckpointError, CorruptError, Shard
from gpuops.convert.nested import load_value
from gpuops.convert.tensors import DTYPES, view_of
from gpuops.convert.values import loads
from gpuops.worker.adapters.dcp_writer import step_of
from gpuops.worker.state.saved_state import box_ranges


class GpuopsReader(StorageReader):
    """Reads a state in *directory*, a path or URL: that of *step*, or the newest.

    States of `gpuops.Checkpointer` can be read as well: their tensors, under names such as
    ``model.layer.weight`` (``dcp.load({"model": model.state_dict()}, …)``).

    Loading raises:
        CorruptError: The bytes read are not those that were saved.
        CheckpointError: There is no such state; the ranks see different ones; or a value is of a
            class that torch does not load without running code, and *trust* is false.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int | None = None,
        trust: bool = False,
    ) -> None:
        super().__init__()
        self._store = open_store(os.fspath(directory))
        self._given_step = self._step = step
        self._trust = trust
        self._manifest: Manifest | None = None
        self._images: dict[Shard, PartialImage] = {}
        self._locations: dict[tuple[str, tuple[int, ...]], tuple[Shard, PlacedTensor]] = {}
        self._values: dict[str, bytes] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._close()
        if self._given_step is None and checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self, *args: Any) -> Metadata:
        self._close()
        self._manifest = manifest = self._select_state().manifest
        layouts = read_layouts(self._store, manifest)
        found: dict[str, Any] = {}
        for name, tensor in assemble_tensors(layouts).items():
            chunks = []
            for part in tensor.parts:
                offsets, shape = part.region
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)))
                self._locations[name, offsets] = part.shard, part.placed
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        paths: dict[str, tuple[str | int, ...]] = {}
        for layout in layouts:
            with closing(self._open(layout.shard)) as image:
                values, known = _read_values(image, layout)
            self._values.update({name: values[name] for name in values.keys() - found.keys()})
            paths.update(known)
        found.update({name: BytesStorageMetadata() for name in self._values})
        return Metadata(state_dict_metadata=found, planner_data=paths, storage_data={})

    def _select_state(self) -> StoredState:
        states = self._store.list_states()
        for stored in states:
            if self._step is None or stored.state.step == self._step:
                return stored
        steps = ", ".join(str(stored.state.step) for stored in states[:5]) or "none"
        description = "no state" if self._step is None else f"no state of step {self._step}"
        raise CheckpointError(
            f"there is {description} in {self._store.address}; the newest are {steps}"
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: everything is set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._manifest is not None
        manifest = self._manifest
        plan.storage_data = (manifest.state, tuple(each.digest.root for each in manifest.shards))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = {plan.storage_data for plan in plans}
        if len(seen) > 1:
            states = ", ".join(sorted(str(state) for state, _ in seen))
            raise CheckpointError(
                f"the ranks see different states in {self._store.address} ({states}): one was just "
                "saved or removed; load again, or give step="
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
            else:
                self._read_tensor(item, planner)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _value(self, name: str) -> io.BytesIO:
        """Return a value for DCP's planner, which unpickles it: it was pickled by this process."""
        stream = io.BytesIO()
        torch.save(load_value(self._values[name], name, trust=self._trust), stream)
        stream.seek(0)
        return stream

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        offsets = item.storage_index.offset
        assert offsets is not None
        shard, placed = self._locations[item.storage_index.fqn, tuple(offsets)]
        begins = item.storage_offsets
        ends = [begin + length for begin, length in zip(begins, item.lengths, strict=True)]
        target = planner.resolve_tensor(item).detach()
        if prod(item.lengths):
            image = self._images.get(shard) or self._images.setdefault(shard, self._open(shard))
            image.ensure(box_ranges(placed, begins, ends))
            target.copy_(view_of(image.view, placed)[tuple(map(slice, begins, ends))])
        planner.commit_tensor(item, target)

    def _open(self, shard: Shard) -> PartialImage:
        """Return the image of *shard*; what is needed of it is read and verified."""
        assert self._manifest is not None
        return open_partial(self._store, self._manifest.state, self._manifest.record(shard))

    def _close(self) -> None:
        for image in self._images.values():
            image.close()
        self._images.clear()
        self._locations.clear()
        self._values.clear()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None


def _read_values(
    image: PartialImage, layout: ImageLayout
) -> tuple[Mapping[str, bytes], Mapping[str, tuple[str | int, ...]]]:
    """Return the values that the writer saved next to the tensors, and the paths of names."""
    image.ensure([(layout.metadata_blob.begin, layout.metadata_blob.end)])
    where = f"the metadata of {image.name}"
    extra = loads(read_metadata_blob(image.view, layout) or b"{}", where)
    saved = extra.get("dcp") if isinstance(extra, dict) else None
    if saved is None:
        return {}, {}
    try:
        values = {
            name: base64.b64decode(text, validate=True) for name, text in saved["values"].items()
        }
        return values, {name: tuple(path) for name, path in saved["paths"].items()}
    except (KeyError, TypeError, AttributeError, binascii.Error) as exc:
        raise CorruptError(f"{where} cannot be read: {exc!r:.200}") from exc
