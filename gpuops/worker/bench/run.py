"""Rounds of saves and restores, all ways in turn; their durations, and the training's loss."""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.worker import map_ahead
from gpuops.worker.bench.figures import SaveSample, limit_goals, restore_figures, save_figures
from gpuops.worker.bench.limits import Limits, Surroundings, measure_between, timed
from gpuops.worker.bench.savers import (
    GPUOPS,
    HEAD_BYTES,
    MEMCPY,
    RAW_DIRECT,
    BenchError,
    BenchJob,
    BenchPlan,
    BenchSaver,
    GpuopsSaver,
    MemcpySaver,
    RawWriteSaver,
    bytes_of,
    connect_only_rank,
    copy_into,
    warm_copies,
)
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.state.parallel_copy import copy_parallel, copy_threads

OnMessage = Callable[[str], None]
SAVE_TIMEOUT_S = 600.0
NOT_MAPPED = f"{GPUOPS}, not mapped before"
FIRST_MAPPING = "memcpy out of another process's memory"  # its pages are mapped meanwhile
_POLL_S = 0.02


def run_bench(plan: BenchPlan, parent: Path, on_message: OnMessage) -> dict[str, Any]:
    """Measure according to *plan*, in a new directory below *parent*; return all figures.

    Raises:
        CheckpointError: Something was not saved or restored as it should have been.
    """
    torch.set_num_threads(1)
    # `restore_limits` maps memory read-only, and only reads it.
    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
    found: dict[str, Any] = {"plan": asdict(plan), "torch": str(torch.__version__)}
    with new_folder(parent) as folder:
        if "save" in plan.only:
            found["save"] = _save_row(plan, folder / "save", on_message)
        if "small" in plan.only:
            found["small"] = _save_row(small_plan(plan), folder / "small", on_message)
        if "recovery" in plan.only:
            found["recovery"] = _recovery_row(plan, folder / "recovery", on_message)
    return {**found, "goals": limit_goals(found)}


@contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """Yield a new directory below *parent*; remove it at the end."""
    with tempfile.TemporaryDirectory(
        prefix="gpuops-bench-", dir=parent, ignore_cleanup_errors=True
    ) as name:
        yield Path(name)


def small_plan(plan: BenchPlan) -> BenchPlan:
    """Return *plan* with many small tensors, next to the weights that are trained."""
    nbytes = HEAD_BYTES + plan.small_tensors * plan.small_tensor_bytes
    return replace(plan, nbytes=nbytes, n_tensors=plan.small_tensors)


class SaveLimits:
    """The limits of the hardware that gpuops is measured against: a copy, a hash, and a write."""

    def __init__(self, job: BenchJob, folder: Path, n_beside: int) -> None:
        self._job = job
        self._n_beside = n_beside
        self._memcpy = MemcpySaver(job)
        self.buffered = RawWriteSaver(self._memcpy.whole, folder, is_direct=False)
        self._direct = RawWriteSaver(self._memcpy.whole, folder, is_direct=True)
        self.samples: dict[str, SaveSample] = {}

    def measure(self) -> Limits:
        """Copy, hash and write the state once, each in the middle of training."""
        hash_s = timed(lambda: compute_digest(bytes_of(self._memcpy.whole)))
        for saver in (self._memcpy, self._direct):
            self.samples[saver.name] = measure_save(self._job, saver, 0, self._n_beside)
            saver.clean()
        return Limits(self.samples[MEMCPY].stall_s, hash_s, self.samples[RAW_DIRECT].durable_s)

    def close(self) -> None:
        """Shut down."""
        self._direct.close()


