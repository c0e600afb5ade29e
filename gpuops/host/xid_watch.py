"""What a watching child tells of Xids, one JSON object a line, and how a storm becomes few lines.

``{"gpus": [...]}`` comes once, when the watch has begun; ``{"xid": {...}}`` for an Xid;
``{"over": WHY, "text": ...}`` last, where watching has ended by itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gpuops.errors import ConfigError
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import GpuName
from gpuops.host.records import from_json, to_json
from gpuops.host.xid import KINDS_MAX, LINE_SHOWN_MAX

AGAIN_S = 1.0
LINE_BYTES_MAX = 64 * 1024
LOST = 0  # in place of a code: NVML says that the GPU is lost, and no Xid was told


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
