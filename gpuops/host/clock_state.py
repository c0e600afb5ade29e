"""Whether the kernel considers its clock synchronised, from adjtimex(2).

This needs no NTP daemon: all of them (chrony, ntpd, timesyncd, PTP) report to the kernel.
Under a fake root, ``syscall/adjtimex.json`` holds what the call would have returned.
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.procfs import read_text
from gpuops.host.records import from_json
from gpuops.host.trust import reason_of
from gpuops.model import UnknownReason

STA_UNSYNC = 0x0040
STA_NANO = 0x2000
_TIMEX = struct.Struct("@I4lI")


@dataclass(frozen=True, slots=True)
class KernelClockState:
    """``synchronised``: STA_UNSYNC is clear. Errors are in seconds.

    ``offset_s`` is the remaining correction; ``error_max_s`` bounds the clock's error and
    grows by 500 ppm between updates.
    """

    synchronised: bool
    offset_s: float
    error_max_s: float


def read_clock_state(root: Path = Path("/")) -> KernelClockState:
    """Return the kernel's view of its clock.

    Raises:
        ProbeError: The call is refused (some sandboxes do).
    """
    if root != Path("/"):
        return _recorded(root / "syscall/adjtimex.json")
    offset, error_max_us, status = _adjtimex()
    unit_s = 1e-9 if status & STA_NANO else 1e-6
    return KernelClockState(
        synchronised=not status & STA_UNSYNC,
        offset_s=offset * unit_s,
        error_max_s=error_max_us * 1e-6,
    )


def _adjtimex() -> tuple[int, int, int]:
    """Return offset, maxerror and status of ``struct timex``, as 64-bit Linux lays it out."""
    # Imported only by the child that calls it, which makes the command start faster.
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    # Zeros read without changing anything; the structure has 208 bytes.
    timex = ctypes.create_string_buffer(512)
    if libc.adjtimex(timex) < 0:
        code = ctypes.get_errno()
        error = OSError(code, os.strerror(code))
        raise ProbeError(f"adjtimex: {error.strerror}", reason_of(error))
    _modes, offset, _freq, error_max_us, _esterror, status = _TIMEX.unpack_from(timex)
    return offset, error_max_us, status


def _recorded(path: Path) -> KernelClockState:
    try:
        return from_json(KernelClockState, json.loads(read_text(path)), str(path))
    except ValueError as exc:
        raise ProbeError(str(exc), UnknownReason.NOT_SUPPORTED) from exc
