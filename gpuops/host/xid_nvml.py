"""Xids as NVML's events: any user who may use a GPU may wait for them."""

import ctypes
from collections.abc import Iterator
from typing import Any

from gpuops.errors import ProbeError
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import GpuName
from gpuops.host.nvml.facts import GPU_IS_LOST
from gpuops.host.sysfs import sysfs_address
from gpuops.host.xid_watch import LOST, XidEvent, XidReporter, XidSource
from gpuops.model import UnknownReason

WAIT_MS = 1000
_LIBRARY_NOT_FOUND = 12
_DRIVER_NOT_LOADED = 9


class XidWatch:
    """Waits for Xids of every GPU that NVML lists to this process; may hang, and may crash it.

    GPUs are told apart by their handles: one that has fallen off the bus answers no question.
    """

    def __init__(self, nvml: Any, teller: XidReporter, clock: Clock) -> None:  # noqa: ANN401 no types
        self._nvml = nvml
        self._teller = teller
        self._clock = clock
        self._handles: dict[int | None, tuple[GpuName, Any]] = {}

    def run(self) -> None:
        """Tell of each Xid; does not return.

        Raises:
            ProbeError: There is nothing to wait for (``missing_tool``), or waiting failed.
        """
        for _ in self.steps():
            self._teller.tick()

    def steps(self) -> Iterator[None]:
        """Do as `run`, yielding after each wait."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            events = self._registered()
        except nvml.NVMLError as exc:
            absent = exc.value in (_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED)
            reason = UnknownReason.MISSING_TOOL if absent else UnknownReason.CRASH
            raise ProbeError(f"NVML does not start: {exc}", reason) from exc
        if not self._handles:
            raise ProbeError("NVML tells of no GPU's Xids", UnknownReason.MISSING_TOOL)
        self._teller.begun([gpu for gpu, _handle in self._handles.values()])
        while True:
            self._wait(events)
            yield

    def _registered(self) -> Any:  # noqa: ANN401 as above
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = GpuName(
                    index=index,
                    address=sysfs_address(nvml.nvmlDeviceGetPciInfo(handle).busId),
                    uuid=nvml.nvmlDeviceGetUUID(handle),
                )
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except (nvml.NVMLError, ValueError):
                continue  # lost already, or without events: the gate judges such a GPU
            self._handles[_number(handle)] = gpu, handle
        return events

    def _wait(self, events: Any) -> None:  # noqa: ANN401 as above
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait(events, WAIT_MS)
        except nvml.NVMLError as exc:
            if exc.value == nvml.NVML_ERROR_TIMEOUT:
                return
            if exc.value == GPU_IS_LOST:
                self._tell_lost()
            raise ProbeError(f"waiting for Xids: {exc}", UnknownReason.CRASH) from exc
        known = self._handles.get(_number(event.device))
        self._tell(None if known is None else known[0], int(event.eventData))

    def _tell_lost(self) -> None:
        """Find the GPU that is lost by asking each; NVML does not say which it is."""
        for gpu, handle in self._handles.values():
            try:
                self._nvml.nvmlDeviceGetPciInfo(handle)
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as exc:
                if exc.value == GPU_IS_LOST:
                    self._tell(gpu, LOST)

    def _tell(self, gpu: GpuName | None, code: int) -> None:
        self._teller.tell(
            XidEvent(
                source=XidSource.NVML,
                code=code,
                mono_ns=self._clock.mono_ns(),
                now_us=self._clock.now_us(),
                address=None if gpu is None else gpu.address,
                uuid=None if gpu is None else gpu.uuid,
                index=None if gpu is None else gpu.index,
            )
        )


def _number(handle: Any) -> int | None:  # noqa: ANN401 as above
    """Return the address that a handle is; NVML gives a device one and keeps it."""
    return ctypes.cast(handle, ctypes.c_void_p).value
