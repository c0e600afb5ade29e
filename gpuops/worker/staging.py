"""One rank's state at one moment, and its copy into a shared buffer.

On the host the copy is done when `SlotCopier.start` returns. On a device, tensors that only the
optimizers change are copied on a separate stream, and the next optimizer step waits for it on the
device; other tensors (buffers, averages) are copied on the computing stream, before all later
work on it. The host waits for neither.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple

import torch

from gpuops.checkpoint.image import (
    ImageLayout,
    image_order,
    plan_image,
    write_digests,
    write_metadata_blob,
)
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.sharing import DIGEST_BYTES, plan_sharing
from gpuops.checkpoint.types import CheckpointError, KeeperError, Shard
from gpuops.convert.tensors import (
    TensorPlacements,
    check_storable,
    is_dtensor,
    local_tensor,
    needs_carrier,
    views_of,
)
from gpuops.convert.values import STATE_FORMAT, StateEncoder, dumps
from gpuops.worker.pending_copy import PendingCopy, drained_on_error
from gpuops.worker.pinned_buffer import PinnedBuffer, map_in_background, place_near
from gpuops.worker.replica_digest import device_digest, host_digest
from gpuops.worker.state.adapter import AdapterSnapshot, StateAdapter
from gpuops.worker.state.expected import expected_state, read_ahead
from gpuops.worker.state.objects import read_rng
from gpuops.worker.state.optimizer import OptimizerAdapter
from gpuops.worker.state.resharding import replicated_by_name

METADATA_STEP_BYTES = 64 * 1024

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The tensors to copy into a slot of *layout*.

    ``tensors`` are this rank's parts of ``given``, in the order of ``plan.names``; those of
    ``plan.optimizer_owned`` are changed by the optimizers alone, unless the script does it.
    ``digested``: tensors that ranks of the node share, in the order of their digests.
    """

    plan: "CopyPlan"
    tensors: Sequence[torch.Tensor]
    metadata_blob: bytes
    given: Sequence[torch.Tensor]
    digested: Sequence["SharedTensor"] = ()


