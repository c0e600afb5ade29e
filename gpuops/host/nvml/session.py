"""Read all GPUs from NVML in parallel, in threads, until a deadline.

ctypes releases the interpreter lock during a call, so a slow or hung GPU does not delay the others.
A thread that does not return is abandoned; its `NvmlCaller` has the call.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuops.errors import ConfigError, ProbeError
from gpuops.host.nvml.caller import GpuLostError, NvmlCaller, NvmlRefused
from gpuops.host.nvml.calls import GROUPS
from gpuops.host.nvml.facts import (
    OPEN_CALL,
    UNREADABLE,
    CallError,
    GpuProcess,
    NvmlGpu,
    NvmlSnapshot,
    NvmlStatus,
)
from gpuops.host.nvml.plausible import GPUS, why_not
from gpuops.host.nvml.snapshot import snapshot_of
from gpuops.host.process import probe
from gpuops.host.process.run_with_deadline import abandoned
from gpuops.host.records import from_json, to_json

# The share of the child's time that is reserved for writing the results while a call hangs.
_WRITE_S = 0.3
_WRITE_SHARE = 0.25


def read_nvml(deadline_s: float, root: Path = Path("/")) -> NvmlSnapshot:
    """Return what NVML reports within *deadline_s*; never raises and never hangs.

    A hung call blocks its thread, and with it the child; the results of other calls are returned
    nevertheless. Names of processes are those of *root*.
    """
    until_s = time.monotonic() + deadline_s - min(_WRITE_S, _WRITE_SHARE * deadline_s)
    try:
        child = probe.start_call(
            lambda: to_json(snapshot_here(until_s)),
            deadline_s=deadline_s,
            question=f"nvml {root}",
            left=abandoned(),
        )
    except ProbeError as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"reading NVML: {exc}")
    return snapshot_from(probe.run(child), root)


def snapshot_from(outcome: probe.ProbeOutcome, root: Path) -> NvmlSnapshot:
    """Return the snapshot of the child of *outcome*, or what its timeout means.

    A snapshot counts even if the child could not exit: a thread in the kernel blocks its process.
    """
    try:
        snapshot = from_json(NvmlSnapshot, probe.read_answer(outcome), "the NVML snapshot")
    except ProbeError as exc:
        late = outcome.ending is not probe.ProbeEnd.ENDED
        return NvmlSnapshot(
            status=NvmlStatus.TIMEOUT if late else NvmlStatus.CRASH,
            error=f"NVML {exc}" if late else f"reading NVML: {exc}",
            state=outcome.state,
            hung_s=round(outcome.elapsed_s, 3) if late else None,
        )
    except (ConfigError, ValueError) as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"reading NVML: {exc}")
    return _named(replace(snapshot, state="D" if outcome.state == "D" else snapshot.state), root)


def snapshot_here(until_s: float) -> NvmlSnapshot:
    """Return what NVML reports to this process until *until_s* (monotonic).

    Call it in a child: hung threads continue after it, and loading the library can block.
    """
    import pynvml

    return NvmlSession(pynvml).run(until_s)


def _named(snapshot: NvmlSnapshot, root: Path) -> NvmlSnapshot:
    return replace(snapshot, gpus=tuple(_with_names(gpu, root) for gpu in snapshot.gpus))


def _with_names(gpu: NvmlGpu, root: Path) -> NvmlGpu:
    if not gpu.processes:
        return gpu
    named = tuple(replace(process, name=_name(process, root)) for process in gpu.processes)
    return replace(gpu, processes=named)


def _name(process: GpuProcess, root: Path) -> str | None:
    """Return its name in the kernel; a container sees no other processes, or all as pid 0."""
    try:
        text = (root / f"proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.strip() or None


class NvmlSession:
    """One read of all GPUs through pynvml."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 a module without types
        self._nvml = nvml
        self._opening = NvmlCaller(nvml)
        self._system = NvmlCaller(nvml)
        self._gpus: list[list[NvmlCaller]] = []
        self._threads: list[threading.Thread] = []

    def run(self, until_s: float) -> NvmlSnapshot:
        """Return the results until *until_s* (monotonic)."""
        self._start(self._opening, self._open)
        # A thread starts others before it ends, so the list has grown when its `join` returns.
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return snapshot_of(self._opening, self._system, self._gpus, time.monotonic())

    def _start(self, caller: NvmlCaller, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=_run_calls, args=(caller, work), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No more threads can be started: calls in sequence are slower and equally correct.
            _run_calls(caller, work)
        else:
            self._threads.append(thread)

    def _open(self) -> None:
        self._opening.call_nvml("nvmlInit")
        count = self._opening.call_nvml("nvmlDeviceGetCount")
        if (problem := why_not(count, GPUS)) is not None:
            raise NvmlRefused(*problem)
        self._gpus.extend([NvmlCaller(self._nvml)] for _ in range(count))
        self._start(self._system, self._read_system)
        for index in range(count):
            self._start(self._gpus[index][0], partial(self._read_gpu, index))

    def _read_system(self) -> None:
        for place, call in (
            ("driver", "nvmlSystemGetDriverVersion"),
            ("nvml_version", "nvmlSystemGetNVMLVersion"),
        ):
            try:
                self._system.found[place] = self._system.call_nvml(call)
            except NvmlRefused:
                continue

    def _read_gpu(self, index: int) -> None:
        callers = self._gpus[index]
        handle = callers[0].call_nvml(OPEN_CALL, index)
        groups = [(group, NvmlCaller(self._nvml, handle)) for group in GROUPS]
        callers.extend(caller for _, caller in groups)
        for group, caller in groups:
            self._start(caller, partial(group, caller))


def _run_calls(caller: NvmlCaller, work: Callable[[], None]) -> None:
    try:
        work()
    except GpuLostError:
        return
    except NvmlRefused as refused:
        caller.errors.append(CallError(caller.call, refused.code, refused.text))
    except Exception as exc:  # noqa: BLE001 boundary: a bug in one reader must not lose the others
        text = f"{type(exc).__name__}: {exc}"
        caller.errors.append(CallError(caller.call, UNREADABLE, text))
    finally:
        caller.finished = True
