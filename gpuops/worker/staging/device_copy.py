"""The copy of a state from a device, for which the host does not wait.

Tensors that only the optimizers change are copied on a separate stream, and the next optimizer step
waits for it on the device; other tensors (buffers, averages) are copied on the computing stream,
before all later work on it. Small tensors are copied on the device first, in turn with its work.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from gpuops.checkpoint.memory.copy_stamp import COPIED, INTACT, write_stamp
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.convert.tensors import is_dtensor
from gpuops.worker.staging.copy_plan import CapturedState, CopyPlan, SharedTensor
from gpuops.worker.staging.pending_copy import PendingCopy, drained_on_error
from gpuops.worker.staging.replica_digest import device_digest, host_digest
from gpuops.worker.staging.small_tensors import SmallTensors
from gpuops.worker.staging.tensor_copy import copy_tensors


class DeviceCopier:
    """Copies states of *plan* from *device*, and then the number of the lease into *stamp*."""

    def __init__(self, plan: CopyPlan, device: torch.device, stamp: SharedBuffer) -> None:
        self._plan = plan
        self._device = device
        self._stamp = stamp
        self._stream: Any = None
        self._small: SmallTensors | None = None
        self._elsewhere: list[int] = []

    def start(
        self,
        image: memoryview,
        views: Sequence[torch.Tensor],
        rows: Sequence[torch.Tensor],
        capture: CapturedState,
        number: int,
        *,
        overlap: bool,
    ) -> PendingCopy:
        """Copy *capture* into *image*, with *views* of its tensors and *rows* of digests."""
        device, tensors = self._device, capture.tensors
        elsewhere = [i for i, tensor in enumerate(tensors) if tensor.device != device]
        if self._small is None or elsewhere != self._elsewhere:
            self._elsewhere, self._small = elsewhere, SmallTensors(self._plan, tensors, device)
        small = self._small
        handled = {*elsewhere, *small.places}
        optimizer_owned = [i for i in self._plan.optimizer_owned if i not in handled]
        others = [i for i in self._plan.others if i not in handled]
        if not overlap:
            optimizer_owned, others = [], [*optimizer_owned, *others]
        digests = list(zip(rows, capture.digested, strict=True))
        beside = [pair for pair in digests if overlap and pair[1].is_fenced]
        in_turn = [pair for pair in digests if not (overlap and pair[1].is_fenced)]
        with torch.cuda.device(device):
            computing = torch.cuda.current_stream()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            with drained_on_error(self._stream, computing):
                small.gather(tensors)
                self._stream.wait_stream(computing)
                with torch.cuda.stream(self._stream):
                    small.transfer(image)
                    _digest(beside, device)
                    copy_tensors(
                        _select(views, optimizer_owned),
                        _select(tensors, optimizer_owned),
                        non_blocking=True,
                    )
                _digest(in_turn, device)
                copy_tensors(_select(views, others), _select(tensors, others), non_blocking=True)
                # On the host, or on another device of this process: synchronously.
                copy_tensors(_select(views, elsewhere), _select(tensors, elsewhere))
                self._stream.wait_stream(computing)
                with torch.cuda.stream(self._stream):
                    self._write_stamp(number)
                done = torch.cuda.Event()
                done.record(self._stream)
        sources = [_source(capture, i) for i in optimizer_owned]
        sources += [_aliases(e.name, e.part, e.given) for _, e in beside if e.part.device == device]
        kept = [*(tensors[i].detach() for i in others), *(e.part.detach() for _, e in in_turn)]
        mark_intact = partial(write_stamp, self._stamp, INTACT, number)
        if not overlap:
            mark_intact()
        return PendingCopy(done, device, sources, kept, mark_intact)

    def _write_stamp(self, number: int) -> None:
        words = torch.frombuffer(self._stamp.view, dtype=torch.int64).unbind()
        value = torch.full((), number, dtype=torch.int64, device=self._device)
        copy_tensors([words[COPIED]], [value], non_blocking=True)


def copy_and_wait(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], device: torch.device | None
) -> None:
    """Copy each of *sources*; wait for those that are on *device*, and for nothing else on it."""
    if device is None:
        copy_tensors(targets, sources)
        return
    here = [i for i, source in enumerate(sources) if source.device == device]
    elsewhere = [i for i, source in enumerate(sources) if source.device != device]
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        with drained_on_error(stream):
            copy_tensors(_select(targets, here), _select(sources, here), non_blocking=True)
            copy_tensors(_select(targets, elsewhere), _select(sources, elsewhere))
            stream.synchronize()


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
    copy_tensors(targets, digests, non_blocking=True)


def _select(tensors: Sequence[torch.Tensor], indexes: Sequence[int]) -> list[torch.Tensor]:
    return [tensors[index] for index in indexes]
