"""Copies a capture into a slot: at once on the host, beside the computation on a device.

On the host the copy is done when `SlotCopier.start` returns. On a device, what only the optimizers
change is copied on a stream of its own, and the next optimizer step is made to wait for it on the
device; what anything may change (buffers, averages) is copied on the computing stream, so that
whatever comes later on it comes after the copy. The host waits for neither.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.image import write_extra
from gpuops.worker.checkpointer.capture import Capture, CopyPlan
from gpuops.worker.checkpointer.views import views_of

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A copy that a device may still be making; ``sources`` are kept alive for it."""

    event: Any
    sources: Sequence[torch.Tensor]

    def is_done(self) -> bool:
        """Say whether the copy is complete; never waits."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait on the host until the copy is complete."""
        if self.event is not None:
            self.event.synchronize()

    def fence(self) -> None:
        """Make what is put on the current stream from now on come after the copy."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class SlotCopier:
    """The slots of one layout. *warn* is told once where memory cannot be pinned."""

    def __init__(
        self, plan: CopyPlan, slots: Sequence[SlotMemory], warn: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self._slots = tuple(slots)
        self._views: list[tuple[torch.Tensor, ...] | None] = [None] * len(self._slots)
        self._pins: list[_Pin] = []
        self._stream: Any = None
        self._warn = warn

    @torch.no_grad()
    def start(self, slot: int, capture: Capture) -> Flight:
        """Copy *capture* into *slot*, header and all; return what tells when it is complete."""
        memory = self._slots[slot].view
        layout = self.plan.layout
        views = self._prepared(slot)
        if memory[: len(layout.header)] != layout.header:
            memory[: len(layout.header)] = layout.header
        write_extra(memory, layout, capture.extra)
        tensors = capture.tensors
        device = self.plan.device
        if device is None:
            _copy(views, tensors)
            return Flight(None, ())
        return self._start_on(device, views, tensors)

    def close(self) -> None:
        """Let go of the memory; nothing may be in flight."""
        for pin in self._pins:
            pin.release()
        self._pins.clear()
        self._views = [None] * len(self._slots)
        for slot in self._slots:
            slot.close()

    def _prepared(self, slot: int) -> tuple[torch.Tensor, ...]:
        views = self._views[slot]
        if views is None:
            memory = self._slots[slot]
            memory.populate()
            if self.plan.device is not None:
                self._pins.append(_Pin(memory, self._warn))
            views = self._views[slot] = views_of(memory.view, self.plan.layout, self.plan.names)
        return views

    def _start_on(
        self, device: torch.device, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Flight:
        with torch.cuda.device(device):
            computing = torch.cuda.current_stream()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            ready = torch.cuda.Event()
            ready.record(computing)
            fenced = [i for i in self.plan.fenced if tensors[i].is_cuda]
            beside = [i for i in self.plan.free if tensors[i].is_cuda]
            here = [i for i, tensor in enumerate(tensors) if not tensor.is_cuda]
            _copy(_at(views, beside), _at(tensors, beside))
            after_beside = torch.cuda.Event()
            after_beside.record(computing)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                _copy(_at(views, fenced), _at(tensors, fenced))
                self._stream.wait_event(after_beside)
                done = torch.cuda.Event()
                done.record(self._stream)
            _copy(_at(views, here), _at(tensors, here))
        return Flight(done, [tensors[i] for i in (*fenced, *beside)])


class _Pin:
    """Memory registered with CUDA, so that a device copies into it by itself."""

    def __init__(self, memory: SlotMemory, warn: Callable[[str], None]) -> None:
        self._address = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(self._address, memory.nbytes, 0))
        self._is_pinned = code == 0
        if not self._is_pinned:
            runtime.cudaGetLastError() if hasattr(runtime, "cudaGetLastError") else None
            warn(
                f"the {memory.nbytes} bytes of a slot could not be pinned (cudaHostRegister: error "
                f"{code}; is `ulimit -l` too small?); copies from the device will be slower and "
                "block"
            )

    def release(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_pinned = False


def _at(tensors: Sequence[torch.Tensor], indexes: Sequence[int]) -> list[torch.Tensor]:
    return [tensors[index] for index in indexes]


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
