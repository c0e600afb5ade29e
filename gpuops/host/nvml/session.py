"""Ask NVML of all GPUs at once, in threads, until time is up.

ctypes lets other threads run while a call is in the driver, so a GPU that is slow or hung costs
the others nothing. A thread that gives no answer is left where it is; its asker names the call.
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
    UNREADABLE,
    CallError,
    GpuProcess,
    NvmlGpu,
    NvmlSnapshot,
    NvmlStatus,
)
from gpuops.host.nvml.snapshot import snapshot_of
from gpuops.host.process import probe
from gpuops.host.process.run_with_deadline import abandoned
from gpuops.host.records import from_json, to_json

# Of the child's time, kept for writing what there is down while a call still hangs.
_WRITE_S = 0.3
_WRITE_SHARE = 0.25


def read_nvml(deadline_s: float, root: Path = Path("/")) -> NvmlSnapshot:
    """Return what NVML says within *deadline_s*; never raises and never hangs.

    A call that hangs keeps its thread, and with it the child; what the others were told is here
    all the same. Names of processes are those of *root*.
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
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"asking NVML: {exc}")
    return snapshot_from(probe.run(child), root)


def snapshot_from(outcome: probe.ProbeOutcome, root: Path) -> NvmlSnapshot:
    """Return what the child of *outcome* said of NVML, or what its silence means.

    What it said counts although it could not end: a thread in the kernel keeps its process.
    """
    try:
        said = from_json(NvmlSnapshot, probe.last_words(outcome), "the NVML snapshot")
    except ProbeError as exc:
        late = outcome.ending is not probe.ProbeEnd.ENDED
        return NvmlSnapshot(
            status=NvmlStatus.TIMEOUT if late else NvmlStatus.CRASH,
            error=f"NVML {exc}" if late else f"asking NVML: {exc}",
            state=outcome.state,
            hung_s=round(outcome.elapsed_s, 3) if late else None,
        )
    except (ConfigError, ValueError) as exc:
        return NvmlSnapshot(status=NvmlStatus.CRASH, error=f"asking NVML: {exc}")
    return _named(replace(said, state="D" if outcome.state == "D" else said.state), root)


def snapshot_here(until_s: float) -> NvmlSnapshot:
    """Return what NVML says to this very process until *until_s* (monotonic).

    Call it in a child: threads that hang outlive it, and loading the library can block.
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
    """Return what the kernel calls it; a container sees no other processes, or all as pid 0."""
    try:
        text = (root / f"proc/{process.pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.strip() or None


class NvmlSession:
    """One round of questions to NVML, through pynvml."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 a module without types
        self._nvml = nvml
        self._opening = NvmlCaller(nvml)
        self._system = NvmlCaller(nvml)
        self._gpus: list[list[NvmlCaller]] = []
        self._threads: list[threading.Thread] = []

    def run(self, until_s: float) -> NvmlSnapshot:
        """Return what came until *until_s* (monotonic)."""
        self._start(self._opening, self._open)
        # A thread starts others before it ends, so the list has grown when its `join` returns.
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return snapshot_of(self._opening, self._system, self._gpus, time.monotonic())

    def _start(self, asker: NvmlCaller, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=_ask, args=(asker, work), daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # This machine gives no more threads: one after another is slower, and as true.
            _ask(asker, work)
        else:
            self._threads.append(thread)

    def _open(self) -> None:
        self._opening.ask("nvmlInit")
        count = self._opening.ask("nvmlDeviceGetCount")
        self._gpus.extend([NvmlCaller(self._nvml)] for _ in range(count))
        self._start(self._system, self._ask_system)
        for index in range(count):
            self._start(self._gpus[index][0], partial(self._ask_gpu, index))

    def _ask_system(self) -> None:
        for place, call in (
            ("driver", "nvmlSystemGetDriverVersion"),
            ("nvml_version", "nvmlSystemGetNVMLVersion"),
        ):
            try:
                self._system.found[place] = self._system.ask(call)
            except NvmlRefused:
                continue

    def _ask_gpu(self, index: int) -> None:
        askers = self._gpus[index]
        handle = askers[0].ask("nvmlDeviceGetHandleByIndex", index)
        groups = [(group, NvmlCaller(self._nvml, handle)) for group in GROUPS]
        askers.extend(asker for _, asker in groups)
        for group, asker in groups:
            self._start(asker, partial(group, asker))


def _ask(asker: NvmlCaller, work: Callable[[], None]) -> None:
    try:
        work()
    except GpuLostError:
        return
    except NvmlRefused as refused:
        asker.errors.append(CallError(asker.call, refused.code, refused.text))
    except Exception as exc:  # noqa: BLE001 boundary: a bug in one reader must not lose the others
        text = f"{type(exc).__name__}: {exc}"
        asker.errors.append(CallError(asker.call, UNREADABLE, text))
    finally:
        asker.finished = True
