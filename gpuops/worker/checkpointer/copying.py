"""Copies a capture into a slot: at once on the host, beside the computation on a device.

On the host the copy is done when `SlotCopier.start` returns. On a device, what only the optimizers
change is copied on a stream of its own, and the next optimizer step is made to wait for it on the
device; what anything may change (buffers, averages) is copied on the computing stream, so that
whatever comes later on it comes after the copy. The host waits for neither.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.image import write_extra
from gpuops.worker.checkpointer.capture import Capture, CopyPlan
from gpuops.worker.checkpointer.views import views_of

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of this process


@dataclass(slots=True)
class Flight:
    """A copy that a device may still be making; ``sources`` are kept alive for it."""

    event: Any
    device: torch.device | None
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
            torch.cuda.current_stream(self.device).wait_event(self.event)


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
    def start(self, slot: int, capture: Capture, *, overlap: bool = False) -> Flight:
        """Copy *capture* into *slot*, header and all; return what tells when it is complete.

        *overlap*: `Flight.fence` will be called before anybody changes what the optimizers own.
        """
        memory = self._slots[slot].view
        layout = self.plan.layout
        views = self._prepared(slot)
        memory[: len(layout.header)] = layout.header
        write_extra(memory, layout, capture.extra)
        device = self.plan.device
        if device is None:
            _copy(views, capture.tensors)
            return Flight(None, None, ())
        return self._start_on(device, views, capture, overlap=overlap)

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
                self._pins.append(_Pin(memory, self.plan.device, self._warn))
            views = self._views[slot] = views_of(memory.view, self.plan.layout, self.plan.names)
        return views

    def _start_on(
        self,
        device: torch.device,
        views: Sequence[torch.Tensor],
        capture: Capture,
        *,
        overlap: bool,
    ) -> Flight:
        tensors = capture.tensors
        fenced = [i for i in self.plan.fenced if tensors[i].device == device]
        free = [i for i in self.plan.free if tensors[i].device == device]
        rest = [i for i, tensor in enumerate(tensors) if tensor.device != device]
        if not overlap:
            fenced, free = [], [*fenced, *free]
        with torch.cuda.device(device):
            computing = torch.cuda.current_stream()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(computing)
            with torch.cuda.stream(self._stream):
                _copy(_at(views, fenced), _at(tensors, fenced), non_blocking=True)
            _copy(_at(views, free), _at(tensors, free), non_blocking=True)
            self._stream.wait_stream(computing)
            done = torch.cuda.Event()
            done.record(self._stream)
        # On the host, or on another device of this process: at once.
        _copy(_at(views, rest), _at(tensors, rest))
        return Flight(done, device, [tensors[i] for i in (*fenced, *free)])


class _Pin:
    """Memory registered with CUDA, so that a device copies into it by itself."""

    def __init__(
        self, memory: SlotMemory, device: torch.device, warn: Callable[[str], None]
    ) -> None:
        self._address = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(device):
            code = int(runtime.cudaHostRegister(self._address, memory.nbytes, _PORTABLE))
        self._is_pinned = code == 0
        if not self._is_pinned:
            _forget_error(device)
            warn(
                f"the {memory.nbytes} bytes of a slot cannot be pinned (cudaHostRegister returned "
                f"{code}; is `ulimit -l` too small?): copies from the device take longer and block"
            )

    def release(self) -> None:
        """Undo the registration."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_pinned = False


def _forget_error(device: torch.device) -> None:
    """Have CUDA forget the error that it returned: the next kernel launch would raise it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def _at(tensors: Sequence[torch.Tensor], indexes: Sequence[int]) -> list[torch.Tensor]:
    return [tensors[index] for index in indexes]


def _copy(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool = False,
) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)
