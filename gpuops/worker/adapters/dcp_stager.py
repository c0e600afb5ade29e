"""A stager for ``dcp.async_save`` that reuses its memory."""

# ruff: noqa: ANN401 a state dict has values of any type

import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CheckpointError
from gpuops.worker.staging import pinned_buffer
from gpuops.worker.staging.device_copy import copy_and_wait
from gpuops.worker.staging.pinned_buffer import PinnedBuffer

_ALIGN_BYTES = 64
_POLL_S = 0.002
WAIT_S = 120.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _StagingBuffer:
    memory: SharedBuffer
    pinned: PinnedBuffer | None = None
    in_use: "weakref.ref[memoryview] | None" = None

    @property
    def is_free(self) -> bool:
        return self.in_use is None or self.in_use() is None

    def close(self) -> None:
        if self.pinned is not None:
            self.pinned.release()
        self.memory.close()


class GpuopsStager(AsyncStager):
    """Stages states into *slots* reused buffers of shared memory, in turn.

    A buffer is used again once nothing refers to the state staged in it, so that a running upload
    is never overwritten. Where all are in use, `stage` waits, *wait_s* at most; ``n_waits`` counts
    that, ``n_created`` the allocated buffers. Keep one stager for the whole job: the first saves
    allocate the memory.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        *,
        slots: int = 2,
        wait_s: float = WAIT_S,
        clock_s: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if slots < 1:
            raise CheckpointError(f"slots={slots}: at least one is needed")
        self._n_slots = slots
        self._wait_s = wait_s
        self._clock_s = clock_s
        self._wait = wait
        self._slots: list[_StagingBuffer] = []
        self.n_waits = 0
        self.n_created = 0

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of *state_dict* on the host, which does not change any more.

        Raises:
            CheckpointError: There is no memory for a buffer; the message has the figures.
        """
        tensors = {id(tensor): tensor for tensor in _tensors_in(state_dict)}
        sources = {key: _local(tensor) for key, tensor in tensors.items()}
        offsets: dict[int, int] = {}
        end = 0
        for key, source in sources.items():
            offsets[key] = end
            end += -(-source.numel() * source.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
        slot = self._take(max(end, 1))
        device = pinned_buffer.first_cuda_device(list(sources.values()))
        if device is not None and slot.pinned is None:
            slot.pinned = PinnedBuffer(slot.memory, device, _log.warning)
        view = memoryview(slot.memory.view)
        slot.in_use = weakref.ref(view)
        whole = torch.frombuffer(view, dtype=torch.uint8)
        staged = {key: _cut(whole, offsets[key], source) for key, source in sources.items()}
        copy_and_wait([staged[key] for key in sources], list(sources.values()), device)
        made = {key: _rewrap(tensors[key], local) for key, local in staged.items()}
        copied: dict[str, Any] = _rebuilt(state_dict, made)
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: the result of `stage` is complete."""

    def close(self) -> None:
        """Release the memory; buffers in use are released by their last user."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _take(self, nbytes: int) -> _StagingBuffer:
        slot = self._free_slot(nbytes)
        if slot is None:
            self.n_waits += 1
            end_s = self._clock_s() + self._wait_s
            while (slot := self._free_slot(nbytes)) is None:
                if self._clock_s() > end_s:
                    _log.warning(
                        "%d staging buffers are in use since %g s: does an upload hang, or does "
                        "something keep a staged state? One more buffer is allocated",
                        self._n_slots,
                        self._wait_s,
                    )
                    self._n_slots += 1
                    continue
                self._wait(_POLL_S)
        return slot

    def _free_slot(self, nbytes: int) -> _StagingBuffer | None:
        free = [slot for slot in self._slots if slot.is_free]
        fitting = [slot for slot in free if slot.memory.nbytes >= nbytes]
        if fitting:
            return min(fitting, key=lambda slot: slot.memory.nbytes)
        for slot in free:  # too small now
            slot.close()
            self._slots.remove(slot)
        if len(self._slots) >= self._n_slots:
            return None
        memory = SharedBuffer.create("gpuops-stage", nbytes)
        memory.populate()
        self.n_created += 1
        slot = _StagingBuffer(memory)
        self._slots.append(slot)
        return slot


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in *value* with plain memory to copy."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        if type(local).__name__ in {"Tensor", "Parameter", "AsyncCollectiveTensor"} and (
            local.layout is torch.strided and not local.is_quantized and not local.is_meta
        ):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _cut(whole: torch.Tensor, offset: int, source: torch.Tensor) -> torch.Tensor:
    nbytes = source.numel() * source.element_size()
    if nbytes == 0:
        return torch.empty(source.shape, dtype=source.dtype)
    return whole[offset : offset + nbytes].view(source.dtype).view(source.shape)


def _rewrap(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return *local* in place of *tensor*, with its sharding, also where that is on a device."""
    if not isinstance(tensor, DTensor):
        return local
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names} | {"_local_tensor": local}
    made: torch.Tensor = DTensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def _rebuilt(value: Any, made: Mapping[int, torch.Tensor]) -> Any:
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, torch.Tensor):  # without plain memory
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _rebuilt(item, made) for key, item in value.items()}
    if type(value) is list:
        return [_rebuilt(item, made) for item in value]
    if type(value) is tuple:
        return tuple(_rebuilt(item, made) for item in value)
    return copy.deepcopy(value)
