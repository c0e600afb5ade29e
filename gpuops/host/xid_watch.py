"""Watch for Xids: ``python -m gpuops.host.xid_watch SOURCE [ROOT]``, and the lines that it writes.

A process of its own, one for each source: NVML can hang, or crash whoever asks it, just when a GPU
is sick, and the kernel's log must be read then. It ends when its standard input does.

Its lines are JSON objects: ``{"gpus": [...]}`` once, when the watch has begun; ``{"xid": {...}}``
for an Xid; ``{"over": WHY, "text": ...}`` last, where watching has ended by itself. Of a storm
they are few.
"""

import ctypes
import json
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, EXIT_USAGE, ConfigError, ProbeError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.gpu_names import GpuName, read_gpu_names
from gpuops.host.kmsg import RECORD_MAX, open_kmsg, parse_kmsg
from gpuops.host.nvml.facts import GPU_IS_LOST
from gpuops.host.process.sidecar import die_with_parent
from gpuops.host.records import from_json, to_json
from gpuops.host.sysfs import sysfs_address
from gpuops.host.xid import KINDS_MAX, LINE_SHOWN_MAX, parse_xid
from gpuops.model import UnknownReason

AGAIN_S = 1.0
LINE_BYTES_MAX = 64 * 1024
LOST = 0  # in place of a code: NVML says that the GPU is lost, and no Xid was told
# Between two looks at the kernel's log, and for one wait for NVML's events.
KERNEL_WAIT_S = 0.2
NVML_WAIT_MS = 1000
_LIBRARY_NOT_FOUND = 12
_DRIVER_NOT_LOADED = 9


class XidSource(StrEnum):
    """Where an Xid was seen."""

    NVML = "nvml"
    KERNEL = "kernel"


class XidSourceEnded(StrEnum):
    """Why watching ended; all but ``error`` would be so again."""

    ABSENT = "absent"
    NO_PERMISSION = "no_permission"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """Lines of one code about one GPU: the first, or ``count`` more of what was told before.

    ``code`` is `LOST` where NVML said so without an Xid. ``fatal``, ``recovery``, ``process`` and
    ``line`` are known from the kernel's log alone. ``mono_ns``, ``now_us``: when it was seen.
    """

    source: XidSource
    code: int
    mono_ns: int
    now_us: int
    address: str | None = None
    uuid: str | None = None
    index: int | None = None
    count: int = 1
    process: int | None = None
    fatal: bool | None = None
    recovery: str | None = None
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidWatchMessage:
    """One line of a child; one of the three is set."""

    gpus: tuple[GpuName, ...] | None = None
    xid: XidEvent | None = None
    over: XidSourceEnded | None = None
    text: str = ""


def parse_message(line: bytes) -> XidWatchMessage | None:
    """Return what *line* tells, None where it is no line of ours."""
    try:
        body = json.loads(line)
        if not isinstance(body, Mapping):
            return None
        if "gpus" in body:
            return XidWatchMessage(
                gpus=tuple(from_json(GpuName, item, "a GPU") for item in body["gpus"])
            )
        if "xid" in body:
            return XidWatchMessage(xid=from_json(XidEvent, body["xid"], "an Xid"))
        if "over" in body:
            return XidWatchMessage(
                over=XidSourceEnded(body["over"]), text=str(body.get("text", ""))
            )
    except (ValueError, TypeError, ConfigError, RecursionError):
        return None
    return None


class XidReporter:
    """Writes the lines; what repeats within `AGAIN_S` is counted and told once."""

    def __init__(self, write: Callable[[str], None], clock: Clock) -> None:
        self._write = write
        self._clock = clock
        self._known: set[tuple[object, ...]] = set()
        # What was told before and came again: the newest of each kind, and how many.
        self._waiting: dict[tuple[object, ...], tuple[XidEvent, int]] = {}
        self._told_ns = clock.mono_ns()

    def begun(self, gpus: Sequence[GpuName]) -> None:
        """Tell that *gpus* are being watched."""
        self._say({"gpus": [to_json(gpu) for gpu in gpus]})

    def over(self, why: XidSourceEnded, text: str) -> None:
        """Tell that watching has ended, after all that waits."""
        self._flush()
        self._say({"over": why.value, "text": text[:LINE_SHOWN_MAX]})

    def tell(self, event: XidEvent) -> None:
        """Tell of *event*, at once where it is the first of its kind."""
        key = event.address or event.uuid, event.code, event.fatal, event.recovery
        if key in self._known:
            _, count = self._waiting.get(key, (event, 0))
            self._waiting[key] = event, count + event.count
        elif len(self._known) < KINDS_MAX:
            self._known.add(key)
            self._say_xid(event)
        self.tick()

    def tick(self) -> None:
        """Tell of what was repeated, once it is due."""
        if self._waiting and self._clock.mono_ns() - self._told_ns >= AGAIN_S * 1e9:
            self._flush()

    def _flush(self) -> None:
        self._told_ns = self._clock.mono_ns()
        for event, count in self._waiting.values():
            self._say_xid(replace(event, count=count))
        self._waiting.clear()

    def _say_xid(self, event: XidEvent) -> None:
        self._say({"xid": to_json(replace(event, line=event.line[:LINE_SHOWN_MAX]))})

    def _say(self, body: dict[str, Any]) -> None:
        self._write(json.dumps(body, separators=(",", ":")) + "\n")