class SaveRounds:
    """The ways to save, each in its turn in each round; the first round is the cold one.

    ``samples`` are by name and number of the round. ``around``, by the number of the round, are the
    *limits* right before and right after gpuops saved.
    """

    def __init__(
        self, job: BenchJob, limits: SaveLimits, n_beside: int, on_message: OnMessage
    ) -> None:
        self.samples: dict[str, dict[int, SaveSample]] = {}
        self.around: dict[int, Surroundings] = {}
        self._job = job
        self._limits = limits
        self._n_beside = n_beside
        self._on_message = on_message
        self._steps = count(1)
        self._n_rounds = 0

    def run_round(self, savers: Sequence[BenchSaver]) -> None:
        """Save once in each way."""
        for saver in in_turns(savers, self._n_rounds):
            self._on_message(f"round {self._n_rounds}: {saver.name}")
            self.add(saver)
        self._n_rounds += 1

    def add(self, saver: BenchSaver, *, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Save once in that way; that of gpuops between the limits.

        Raises:
            BenchError: Nothing was saved.
        """

        def measure() -> SaveSample:
            step = next(self._steps)
            sample = measure_save(self._job, saver, step, self._n_beside, timeout_s=timeout_s)
            saver.clean()
            return sample

        if saver.name == GPUOPS:
            sample, self.around[self._n_rounds] = measure_between(measure, self._limits.measure)
            for name, limit in self._limits.samples.items():
                self._keep(name, limit)
        else:
            sample = measure()
        self._keep(saver.name, sample)

    def _keep(self, name: str, sample: SaveSample) -> None:
        self.samples.setdefault(name, {})[self._n_rounds] = sample


def _save_row(plan: BenchPlan, folder: Path, on_message: OnMessage) -> dict[str, Any]:
    folder.mkdir(mode=0o700)
    job = BenchJob(plan.nbytes, plan.n_tensors, step_s=plan.step_s)
    limits = SaveLimits(job, folder, plan.n_beside)
    savers = [limits.buffered, GpuopsSaver(job, folder)]
    with ExitStack() as stack:
        stack.callback(limits.close)
        for saver in savers:
            stack.callback(saver.close)
        rounds = SaveRounds(job, limits, plan.n_beside, on_message)
        for _ in range(plan.rounds + 1):
            rounds.run_round(savers)
    return save_figures(job, rounds.samples, rounds.around)


def in_turns(ways: Sequence[Any], number: int) -> Sequence[Any]:
    """Return all *ways*, rotated by one in each round: none always follows the same one."""
    first = number % len(ways)
    return [*ways[first:], *ways[:first]]


def measure_save(
    job: BenchJob,
    saver: BenchSaver,
    step: int,
    n_beside: int,
    *,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> SaveSample:
    """Save once in the middle of training.

    Raises:
        BenchError: Nothing was saved.
    """
    usual = [job.step() for _ in range(n_beside)]
    begun_s = time.perf_counter()
    saver.save(step)
    stall_s = time.perf_counter() - begun_s
    is_done = saver.is_done()
    durable_s = stall_s
    steps_s = [job.step()]
    while not is_done:
        end_s = time.perf_counter() + _POLL_S
        while time.perf_counter() < end_s:
            steps_s.append(job.step())
        # The time that `is_done` takes is not counted.
        durable_s = time.perf_counter() - begun_s
        if durable_s > timeout_s:
            raise BenchError(f"{saver.name}: nothing durable after {timeout_s:g} s")
        is_done = saver.is_done()
    saver.settle()
    usual += [job.step() for _ in range(n_beside)]
    usual_s = statistics.fmean(usual)
    slowed_s = sum(steps_s) - usual_s * len(steps_s)
    return SaveSample(
        stall_s=stall_s,
        extra_s=stall_s + steps_s[0] - usual_s,
        recoverable_s=saver.recoverable_s(stall_s, durable_s),
        durable_s=durable_s,
        loss=slowed_s / sum(steps_s) if len(steps_s) > 1 else None,
        lost_s=stall_s + slowed_s,
    )


def _recovery_row(plan: BenchPlan, folder: Path, on_message: OnMessage) -> dict[str, Any]:
    folder.mkdir(mode=0o700)
    job = BenchJob(plan.nbytes, plan.n_tensors)
    saver = GpuopsSaver(job, folder)
    try:
        saver.save(1)
        while not saver.is_done():
            time.sleep(_POLL_S)
        saver.checkpointer.close()
        ours = {
            GPUOPS: lambda: restore(job, saver.socket_path)[1],
            NOT_MAPPED: lambda: restore(job, saver.socket_path, maps_ahead=False)[1],
        }
        with restore_limits(job) as limits:
            return measure_restores({**limits, **ours}, plan.rounds, on_message)
    finally:
        saver.close()


def restore(job: BenchJob, socket_path: Path, *, maps_ahead: bool = True) -> tuple[int, float]:
    """Restore as a new worker does; return the step and the seconds.

    Under ``gpuops run`` a worker maps the state while it imports torch, which is not counted.
    """
    if maps_ahead:
        map_ahead.start(socket_path, rank=0, world=1).wait()
    begun_s = time.perf_counter()
    checkpointer = Checkpointer(
        model=job.model,
        optimizer=job.optimizer,
        every=1,
        keeper=connect_only_rank(socket_path),
    )
    step = checkpointer.restore()
    took_s = time.perf_counter() - begun_s
    checkpointer.close()
    return step, took_s


@contextmanager
def restore_limits(job: BenchJob) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield the limits that memory sets for a restore of *job*: copies, and a hash.

    Copies have as many threads as a restore, unless their name says one.
    """
    n_threads = copy_threads(1)
    whole, saved = warm_copies(job.tensors())
    buffer = SharedBuffer.create("gpuops-bench", whole.nbytes)
    buffer.view[:] = bytes_of(whole)

    def first_mapping() -> None:
        with SharedBuffer.attach(os.dup(buffer.fd), writable=False) as mapped:
            flat = torch.frombuffer(mapped.view, dtype=whole.dtype)
            pieces = flat.split([tensor.numel() for tensor in saved])
            copy_parallel([t.view(-1) for t in job.tensors()], pieces, n_threads)

    try:
        yield {
            MEMCPY: lambda: timed(lambda: copy_parallel(job.tensors(), saved, n_threads)),
            "memcpy, one thread": lambda: timed(lambda: copy_into(job.tensors(), saved)),
            FIRST_MAPPING: lambda: timed(first_mapping),
            "hash, one thread": lambda: timed(lambda: compute_digest(buffer.view)),
        }
    finally:
        buffer.close()


def measure_restores(
    ways: Mapping[str, Callable[[], float]], n_rounds: int, on_message: OnMessage
) -> dict[str, Any]:
    """Return the figures of each way to restore the state in a live process, in turns.

    That of gpuops is measured between two copies.
    """
    took: dict[str, list[float]] = {name: [] for name in ways}
    around: dict[int, Surroundings] = {}
    for number in range(n_rounds + 1):
        for name in in_turns([name for name in ways if name != MEMCPY], number):
            on_message(f"recovery {number} of {n_rounds}: {name}")
            if name == GPUOPS:
                seconds, around[number] = measure_between(
                    ways[GPUOPS], lambda: Limits(ways[MEMCPY]())
                )
                took[MEMCPY].append(around[number].mean.memcpy_s)
            else:
                seconds = ways[name]()
            took[name].append(seconds)
    return restore_figures(took, around)
