"""Memory that a GPU copies into, or out of, by itself."""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from gpuops.checkpoint.memory.numa import numa_node_of, prefer_numa_node
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import CheckpointError

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of this process
_READ_ONLY = 8  # cudaHostRegisterReadOnly: CUDA refuses a read-only mapping without it


class PinnedBuffer:
    """Memory registered with CUDA, so that a device copies into it, or out of it, at full rate.

    Where it cannot be registered, *warn* gets the reason; copies still work, and block.
    """

    def __init__(
        self, memory: SharedBuffer, device: torch.device, warn: Callable[[str], None]
    ) -> None:
        self._address = _address_of(memory.view)
        runtime: Any = torch.cuda.cudart()
        flags = _PORTABLE | (_READ_ONLY if memory.view.readonly else 0)
        with torch.cuda.device(device):
            code = int(runtime.cudaHostRegister(self._address, memory.nbytes, flags))
        self._is_pinned = code == 0
        if not self._is_pinned:
            _clear_cuda_error(device)
            warn(
                f"{memory.nbytes} bytes of memory cannot be pinned (cudaHostRegister returned "
                f"{code}; is `ulimit -l` too small?): the device's copies are slower and block"
            )

    def release(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_pinned = False


def first_cuda_device(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the GPU of the first of *tensors* that is on one, None where all are on the host."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


@contextmanager
def pinned(
    images: Iterable[SharedBuffer], device: torch.device | None, warn: Callable[[str], None]
) -> Iterator[None]:
    """Have *images* pinned meanwhile, for copies to *device* that do not outlast it; None: none."""
    with ExitStack() as stack:
        if device is not None:
            for memory in images:
                stack.callback(PinnedBuffer(memory, device, warn).release)
        yield


def place_near(device: torch.device | None, slots: Sequence[SharedBuffer]) -> None:
    """Have the pages of *slots* taken from the NUMA node of *device*, where that is known."""
    node = None if device is None else numa_node_of(torch.cuda.get_device_properties(device))
    if node is not None:
        for memory in slots:
            prefer_numa_node(memory, node)


def map_in_background(slots: Sequence[SharedBuffer]) -> threading.Thread:
    """Map *slots* in the returned thread; the first copy into each maps what is missing."""

    def map_all() -> None:
        with suppress(CheckpointError):  # the copy reports it
            for memory in slots:
                memory.populate()

    thread = threading.Thread(target=map_all, name="gpuops-populate", daemon=True)
    thread.start()
    return thread


def _address_of(view: memoryview) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def _clear_cuda_error(device: torch.device) -> None:
    """Clear CUDA's last error: the next kernel launch would raise it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