class XidLog:
    """Reports Xids from the kernel's log, with the driver's words, to who may read it.

    Follows the kernel's log below *root* from its end as it is when this is made.

    Raises:
        ProbeError: ``missing_tool`` without a GPU, ``no_permission``, ``not_supported``.
    """

    def __init__(self, root: Path, reporter: XidReporter, clock: Clock) -> None:
        self._reporter = reporter
        self._clock = clock
        self._gpus: dict[str, GpuName] = {gpu.address: gpu for gpu in read_gpu_names(root, {})}
        if not self._gpus:
            raise ProbeError("there is no GPU", UnknownReason.MISSING_TOOL)
        self._fd = open_kmsg(root)
        self._rest = b""
        os.lseek(self._fd, 0, os.SEEK_END)

    def run(self) -> None:
        """Tell of each Xid; does not return.

        Raises:
            ProbeError: The log cannot be read any more.
        """
        self.begun()
        for _ in self.steps():
            self._reporter.tick()

    def begun(self) -> None:
        """Tell which GPUs there are."""
        self._reporter.begun(list(self._gpus.values()))

    def steps(self) -> Iterator[None]:
        """Tell of what came, yielding after each read and each wait."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while True:
            chunk = self._read()
            if chunk is None:
                poller.poll(KERNEL_WAIT_S * 1000)
            elif chunk:
                self._take(chunk)
            else:
                # The end of a plain file, which always polls as readable.
                select.select([], [], [], KERNEL_WAIT_S)
            yield

    def close(self) -> None:
        """Close the log."""
        os.close(self._fd)

    def _read(self) -> bytes | None:
        """Return what there is: nothing at a plain file's end, None at the log's."""
        try:
            return os.read(self._fd, RECORD_MAX)
        except BlockingIOError:
            return None
        except BrokenPipeError:
            return self._read()  # the record was overwritten; the next read has the oldest
        except OSError as exc:
            text = f"cannot read the kernel's log: {exc.strerror}"
            raise ProbeError(text, UnknownReason.CRASH) from exc

    def _take(self, chunk: bytes) -> None:
        whole, newline, rest = (self._rest + chunk).rpartition(b"\n")
        self._rest = rest[-RECORD_MAX:]
        if not newline:
            return
        for record in parse_kmsg(whole.decode("utf-8", errors="replace"), rehearsals=True):
            xid = parse_xid(record.text)
            if xid is None:
                continue
            gpu = self._gpus.get(xid.address)
            self._reporter.tell(
                XidEvent(
                    source=XidSource.KERNEL,
                    code=xid.code,
                    mono_ns=self._clock.mono_ns(),
                    now_us=self._clock.now_us(),
                    address=xid.address,
                    uuid=None if gpu is None else gpu.uuid,
                    index=None if gpu is None else gpu.index,
                    process=xid.pid,
                    fatal=xid.fatal,
                    recovery=xid.recovery,
                    line=record.text,
                )
            )


class XidWatch:
    """Reports Xids from NVML's events: any user who may use a GPU may wait for them.

    Waits for Xids of every GPU that NVML lists to this process; may hang, and may crash it.

    GPUs are told apart by their handles: one that has fallen off the bus answers no question.
    """

    def __init__(self, nvml: Any, reporter: XidReporter, clock: Clock) -> None:  # noqa: ANN401 no types
        self._nvml = nvml
        self._reporter = reporter
        self._clock = clock
        self._handles: dict[int | None, tuple[GpuName, Any]] = {}

    def run(self) -> None:
        """Tell of each Xid; does not return.

        Raises:
            ProbeError: There is nothing to wait for (``missing_tool``), or waiting failed.
        """
        for _ in self.steps():
            self._reporter.tick()

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
        self._reporter.begun([gpu for gpu, _handle in self._handles.values()])
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
            event = nvml.nvmlEventSetWait(events, NVML_WAIT_MS)
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
        self._reporter.tell(
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


_WHY = {
    UnknownReason.MISSING_TOOL.value: XidSourceEnded.ABSENT,
    UnknownReason.NOT_SUPPORTED.value: XidSourceEnded.ABSENT,
    UnknownReason.NO_PERMISSION.value: XidSourceEnded.NO_PERMISSION,
}


def main(arguments: list[str]) -> int:
    """Watch until the parent ends; return 3 where there is nothing to watch, 1 after an error."""
    if not 1 <= len(arguments) <= 2 or arguments[0] not in set(XidSource):
        sys.stderr.write("python -m gpuops.host.xid_watch nvml|kernel [ROOT]\n")
        return EXIT_USAGE
    source, root = XidSource(arguments[0]), Path(*arguments[1:] or ["/"])
    die_with_parent()
    reporter = XidReporter(_write, SystemClock())
    try:
        _watch(source, root, reporter)
    except ProbeError as exc:
        why = _WHY.get(exc.reason, XidSourceEnded.ERROR)
        reporter.over(why, str(exc))
        return EXIT_FAIL if why is XidSourceEnded.ERROR else EXIT_UNKNOWN
    return EXIT_OK


def _watch(source: XidSource, root: Path, reporter: XidReporter) -> None:
    if source is XidSource.KERNEL:
        XidLog(root, reporter, SystemClock()).run()
    else:
        import pynvml

        XidWatch(pynvml, reporter, SystemClock()).run()


def _write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
