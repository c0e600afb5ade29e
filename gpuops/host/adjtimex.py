"""Whether the kernel believes that its clock is synchronised, from adjtimex(2).

No NTP daemon needs to be asked: all of them (chrony, ntpd, timesyncd, PTP) tell the kernel.
Under a fake root, ``syscall/adjtimex.json`` holds what the call would have returned.
"""

import ctypes
import json
import os
from dataclasses import dataclass
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.probe import reason_of
from gpuops.host.procfs import read_text
from gpuops.host.records import from_json
from gpuops.model import UnknownReason

STA_UNSYNC = 0x0040
STA_NANO = 0x2000


@dataclass(frozen=True, slots=True)
class ClockState:
    """``synchronised`` is the kernel's verdict (STA_UNSYNC is clear), errors are in seconds.

    ``offset_s`` is what is still to be corrected; ``error_max_s`` bounds the clock's error and
    grows by 500 ppm between updates.
    """

    synchronised: bool
    offset_s: float
    error_max_s: float


class _Timex(ctypes.Structure):
    # struct timex of adjtimex(2) for 64-bit Linux; the tail is padding that the kernel may fill.
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("tail", ctypes.c_byte * 256),
    )


def read_clock_state(root: Path = Path("/")) -> ClockState:
    """Return the kernel's view of its clock.

    Raises:
        ProbeError: The call is refused (some sandboxes do).
    """
    if root != Path("/"):
        return _recorded(root / "syscall/adjtimex.json")
    timex = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        code = ctypes.get_errno()
        error = OSError(code, os.strerror(code))
        raise ProbeError(f"adjtimex: {error.strerror}", reason_of(error))
    unit_s = 1e-9 if timex.status & STA_NANO else 1e-6
    return ClockState(
        synchronised=not timex.status & STA_UNSYNC,
        offset_s=timex.offset * unit_s,
        error_max_s=timex.maxerror * 1e-6,
    )


def _recorded(path: Path) -> ClockState:
    try:
        return from_json(ClockState, json.loads(read_text(path)), str(path))
    except ValueError as exc:
        raise ProbeError(str(exc), UnknownReason.NOT_SUPPORTED) from exc
