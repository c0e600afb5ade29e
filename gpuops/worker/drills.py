"""Injects a fault into this worker at a step, to test that the run notices it.

Only with ``gpuops run --allow-drills``; see `gpuops.wire.worker_drill`.
"""

import ctypes
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from gpuops.wire.worker_drill import ALONE_KINDS, SLOW_KINDS, VARIABLE, WorkerDrill, parse_drill

_STEPS_KEPT = 20
_ELEMENTS = 8


def drill_of(env: Mapping[str, str]) -> "DrillHook | None":
    """Return the fault that *env* of a worker names, None if there is none in its generation.

    Raises:
        UsageError, KeyError, ValueError: It names none, or *env* is not that of a worker.
    """
    if not env.get(VARIABLE):
        return None
    drill = parse_drill(env[VARIABLE])
    if drill.generation not in {None, int(env["GPUOPS_GENERATION"])}:
        return None
    return DrillHook(drill, rank=int(env["RANK"]), n_ranks=int(env["WORLD_SIZE"]))


class DrillHook:
    """Called after each step of an optimizer, on all ranks: a collective needs all of them."""

    def __init__(
        self,
        drill: WorkerDrill,
        *,
        rank: int,
        n_ranks: int,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._drill = drill
        self._rank = rank
        self._n_ranks = n_ranks
        self._clock_s = clock_s
        self._sleep = sleep
        self._step = 0
        self._ended_s: float | None = None
        self._normal_s: deque[float] = deque(maxlen=_STEPS_KEPT)

    def __call__(self) -> None:
        """Count a step, and inject the fault if it is due."""
        self._step += 1
        if self._drill.kind in SLOW_KINDS:
            self._slow_down()
        elif self._step == self._drill.step:
            self._inject()

    def _slow_down(self) -> None:
        """Sleep for a share of the median time of a step before the fault."""
        now_s = self._clock_s()
        if self._ended_s is not None and self._step <= self._drill.step:
            self._normal_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        share = self._drill.extra_share(self._rank, self._step, self._n_ranks)
        if share and self._normal_s:
            self._sleep(share * statistics.median(self._normal_s))

    def _inject(self) -> None:
        is_meant = self._drill.is_meant(self._rank)
        if self._drill.kind not in ALONE_KINDS:
            self._call_differently(is_meant=is_meant)
        elif is_meant:
            self._stop_alone()

    def _stop_alone(self) -> None:
        drill = self._drill
        match drill.kind:
            case "hold-lock":
                _hold_lock(drill.seconds)
            case "stuck-loader":
                iterator = _torch().utils.data.dataloader._BaseDataLoaderIter  # noqa: SLF001
                iterator.__next__ = self._no_batch
            case "receive-alone":
                source = (self._rank + 1) % self._n_ranks
                _torch().distributed.recv(_ones(_ELEMENTS), src=source)
            case _:
                self._sleep(drill.seconds)

    def _no_batch(self) -> object:
        self._sleep(self._drill.seconds)
        raise StopIteration

    def _call_differently(self, *, is_meant: bool) -> None:
        match self._drill.kind:
            case "skip-collective":
                group = _new_group()
                if not is_meant:
                    _all_reduce(group, _ones(_ELEMENTS))
            case "cross-groups":
                groups = [_new_group(), _new_group()]
                for group in reversed(groups) if is_meant else groups:
                    _all_reduce(group, _ones(_ELEMENTS))
            case "other-operation" if is_meant:
                _torch().distributed.broadcast(_ones(_ELEMENTS), src=0, group=_new_group())
            case "other-shape" if is_meant:
                _all_reduce(_new_group(), _ones(2 * _ELEMENTS))
            case "other-dtype" if is_meant:
                _all_reduce(_new_group(), _ones(_ELEMENTS, "float64"))
            case _:
                _all_reduce(_new_group(), _ones(_ELEMENTS))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _hold_lock(seconds: float) -> None:
    """Wait for a mutex of our own with the interpreter's lock held; no signal ends that early."""
    library = ctypes.PyDLL(None)  # it does not give the lock back for the time of a call
    mutex = ctypes.create_string_buffer(64)
    until = _TimeSpec(int(time.time() + seconds), 0)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(until))


def _torch() -> Any:  # noqa: ANN401 imported by the program, once it makes a step
    import torch

    return torch


def _new_group() -> object:
    distributed = _torch().distributed
    return distributed.new_group(range(distributed.get_world_size()))


def _all_reduce(group: object, tensor: object) -> None:
    _torch().distributed.all_reduce(tensor, group=group)


def _ones(n_elements: int, dtype: str = "float32") -> object:
    torch = _torch()
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    return torch.ones(n_elements, dtype=getattr(torch, dtype), device=device)
