"""Waiting for NVML's events, over a pynvml that a test makes up."""

from types import SimpleNamespace

import pynvml
import pytest

from gpuops.errors import ProbeError
from gpuops.host.clock import FakeClock
from gpuops.host.nvml.facts import GPU_IS_LOST
from gpuops.host.xid_watch import LOST, XidReporter, XidWatch, parse_message
from gpuops.model import UnknownReason

NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND


class Nvml:
    """A driver with two GPUs; *events* are what waiting gives, one after the other."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_TIMEOUT = pynvml.NVML_ERROR_TIMEOUT
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, *events, count=2, init=None, lost=(), deaf=()):
        self.events, self.count, self.init = list(events), count, init
        self.lost, self.deaf = lost, deaf
        self.registered = []

    def nvmlInit(self):  # noqa: N802
        if self.init:
            raise pynvml.NVMLError(self.init)

    def nvmlEventSetCreate(self):  # noqa: N802
        return "set"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return 1000 + index

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return SimpleNamespace(busId=f"00000000:1{handle - 1000}:00.0")

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle - 1000}"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        if handle - 1000 in self.lost:
            raise pynvml.NVMLError(GPU_IS_LOST)

    def nvmlDeviceRegisterEvents(self, handle, types, events):  # noqa: N802
        if handle - 1000 in self.deaf:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.registered.append((handle, types, events))

    def nvmlEventSetWait(self, events, timeout_ms):  # noqa: N802
        event = self.events.pop(0)
        if isinstance(event, int):
            raise pynvml.NVMLError(event)
        index, xid = event
        return SimpleNamespace(device=1000 + index, eventData=xid)


def watched(nvml, steps=0):
    """Return what was told in *steps* waits, and the error that ended watching."""
    lines = []
    watch = XidWatch(nvml, XidReporter(lines.append, FakeClock()), FakeClock()).steps()
    error = None
    try:
        for _ in range(steps):
            next(watch)
    except ProbeError as exc:
        error = exc
    return [parse_message(line.encode()) for line in lines], error


def test_an_event_is_about_the_gpu_of_its_handle():
    """A GPU that is off the bus tells its name to nobody."""
    nvml = Nvml(pynvml.NVML_ERROR_TIMEOUT, (1, 79), (0, 31))
    (begun, *told), error = watched(nvml, 3)

    assert [gpu.uuid for gpu in begun.gpus] == ["GPU-0", "GPU-1"]
    assert [(item.xid.uuid, item.xid.address, item.xid.code) for item in told] == [
        ("GPU-1", "0000:11:00.0", 79),
        ("GPU-0", "0000:10:00.0", 31),
    ]
    assert error is None
    assert nvml.registered == [(1000, 8, "set"), (1001, 8, "set")]


def test_an_event_of_a_gpu_that_nobody_knows_is_told_without_a_name():
    (_begun, told), _error = watched(Nvml((7, 79)), 1)

    assert (told.xid.uuid, told.xid.code) == (None, 79)


def test_the_gpu_that_is_lost_is_found():
    (_begun, told), error = watched(Nvml(GPU_IS_LOST, lost=[1]), 1)

    assert (told.xid.uuid, told.xid.code) == ("GPU-1", LOST)
    assert error.reason == UnknownReason.CRASH


def test_a_gpu_without_events_is_left_out():
    (begun,), _error = watched(Nvml(pynvml.NVML_ERROR_TIMEOUT, deaf=[0]), 1)

    assert [gpu.uuid for gpu in begun.gpus] == ["GPU-1"]


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (Nvml(init=NOT_FOUND), UnknownReason.MISSING_TOOL),
        (Nvml(init=9), UnknownReason.MISSING_TOOL),
        (Nvml(init=999), UnknownReason.CRASH),
        (Nvml(count=0), UnknownReason.MISSING_TOOL),
        (Nvml(deaf=[0, 1]), UnknownReason.MISSING_TOOL),
        (Nvml(999), UnknownReason.CRASH),
    ],
    ids=["no-library", "no-driver", "init-fails", "no-gpu", "no-events", "wait-fails"],
)
def test_watching_ends_where_there_is_nothing_to_watch(nvml, reason):
    _told, error = watched(nvml, 2)

    assert error.reason == reason
