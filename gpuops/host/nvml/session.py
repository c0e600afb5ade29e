"""Ask NVML of all GPUs at once, in threads, until time is up.

ctypes lets other threads run while a call is in the driver, so a GPU that is slow or hung costs
the others nothing. A thread that gives no answer is left where it is; its asker names the call.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gpuops.host.nvml.caller import GpuLostError, NvmlCaller, NvmlRefused
from gpuops.host.nvml.calls import GROUPS
from gpuops.host.nvml.facts import UNREADABLE, CallError, NvmlSnapshot
from gpuops.host.nvml.snapshot import snapshot_of


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