class SharedTensor(NamedTuple):
    """A tensor whose digest is saved: this rank's part of ``given``.

    ``is_fenced``: only the optimizers change it.
    """

    name: str
    part: torch.Tensor
    given: torch.Tensor
    is_fenced: bool


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The layout of an image, and which tensor of a capture goes where in it.

    ``device`` is that of the tensors that are not on the host, None where all are. ``copied`` and
    ``digested`` (with names, and whether the optimizers own them) are places in what the parts of
    the state have.
    """

    layout: ImageLayout
    names: tuple[str, ...]
    device: torch.device | None
    optimizer_owned: tuple[int, ...]
    others: tuple[int, ...]
    copied: tuple[int, ...]
    digested: tuple[tuple[str, int, bool], ...]


class StateCapturer:
    """Reads all parts of a state; plans the image again only where a shape changed.

    *node_ranks* share what they hold alike: each copies a part of it.
    """

    def __init__(
        self,
        adapters: Sequence[StateAdapter],
        shard: Shard,
        *,
        allow_pickle: bool,
        node_ranks: Sequence[int] = (),
    ) -> None:
        self._adapters = tuple(adapters)
        self._shard = shard
        self._node_ranks = node_ranks
        self._allow_pickle = allow_pickle
        self.annotations: Callable[[], Mapping[str, object]] = (
            dict  # plain values for readers of the checkpoint
        )
        self._plan: CopyPlan | None = None
        self._names: list[tuple[str, ...]] = []
        self._shapes: list[object] = []
        self._types: list[type] = []
        self._placements: list[object] = []
        self._dtypes: list[torch.dtype] = []
        self._devices: list[object] = []
        self._needs_local = False

    @torch.no_grad()
    def capture(self, step: int) -> CapturedState:
        """Return the current state; its tensors are not copied yet.

        Raises:
            CheckpointError: Something in it cannot be stored; the message says what.
        """
        return self._capture(step, [part.read() for part in self._adapters])

    @torch.no_grad()
    def plan_ahead(self, step: int) -> CopyPlan:
        """Return the plan for the state that there will be after the first step of optimizers.

        Raises:
            CheckpointError: As `capture`.
        """
        with ExitStack() as stack:
            for part in self._adapters:
                if isinstance(part, OptimizerAdapter):
                    stack.enter_context(expected_state(part.optimizer))
            return self._capture(step, [read_ahead(part) for part in self._adapters]).plan

    def _capture(self, step: int, readings: Sequence[AdapterSnapshot]) -> CapturedState:
        tensors = list(chain.from_iterable(reading.tensors for reading in readings))
        metadata_blob = self._encode_metadata(step, readings)
        if not self._matches_plan(readings, tensors) or not self._fits_metadata(metadata_blob):
            self._make_plan(readings, tensors, len(metadata_blob))
        plan = self._plan
        assert plan is not None
        parts = [local_tensor(tensor) for tensor in tensors] if self._needs_local else tensors
        if not plan.digested:
            return CapturedState(plan, parts, metadata_blob, tensors)
        return CapturedState(
            plan,
            _select(parts, plan.copied),
            metadata_blob,
            _select(tensors, plan.copied),
            [SharedTensor(name, parts[i], tensors[i], fenced) for name, i, fenced in plan.digested],
        )

    def stop_sharing(self) -> bool:
        """Plan images of all tensors from now on; return whether this changes anything."""
        was_sharing = len(self._node_ranks) > 1
        self._node_ranks = ()
        self._plan = None
        return was_sharing

    def _encode_metadata(self, step: int, readings: Sequence[AdapterSnapshot]) -> bytes:
        encoder = StateEncoder(allow_pickle=self._allow_pickle)
        head = {
            "format": STATE_FORMAT,
            "step": step,
            "rank": self._shard.rank,
            "world": self._shard.world,
            "torch": str(torch.__version__),
            "rng": encoder.encoder.encode(read_rng(), "rng"),
            **self.annotations(),
        }
        fragments = b",".join(
            b"%b:%b" % (dumps(part.key), reading.fragment)
            for part, reading in zip(self._adapters, readings, strict=True)
        )
        return b'%b,"parts":{%b}}' % (dumps(head)[:-1], fragments)

    def _fits_metadata(self, metadata_blob: bytes) -> bool:
        return (
            self._plan is not None
            and len(metadata_blob) <= self._plan.layout.metadata_capacity_bytes
        )

    def _matches_plan(
        self, readings: Sequence[AdapterSnapshot], tensors: list[torch.Tensor]
    ) -> bool:
        if self._plan is None or len(self._names) != len(readings):
            return False
        if any(a.names is not b for a, b in zip(readings, self._names, strict=True)):
            return False
        # The compared values are not stored: many thousand new objects would trigger garbage
        # collections of the job's whole memory, again and again.
        return (
            len(tensors) == len(self._shapes)
            and all(map(eq, map(_SHAPE, tensors), self._shapes))
            and all(map(is_, map(_DTYPE, tensors), self._dtypes))
            and all(map(is_, map(type, tensors), self._types))
            and _first_devices(readings) == self._devices
            and (not self._placements or _placements_of(tensors) == self._placements)
        )

    def _make_plan(
        self, readings: Sequence[AdapterSnapshot], tensors: list[torch.Tensor], metadata_bytes: int
    ) -> None:
        names = tuple(name for reading in readings for name in reading.names)
        for name, tensor in zip(names, tensors, strict=True):
            check_storable(tensor, name)
        placements = TensorPlacements()
        specs = [
            placements.spec_of(tensor, local_tensor(tensor), name)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        n_steps = -(-2 * metadata_bytes // METADATA_STEP_BYTES)
        metadata_capacity_bytes = n_steps * METADATA_STEP_BYTES
        replicas_by_name = replicated_by_name(self._adapters, names, tensors, self._shard.rank)
        device = first_cuda_device(tensors)
        shared = plan_sharing(
            self._shard,
            image_order(specs),
            replicas_by_name,
            self._node_ranks,
            {name for name, each in zip(names, tensors, strict=True) if each.device == device},
        )
        layout = plan_image(self._shard, specs, metadata_capacity_bytes, replicas_by_name, shared)
        owned_flags = self._is_optimizer_owned(readings, tensors)
        places = {name: place for place, name in enumerate(names)}
        foreign = layout.owner_by_name
        copied = [place for name, place in places.items() if name not in foreign]
        fenced = [owned_flags[place] for place in copied]
        self._plan = CopyPlan(
            layout,
            tuple(names[place] for place in copied),
            device,
            tuple(i for i, is_fenced in enumerate(fenced) if is_fenced),
            tuple(i for i, is_fenced in enumerate(fenced) if not is_fenced),
            tuple(copied),
            tuple(
                (name, places[name], owned_flags[places[name]])
                for each in shared
                for name in each.stored_names
            ),
        )
        self._names = [reading.names for reading in readings]
        self._shapes = list(map(_SHAPE, tensors))
        self._dtypes = list(map(_DTYPE, tensors))
        self._devices = _first_devices(readings)
        self._types = list(map(type, tensors))
        self._placements = _placements_of(tensors)
        self._needs_local = any(
            is_dtensor(tensor) or needs_carrier(tensor.dtype) for tensor in tensors
        )

    def _is_optimizer_owned(
        self, readings: Sequence[AdapterSnapshot], tensors: list[torch.Tensor]
    ) -> list[bool]:
        owned = {
            id(each)
            for part in self._adapters
            if isinstance(part, OptimizerAdapter)
            for group in part.optimizer.param_groups
            for each in group["params"]
        }
        owned_flags = [id(tensor) in owned for tensor in tensors]
        begin = 0
        for reading in readings:
            n_owned = reading.n_optimizer_owned
            owned_flags[begin : begin + n_owned] = [True] * n_owned
            begin += len(reading.tensors)
        return owned_flags


def first_cuda_device(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the GPU of the first of *tensors* that is on one, None where all are on the host."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def _first_devices(readings: Sequence[AdapterSnapshot]) -> list[object]:
    """Return where the parts are; a part is moved as a whole."""
    return [reading.tensors[0].device if reading.tensors else None for reading in readings]


def _placements_of(tensors: Sequence[torch.Tensor]) -> list[object]:
    return [
        (tensor.placements, tensor.to_local().shape) for tensor in tensors if is_dtensor(tensor)
    ]


class SlotCopier:
    """The slots of one layout. *warn* is called once where memory cannot be pinned."""

    def __init__(
        self, plan: CopyPlan, slots: Sequence[SharedBuffer], warn: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self._slots = tuple(slots)
        self._views: list[tuple[torch.Tensor, ...] | None] = [None] * len(self._slots)
        self._pinned: list[PinnedBuffer] = []
        self._stream: Any = None
        self._warn = warn

    @torch.no_grad()
    def start(self, slot: int, capture: CapturedState, *, overlap: bool = False) -> PendingCopy:
        """Copy *capture* into *slot*, with its header; return an object that tracks completion.

        *overlap*: `PendingCopy.wait_before_step` will be called before the optimizers change their
        tensors.
        """
        memory = self._slots[slot].view
        layout = self.plan.layout
        views = self._prepare(slot)
        memory[: len(layout.header)] = layout.header
        write_metadata_blob(memory, layout, capture.metadata_blob)
        device = self.plan.device
        if device is None:
            _copy(views, capture.tensors)
            write_digests(memory, layout, (host_digest(each.part) for each in capture.digested))
            return PendingCopy()
        rows = self._digest_rows(slot)
        return self._start_on(device, views, rows, capture, overlap=overlap)

    def _digest_rows(self, slot: int) -> Sequence[torch.Tensor]:
        """Return where each digest goes."""
        digests = self.plan.layout.digests
        if digests is None or digests.begin == digests.end:
            return ()
        rows = torch.frombuffer(
            self._slots[slot].view,
            dtype=torch.uint8,
            count=digests.spec.nbytes,
            offset=digests.begin,
        )
        return rows.view(-1, DIGEST_BYTES).unbind()

    def populate(self, n_threads: int | None) -> None:
        """Have all slots allocated, mapped and pinned; None: only mapped, in the background.

        Raises:
            KeeperError: There is not enough memory; the message has the figures.
        """
        place_near(self.plan.device, self._slots)
        if n_threads is None:
            map_in_background(self._slots)
        else:
            for slot in range(len(self._slots)):
                self._prepare(slot, n_threads)

    def close(self) -> None:
        """Release the memory; no copy may be in progress."""
        for pin in self._pinned:
            pin.release()
        self._pinned.clear()
        self._views = [None] * len(self._slots)
        for slot in self._slots:
            slot.close()

    def _prepare(self, slot: int, n_threads: int = 1) -> tuple[torch.Tensor, ...]:
        views = self._views[slot]
        if views is None:
            memory = self._slots[slot]
            try:
                memory.populate(n_threads=n_threads)
            except CheckpointError as exc:
                raise KeeperError(str(exc)) from exc  # more memory may be available later
            if self.plan.device is not None:
                self._pinned.append(PinnedBuffer(memory, self.plan.device, self._warn))
            views = self._views[slot] = views_of(memory.view, self.plan.layout, self.plan.names)
        return views

    def _start_on(
        self,
        device: torch.device,
        views: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        capture: CapturedState,
        *,
        overlap: bool,
    ) -> PendingCopy:
        tensors = capture.tensors
        optimizer_owned = [i for i in self.plan.optimizer_owned if tensors[i].device == device]
        others = [i for i in self.plan.others if tensors[i].device == device]
        elsewhere = [i for i, tensor in enumerate(tensors) if tensor.device != device]
        if not overlap:
            optimizer_owned, others = [], [*optimizer_owned, *others]
        digests = list(zip(rows, capture.digested, strict=True))
        beside = [pair for pair in digests if overlap and pair[1].is_fenced]
        in_turn = [pair for pair in digests if not (overlap and pair[1].is_fenced)]
        with torch.cuda.device(device):
            computing = torch.cuda.current_stream()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(computing)
            with drained_on_error(self._stream, computing):
                with torch.cuda.stream(self._stream):
                    _digest(beside, device)
                    _copy(
                        _select(views, optimizer_owned),
                        _select(tensors, optimizer_owned),
                        non_blocking=True,
                    )
                _digest(in_turn, device)
                _copy(_select(views, others), _select(tensors, others), non_blocking=True)
                self._stream.wait_stream(computing)
                done = torch.cuda.Event()
                done.record(self._stream)
                # On the host, or on another device of this process: synchronously.
                _copy(_select(views, elsewhere), _select(tensors, elsewhere))
        sources = [_source(capture, i) for i in optimizer_owned]
        sources += [_aliases(e.name, e.part, e.given) for _, e in beside if e.part.device == device]
        kept = [*(tensors[i].detach() for i in others), *(e.part.detach() for _, e in in_turn)]
        return PendingCopy(done, device, sources, kept)


def _source(capture: CapturedState, i: int) -> tuple[str, Sequence[torch.Tensor]]:
    """Return a source of `PendingCopy`: tensor *i* of *capture*."""
    return _aliases(capture.plan.names[i], capture.tensors[i], capture.given[i])


def _aliases(
    name: str, part: torch.Tensor, given: torch.Tensor
) -> tuple[str, Sequence[torch.Tensor]]:
    return name, (part.detach(), given) if is_dtensor(given) else (part.detach(),)


def _digest(shared: Sequence[tuple[torch.Tensor, SharedTensor]], device: torch.device) -> None:
    """Write the digest of each tensor to where it goes: on the current stream, or at once."""
    targets, digests = [], []
    for target, each in shared:
        if each.part.device == device:
            targets.append(target)
            digests.append(device_digest(each.part))
        else:
            target.copy_(torch.frombuffer(bytearray(host_digest(each.part)), dtype=torch.uint8))
    _copy(targets, digests, non_blocking=True)


def _select(tensors: Sequence[torch.Tensor], indexes: Sequence[int]) -> list[torch.Tensor]:
    return [tensors[index] for index in indexes]


def _copy(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool = False,
) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)
