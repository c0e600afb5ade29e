"""Rounds of saves and restores, all ways in turn; their durations, and the training's loss."""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.worker.bench.savers import (
    GPUOPS,
    HEAD_BYTES,
    MEMCPY,
    RAW,
    RAW_DIRECT,
    SOURCE_TREE_ROWS,
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

OnMessage = Callable[[str], None]
SAVE_TIMEOUT_S = 600.0
FIRST_MAPPING = "memcpy out of another process's memory"  # its pages are mapped meanwhile
_POLL_S = 0.02
_ELSEWHERE = "only tests/benchmarks/bench_checkpoint.py of the source tree measures this"


@dataclass(frozen=True, slots=True)
class SaveSample:
    """One save.

    ``stall_s``: the duration of the call. ``extra_s``: the step with the save in it, less the mean
    of the steps just before and just after the save, since a shared machine drifts.
    ``recoverable_s`` and ``durable_s`` count from the end of the training step. ``loss``: how much
    slower the steps between call and durability were, as a share of their rate; None where there
    were none. ``lost_s``: all the training time that the save took.
    """

    stall_s: float
    extra_s: float
    recoverable_s: float | None
    durable_s: float
    loss: float | None
    lost_s: float


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
    elsewhere = [row for row in SOURCE_TREE_ROWS if row in plan.only]
    names = ["peer recovery" if row == "peer" else row for row in elsewhere]
    return {
        **found,
        **dict.fromkeys(elsewhere),
        "goals": limit_goals(found),
        "did_not_run": dict.fromkeys(names, _ELSEWHERE),
    }


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


def limit_savers(job: BenchJob, folder: Path) -> tuple[MemcpySaver, list[BenchSaver]]:
    """Return gpuops and the limits of the hardware that it is measured against."""
    memcpy = MemcpySaver(job)
    raw = [RawWriteSaver(memcpy.whole, folder, is_direct=is_direct) for is_direct in (False, True)]
    return memcpy, [memcpy, *raw, GpuopsSaver(job, folder)]


def _save_row(plan: BenchPlan, folder: Path, on_message: OnMessage) -> dict[str, Any]:
    folder.mkdir(mode=0o700)
    job = BenchJob(plan.nbytes, plan.n_tensors, step_s=plan.step_s)
    memcpy, savers = limit_savers(job, folder)
    samples: dict[str, dict[int, SaveSample]] = {saver.name: {} for saver in savers}
    hash_s: list[float] = []
    with ExitStack() as stack:
        for saver in savers:
            stack.callback(saver.close)
        for number in range(plan.rounds + 1):
            for saver in in_turns(savers, number):
                on_message(f"round {number}: {saver.name}")
                step = 1 + sum(len(each) for each in samples.values())
                samples[saver.name][number] = measure_save(job, saver, step, plan.n_beside)
                saver.clean()
            hash_s.append(timed(lambda: compute_digest(bytes_of(memcpy.whole))))
    return save_figures(job, samples, hash_s)


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


def save_figures(
    job: BenchJob, samples: Mapping[str, Mapping[int, SaveSample]], hash_s: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of all ways, and ratios round by round: a slow round slows both ways."""
    ours, memcpy = samples[GPUOPS], samples[MEMCPY]
    ratios: dict[str, Any] = {
        "stall over " + name: summarize(ours[at].stall_s / each[at].stall_s for at in each)
        for name, each in samples.items()
        if name not in {GPUOPS, RAW, RAW_DIRECT}
    }
    ratios["recoverable over memcpy + hash"] = summarize(
        (sample.recoverable_s or 0.0) / (memcpy[at].stall_s + hash_s[at])
        for at, sample in ours.items()
    )
    for limit in (RAW, RAW_DIRECT):
        if limit in samples:
            ratios["durable over " + limit] = summarize(
                sample.durable_s / samples[limit][at].durable_s for at, sample in ours.items()
            )
    return {
        "nbytes": job.nbytes,
        "n_tensors": len(job.tensors()),
        "hash": summarize(hash_s),
        "ways": [{"way": name, **_summaries(each.values())} for name, each in samples.items()],
        "ratios": ratios,
    }


def _summaries(samples: Iterable[SaveSample]) -> dict[str, Any]:
    fields = [asdict(each) for each in samples]
    return {name: summarize(each[name] for each in fields) for name in fields[0]}


def summarize(values: Iterable[float | None]) -> dict[str, Any]:
    """Return the first value separately, and median and extremes of the others."""
    first, *rest = list(values)
    there = [value for value in rest if value is not None]
    return {
        "first": first,
        "median": statistics.median(there) if there else None,
        "min": min(there, default=None),
        "max": max(there, default=None),
        "n": len(there),
    }


def _recovery_row(plan: BenchPlan, folder: Path, on_message: OnMessage) -> dict[str, Any]:
    folder.mkdir(mode=0o700)
    job = BenchJob(plan.nbytes, plan.n_tensors)
    saver = GpuopsSaver(job, folder)
    try:
        saver.save(1)
        while not saver.is_done():
            time.sleep(_POLL_S)
        saver.checkpointer.close()
        ours = {GPUOPS: lambda: restore(job, saver.socket_path)[1]}
        with restore_limits(job) as limits:
            ways = restore_figures({**limits, **ours}, plan.rounds, on_message)
        return {"ways": ways, "kills": None}
    finally:
        saver.close()


def restore(job: BenchJob, socket_path: Path) -> tuple[int, float]:
    """Restore as a new worker does; return the step and the seconds."""
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
    """Yield the limits that memory sets for a restore of *job*: copies, and a hash."""
    whole, saved = warm_copies(job.tensors())
    buffer = SharedBuffer.create("gpuops-bench", whole.nbytes)
    buffer.view[:] = bytes_of(whole)

    def first_mapping() -> None:
        with SharedBuffer.attach(os.dup(buffer.fd), writable=False) as mapped:
            flat = torch.frombuffer(mapped.view, dtype=whole.dtype)
            pieces = flat.split([tensor.numel() for tensor in saved])
            copy_into([t.view(-1) for t in job.tensors()], list(pieces))

    try:
        yield {
            MEMCPY: lambda: timed(lambda: copy_into(job.tensors(), saved)),
            FIRST_MAPPING: lambda: timed(first_mapping),
            "hash, one thread": lambda: timed(lambda: compute_digest(buffer.view)),
        }
    finally:
        buffer.close()


def restore_figures(
    ways: Mapping[str, Callable[[], float]], n_rounds: int, on_message: OnMessage
) -> list[dict[str, Any]]:
    """Return the seconds of each way to restore the state in a live process."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(n_rounds + 1):
        for name in in_turns(list(ways), number):
            on_message(f"recovery {number} of {n_rounds}: {name}")
            took[name].append(ways[name]())
    return [{"way": name, "seconds": summarize(seconds)} for name, seconds in took.items()]


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that *function* takes."""
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def limit_goals(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each limit of the hardware the measurement, the goal, and whether it is met."""
    rows = []

    def at_most(metric: str, beside: str, value: float | None, bound: float) -> None:
        is_met = value is not None and value <= bound
        goal = f"at most {bound:g}"
        rows.append(
            {"metric": metric, "beside": beside, "value": value, "goal": goal, "met": is_met}
        )

    if "save" in found:
        ratios = {name: each["median"] for name, each in found["save"]["ratios"].items()}
        loss = {way["way"]: way["loss"]["median"] for way in found["save"]["ways"]}
        at_most("stall", MEMCPY, ratios["stall over memcpy"], 1.15)
        at_most("training slower while persisting", "no save", loss[GPUOPS], 0.08)
        at_most("recoverable", "memcpy + hash", ratios["recoverable over memcpy + hash"], 1.3)
        at_most("durable", RAW, ratios["durable over write + fsync"], 1.15)
    if "recovery" in found:
        took = {way["way"]: way["seconds"]["median"] for way in found["recovery"]["ways"]}
        at_most("recovery", MEMCPY, took[GPUOPS] / took[MEMCPY], 1.3)
    return rows
