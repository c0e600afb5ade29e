"""Watch for Xids: ``python -m gpuops.host.xid_watch SOURCE [ROOT]``, and the lines that it writes.

A separate process for each source: NVML can hang, or crash its caller, just when a GPU fails, and
the kernel's log must be read then. It ends when its standard input closes.

Its lines are JSON objects: ``{"gpus": [...]}`` once at the start; ``{"xid": {...}}`` for an Xid;
``{"over": WHY, "text": ...}`` last, if watching ended by itself. Storms are aggregated.
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
from gpuops.host.xid import OffBusLines, parse_xid
from gpuops.host.xid_log import KINDS_MAX, LINE_SHOWN_MAX
from gpuops.model import UnknownReason

REPEAT_S = 1.0
LINE_BYTES_MAX = 64 * 1024
LOST = 0  # in place of a code: by NVML the GPU is lost, without an Xid
# Between two reads of the kernel's log, and for one wait for NVML's events.
KERNEL_WAIT_S = 0.2
NVML_WAIT_MS = 1000
_LIBRARY_NOT_FOUND = 12
_DRIVER_NOT_LOADED = 9


class XidSource(StrEnum):
    """Where an Xid was seen."""

    NVML = "nvml"
    KERNEL = "kernel"


class XidSourceEnded(StrEnum):
    """Why watching ended; all but ``error`` are permanent."""

    ABSENT = "absent"
    NO_PERMISSION = "no_permission"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """Lines of one code about one GPU: the first, or ``count`` more of the same.

    ``code`` is `LOST` if NVML reports it without an Xid. ``fatal``, ``recovery``, ``process`` and
    ``line`` are known only from the kernel's log. ``mono_ns``, ``now_us``: when it was seen.
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
    """Return the message in *line*, None if it is malformed."""
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
    """Writes the lines; repetitions within `REPEAT_S` are counted and written once."""

    def __init__(self, write: Callable[[str], None], clock: Clock) -> None:
        self._write = write
        self._clock = clock
        self._known: set[tuple[object, ...]] = set()
        # Repetitions: the newest event of each kind, and their number.
        self._waiting: dict[tuple[object, ...], tuple[XidEvent, int]] = {}
        self._flushed_ns = clock.mono_ns()

    def started(self, gpus: Sequence[GpuName]) -> None:
        """Write that *gpus* are being watched."""
        self._write_json({"gpus": [to_json(gpu) for gpu in gpus]})

    def ended(self, why: XidSourceEnded, text: str) -> None:
        """Write that watching has ended, after all repetitions."""
        self._flush()
        self._write_json({"over": why.value, "text": text[:LINE_SHOWN_MAX]})

    def report(self, event: XidEvent) -> None:
        """Write *event*, at once if it is the first of its kind."""
        key = event.address or event.uuid, event.code, event.fatal, event.recovery
        if key in self._known:
            _, count = self._waiting.get(key, (event, 0))
            self._waiting[key] = event, count + event.count
        elif len(self._known) < KINDS_MAX:
            self._known.add(key)
            self._write_xid(event)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write the repetitions, at most once every `REPEAT_S`."""
        if self._waiting and self._clock.mono_ns() - self._flushed_ns >= REPEAT_S * 1e9:
            self._flush()

    def _flush(self) -> None:
        self._flushed_ns = self._clock.mono_ns()
        for event, count in self._waiting.values():
            self._write_xid(replace(event, count=count))
        self._waiting.clear()

    def _write_xid(self, event: XidEvent) -> None:
        self._write_json({"xid": to_json(replace(event, line=event.line[:LINE_SHOWN_MAX]))})

    def _write_json(self, body: dict[str, Any]) -> None:
        self._write(json.dumps(body, separators=(",", ":")) + "\n")


class XidLog:
    """Reports Xids from the kernel's log, with the driver's text; needs permission to read it.

    Follows the kernel's log below *root* from its current end.

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
        self._joiner = OffBusLines()
        os.lseek(self._fd, 0, os.SEEK_END)

    def run(self) -> None:
        """Report each Xid; does not return.

        Raises:
            ProbeError: The log cannot be read any more.
        """
        self.start()
        for _ in self.steps():
            self._reporter.flush_if_due()

    def start(self) -> None:
        """Report the GPUs."""
        self._reporter.started(list(self._gpus.values()))

    def steps(self) -> Iterator[None]:
        """Report new Xids, yielding after each read and each wait."""
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
        """Return the next bytes: none at a plain file's end, None at the log's."""
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
        complete, newline, rest = (self._rest + chunk).rpartition(b"\n")
        self._rest = rest[-RECORD_MAX:]
        if not newline:
            return
        for record in parse_kmsg(complete.decode("utf-8", errors="replace"), rehearsals=True):
            text = self._joiner.join(record).text
            xid = parse_xid(text)
            if xid is None:
                continue
            gpu = self._gpus.get(xid.address)
            self._reporter.report(
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
                    line=text,
                )
            )


class XidWatch:
    """Reports Xids from NVML's events: any user who may use a GPU may wait for them.

    Waits for Xids of every GPU that NVML lists to this process; may hang, and may crash it.

    GPUs are identified by their handles: one that has fallen off the bus answers no call.
    """

    def __init__(self, nvml: Any, reporter: XidReporter, clock: Clock) -> None:  # noqa: ANN401 no types
        self._nvml = nvml
        self._reporter = reporter
        self._clock = clock
        self._handles: dict[int | None, tuple[GpuName, Any]] = {}

    def run(self) -> None:
        """Report each Xid; does not return.

        Raises:
            ProbeError: There is nothing to wait for (``missing_tool``), or waiting failed.
        """
        for _ in self.steps():
            self._reporter.flush_if_due()

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
            raise ProbeError("NVML reports no GPU's Xids", UnknownReason.MISSING_TOOL)
        self._reporter.started([gpu for gpu, _handle in self._handles.values()])
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
                continue  # already lost, or without events: the health gate checks such a GPU
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
                self._report_lost()
            raise ProbeError(f"waiting for Xids: {exc}", UnknownReason.CRASH) from exc
        known = self._handles.get(_number(event.device))
        self._report(None if known is None else known[0], int(event.eventData))

    def _report_lost(self) -> None:
        """Find the lost GPU by a call to each; NVML does not say which it is."""
        for gpu, handle in self._handles.values():
            try:
                self._nvml.nvmlDeviceGetPciInfo(handle)
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as exc:
                if exc.value == GPU_IS_LOST:
                    self._report(gpu, LOST)

    def _report(self, gpu: GpuName | None, code: int) -> None:
        self._reporter.report(
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
    """Return the address of a handle, which is constant for a device."""
    return ctypes.cast(handle, ctypes.c_void_p).value


_WHY = {
    UnknownReason.MISSING_TOOL.value: XidSourceEnded.ABSENT,
    UnknownReason.NOT_SUPPORTED.value: XidSourceEnded.ABSENT,
    UnknownReason.NO_PERMISSION.value: XidSourceEnded.NO_PERMISSION,
}


def main(arguments: list[str]) -> int:
    """Watch until the parent ends; return 3 if there is nothing to watch, 1 after an error."""
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
        reporter.ended(why, str(exc))
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
