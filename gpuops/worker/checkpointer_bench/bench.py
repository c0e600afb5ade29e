"""The whole benchmark: which rows there are, in which order, and what becomes of the samples."""

import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuops.checkpoint.digest import digest_of
from gpuops.checkpoint.placement import place
from gpuops.checkpoint.recovery_odds import mixed_odds, simulated
from gpuops.config import environ, export
from gpuops.worker.checkpointer_bench.flips import flip_rows
from gpuops.worker.checkpointer_bench.goals import goals
from gpuops.worker.checkpointer_bench.plan import Plan
from gpuops.worker.checkpointer_bench.recovery import Kills, kill_rows, nursery, recovery_rows
from gpuops.worker.checkpointer_bench.rounds import Sample, figures, rounds, summary
from gpuops.worker.checkpointer_bench.savers import (
    Gpuops,
    Memcpy,
    RawWrite,
    Saver,
    TorchSave,
    bytes_of,
    dcp_savers,
)
from gpuops.worker.checkpointer_bench.subject import HEAD_BYTES, Subject

Tell = Callable[[str], None]
_PEER = "it is measured by tests/benchmarks/bench_checkpoint.py of the source tree"
Others = Callable[[Subject, Path], tuple[list[Saver], dict[str, str]]]


def run_bench(
    plan: Plan,
    parent: Path,
    tell: Tell,
    *,
    peer: Callable[[], Any] | None = None,
    others: Others | None = None,
) -> dict[str, Any]:
    """Measure what *plan* says, in a new directory below *parent*; return all figures.

    *peer* measures a fetch from another keeper; without it that row says where it is to be had.
    *others* makes more ways to save, and says which there are that cannot be made here, and why.

    Raises:
        CheckpointError: Something was not saved or restored, where it ought to have been.
    """
    torch.set_num_threads(1)
    # Of torch, once with each call: that there is one process is known.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    rng = random.Random(plan.seed)  # noqa: S311 no secret
    missing: dict[str, str] = {}
    more = others or (lambda _subject, _folder: ([], {}))
    found: dict[str, Any] = {"plan": asdict(plan), "torch": str(torch.__version__)}
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="gpuops-bench-", dir=parent, ignore_cleanup_errors=True
                )
            )
        )
        _join_alone(folder, stack)
        if "save" in plan.only:
            found["save"], why = _save_rows(plan, _new(folder, "save"), tell, more)
            missing |= why
        if "small" in plan.only:
            found["small"], why = _save_rows(_small(plan), _new(folder, "small"), tell, more)
            missing |= why
        if {"recovery", "kills"} & set(plan.only):
            home = stack.enter_context(nursery())
        if "recovery" in plan.only:
            rows, kills = recovery_rows(home, plan, _new(folder, "recovery"), rng, tell)
            found["recovery"] = {"ways": rows, "kills": _kills(kills)}
        if "kills" in plan.only:
            found["kills"] = _kills(kill_rows(home, plan, _new(folder, "kills"), rng, tell))
        if "flips" in plan.only:
            found["flips"] = flip_rows(
                plan.flips, plan.flip_nbytes, _new(folder, "flips"), rng, tell
            )
        if "odds" in plan.only:
            found["odds"] = odds_rows(rng)
        if "peer" in plan.only:
            found["peer"] = peer() if peer else None
    found["goals"] = goals(found)
    if "peer" in plan.only and not peer:
        missing["peer recovery"] = _PEER
    found["did_not_run"] = missing
    return found


def _new(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir(mode=0o700)
    return path


def _join_alone(folder: Path, stack: ExitStack) -> None:
    """Make the process group of one rank, without which DCP starts no process."""
    if dist.is_initialized():
        return
    if "MASTER_ADDR" not in environ():
        export({"MASTER_ADDR": "127.0.0.1"})
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)


def _small(plan: Plan) -> Plan:
    """Return *plan* with many small tensors, beside the weights that are trained."""
    nbytes = HEAD_BYTES + plan.small_tensors * plan.small_tensor_bytes
    return replace(plan, nbytes=nbytes, n_tensors=plan.small_tensors)


def _save_rows(
    plan: Plan, folder: Path, tell: Tell, others: Others
) -> tuple[dict[str, Any], dict[str, str]]:
    subject = Subject(plan.nbytes, plan.n_tensors, step_s=plan.step_s)
    memcpy = Memcpy(subject)
    savers: list[Saver] = [memcpy]
    with ExitStack() as stack:
        more, missing = others(subject, folder)
        savers += [
            RawWrite(memcpy.whole, folder),
            Gpuops(subject, folder),
            *dcp_savers(subject, folder),
            TorchSave(subject, folder),
            *more,
        ]
        for saver in savers:
            stack.callback(saver.close)
        samples = rounds(subject, savers, plan.rounds, plan.n_before, tell)
        hash_s = [_hash_s(memcpy) for _ in range(plan.rounds + 1)]
    return {
        "nbytes": subject.nbytes,
        "n_tensors": len(subject.tensors()),
        "hash": figures(hash_s),
        "ways": [{"way": name, **summary(each)} for name, each in samples.items()],
        "ratios": _ratios(samples, hash_s),
    }, missing


def _hash_s(memcpy: Memcpy) -> float:
    view = bytes_of(memcpy.whole)
    begun_s = time.perf_counter()
    digest_of(view)
    return time.perf_counter() - begun_s


def _ratios(samples: dict[str, list[Sample]], hash_s: Sequence[float]) -> dict[str, Any]:
    """Return ours over each other way, round by round: what slows one round slows both."""
    ours, memcpy, raw = samples["gpuops"], samples["memcpy"], samples["write + fsync"]
    found: dict[str, Any] = {
        "stall over " + name: figures(
            mine.stall_s / theirs.stall_s for mine, theirs in zip(ours, each, strict=True)
        )
        for name, each in samples.items()
        if name not in {"gpuops", "write + fsync"}
    }
    found["recoverable over memcpy + hash"] = figures(
        (mine.recoverable_s or 0.0) / (limit.stall_s + hashed)
        for mine, limit, hashed in zip(ours, memcpy, hash_s, strict=True)
    )
    found["durable over write + fsync"] = figures(
        mine.durable_s / limit.durable_s for mine, limit in zip(ours, raw, strict=True)
    )
    return found


def _kills(kills: Kills) -> dict[str, Any]:
    return {
        "n": kills.n,
        "unrecoverable": kills.unrecoverable,
        "wrong": kills.wrong,
        "lost_max": kills.lost_max,
        "restore": figures(kills.restore_s),
    }


def odds_rows(rng: random.Random, trials: int = 20_000) -> list[dict[str, Any]]:
    """Return the probabilities that GEMINI's paper prints for 16 nodes and 2 copies, counted."""
    placement = place(tuple(f"n{number}" for number in range(16)), 2)
    return [
        {
            "nodes": 16,
            "copies": 2,
            "lost": lost,
            "published": published,
            "exact": mixed_odds(16, 2, lost).probability,
            "simulated": simulated(placement, lost, trials, rng),
            "trials": trials,
        }
        for lost, published in ((2, 0.933), (3, 0.800))
    ]
