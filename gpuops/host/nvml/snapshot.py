"""One snapshot of the callers' results, and of their hung calls."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuops.host.nvml.caller import NvmlCaller
from gpuops.host.nvml.facts import (
    GPU_IS_LOST,
    OPEN_CALL,
    Clocks,
    EccErrors,
    Modes,
    NvmlGpu,
    NvmlSnapshot,
    NvmlStatus,
    PcieLink,
    Power,
    RemappedRows,
    Temperatures,
)
from gpuops.host.process.inspect import thread_state

_LIBRARY_NOT_FOUND = 12
_IDENTITY = (
    OPEN_CALL,
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetName",
)
_PARTS: dict[str, type[Any]] = {
    "remapped": RemappedRows,
    "ecc": EccErrors,
    "temperature": Temperatures,
    "power": Power,
    "clocks": Clocks,
    "pcie": PcieLink,
    "modes": Modes,
}


@dataclass(frozen=True, slots=True)
class _Hang:
    call: str
    waited_s: float
    state: str | None


def snapshot_of(
    opening: NvmlCaller, system: NvmlCaller, gpus: Sequence[Sequence[NvmlCaller]], now_s: float
) -> NvmlSnapshot:
    """Return the results of *opening* NVML, of *system* and *gpus* until *now_s* (monotonic).

    A caller that has not finished hangs in its last call.
    """
    hangs = _hangs([opening], now_s)
    if opening.errors:
        return _refused(opening)
    if hangs:
        return _timed_out(hangs, ())
    found = tuple(_gpu(index, callers, now_s) for index, callers in enumerate(gpus))
    hangs = _hangs([*(caller for callers in gpus for caller in callers), system], now_s)
    if found and all(gpu.hung_call and gpu.uuid is None for gpu in found):
        return _timed_out(hangs, found)
    return NvmlSnapshot(
        status=NvmlStatus.OK,
        driver=system.found.get("driver"),
        nvml_version=system.found.get("nvml_version"),
        gpus=found,
        state=_worst(hangs),
        hung_call=hangs[0].call if hangs else None,
        hung_s=hangs[0].waited_s if hangs else None,
    )


def _refused(opening: NvmlCaller) -> NvmlSnapshot:
    failed = opening.errors[0]
    absent = failed.code == _LIBRARY_NOT_FOUND
    return NvmlSnapshot(
        status=NvmlStatus.ABSENT if absent else NvmlStatus.ERROR,
        error=f"{failed.call}: {failed.text}",
        error_code=failed.code,
    )


def _timed_out(hangs: Sequence[_Hang], gpus: tuple[NvmlGpu, ...]) -> NvmlSnapshot:
    first = hangs[0]
    return NvmlSnapshot(
        status=NvmlStatus.TIMEOUT,
        gpus=gpus,
        error=f"{first.call} gave no answer in {first.waited_s:.1f} s",
        state=_worst(hangs),
        hung_call=first.call,
        hung_s=first.waited_s,
    )


def _gpu(index: int, callers: Sequence[NvmlCaller], now_s: float) -> NvmlGpu:
    errors = tuple(error for caller in callers for error in tuple(caller.errors))
    lost = [error for error in errors if error.code == GPU_IS_LOST]
    unknown = [error for error in errors if error.call in _IDENTITY]
    error = next(iter((*lost, *unknown)), None)
    hang = next(iter(_hangs(callers, now_s)), None)
    return NvmlGpu(
        index=index,
        error=None if error is None else f"{error.call}: {error.text}",
        error_code=None if error is None else error.code,
        errors=errors,
        unsupported=tuple(dict.fromkeys(call for caller in callers for call in caller.unsupported)),
        hung_call=None if hang is None else hang.call,
        hung_s=None if hang is None else hang.waited_s,
        **_values(callers),
    )


def _values(callers: Iterable[NvmlCaller]) -> dict[str, Any]:
    """Return all values, ``"temperature.core_c"`` as a field of `Temperatures`."""
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for caller in callers:
        for place, value in dict(caller.found).items():
            part, dot, name = place.partition(".")
            if dot:
                parts[part][name] = value
            else:
                values[place] = value
    return values | {part: _PARTS[part](**values_of) for part, values_of in parts.items()}


def _hangs(callers: Iterable[NvmlCaller], now_s: float) -> list[_Hang]:
    found = []
    for caller in callers:
        if not caller.finished:
            thread = thread_state(os.getpid(), caller.thread_id)
            state = None if thread is None else thread.state
            found.append(_Hang(caller.call, round(now_s - caller.since_s, 3), state))
    return found


def _worst(hangs: Iterable[_Hang]) -> str | None:
    """Return D if any thread is in it: no signal ends that call."""
    states = [hang.state for hang in hangs]
    return "D" if "D" in states else next(iter(states), None)
