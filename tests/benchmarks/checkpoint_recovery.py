"""A worker is really killed, at any moment; then its state is restored in a process that lives."""

import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_victim
import torch
from checkpoint_plan import PeerBenchPlan
from checkpoint_torch import state_dict_of
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gpuops.config.resolve import environ
from gpuops.host.process.sidecar import Sidecar, start_sidecar
from gpuops.worker.bench.limits import timed
from gpuops.worker.bench.run import NOT_MAPPED, measure_restores, restore, restore_limits
from gpuops.worker.bench.savers import (
    GPUOPS,
    BenchError,
    BenchJob,
    copy_into,
    start_keeper,
)

KILL_S_MAX = 0.5


@dataclass(slots=True)
class KillResults:
    """What came of kills.

    ``wrong``: not every number restored was that of the step. ``lost_max``: how many of the last
    saves whose call had returned were not restored, at most; 2 is two or more.
    """

    n: int = 0
    unrecoverable: int = 0
    wrong: int = 0
    lost_max: int = 0
    restore_s: list[float] = field(default_factory=list)


@contextmanager
def victim_sidecar() -> Iterator[Sidecar]:
    """Yield what the workers that are to be killed come from."""
    found = start_sidecar([sys.executable, checkpoint_victim.__file__], environ())
    try:
        yield found
    finally:
        found.wait()


class KilledWorker:
    """A subject whose worker is killed again and again, and the keeper that outlives it."""

    def __init__(
        self,
        sidecar: Sidecar,
        subject: BenchJob,
        n_tensors: int,
        folder: Path,
        directory: Path | None = None,
    ) -> None:
        self.subject = subject
        self._sidecar = sidecar
        self._socket, self._end = start_keeper(folder / "keeper")
        self._note = folder / "saved"
        self._request = json.dumps(
            {
                "socket": str(self._socket),
                "nbytes": subject.nbytes,
                "n_tensors": n_tensors,
                "directory": directory and str(directory),
                "note": str(self._note),
            }
        )

    def kill(self, after_s: float) -> None:
        """Start a worker, and kill it *after_s* after its first commit."""
        self._sidecar.write_line(self._request)
        reply = self._sidecar.read_line().split()
        if len(reply) != 3 or reply[0] != "committed":
            raise BenchError("the worker that was to be killed saved nothing")
        time.sleep(after_s)
        os.kill(int(reply[1]), signal.SIGKILL)
        if self._sidecar.read_line() != "ended":
            raise BenchError("the worker that was killed did not end")

    def saved(self) -> tuple[int, int]:
        """Return the last two steps that the killed worker had saved."""
        last, before = struct.unpack(checkpoint_victim.NOTE, self._note.read_bytes())
        return last, before

    def restore(self, *, maps_ahead: bool = True) -> tuple[int, float]:
        """Restore as a new worker does; return the step and the seconds."""
        return restore(self.subject, self._socket, maps_ahead=maps_ahead)

    def close(self) -> None:
        """End the keeper."""
        self._end()


def kill_and_restore(worker: KilledWorker, results: KillResults, rng: random.Random) -> None:
    """Kill a worker once, at a random moment of its saving, and restore; note what came of it."""
    worker.kill(rng.uniform(0, KILL_S_MAX))
    step, took_s = worker.restore()
    results.n += 1
    results.restore_s.append(took_s)
    if step == 0:
        results.unrecoverable += 1
    elif not checkpoint_victim.is_filled(worker.subject, step):
        results.wrong += 1
    last, before = worker.saved()
    results.lost_max = max(results.lost_max, 0 if step >= last else 1 if step >= before else 2)


def recovery_rows(
    sidecar: Sidecar,
    plan: PeerBenchPlan,
    folder: Path,
    rng: random.Random,
    on_message: Callable[[str], None],
) -> tuple[dict[str, Any], KillResults]:
    """Return the figures of each way to have the state back in a live process, and the kills."""
    subject = BenchJob(plan.nbytes, plan.n_tensors)
    worker = KilledWorker(sidecar, subject, plan.n_tensors, folder)
    results = KillResults()

    def ours() -> float:
        kill_and_restore(worker, results, rng)
        return results.restore_s[-1]

    def not_mapped() -> float:
        return worker.restore(maps_ahead=False)[1]

    torch_ways = {name: partial(timed, way) for name, way in _torch_ways(subject, folder).items()}
    try:
        with restore_limits(subject) as limits:
            ways = {**limits, GPUOPS: ours, NOT_MAPPED: not_mapped, **torch_ways}
            return measure_restores(ways, plan.rounds, on_message), results
    finally:
        worker.close()


def _torch_ways(subject: BenchJob, folder: Path) -> dict[str, Callable[[], None]]:
    """Save once for each of torch's ways, warm in the page cache; return what loads it."""
    state = state_dict_of(subject)
    directory, file, tensors = folder / "dcp", folder / "state.pt", folder / "state.safetensors"
    dcp_save(state, checkpoint_id=directory, no_dist=True)
    torch.save(state, file)
    named = {f"{index}": tensor for index, tensor in enumerate(subject.tensors())}
    save_file(named, tensors)

    def by_dcp() -> None:
        dcp_load(state_dict_of(subject), checkpoint_id=directory, no_dist=True)

    def by_torch(*, mmap: bool) -> None:
        found = torch.load(file, mmap=mmap)
        with torch.no_grad():
            copy_into(subject.tensors(), _tensors_of(found))

    def by_safetensors() -> None:
        found = load_file(tensors)
        with torch.no_grad():
            copy_into(subject.tensors(), [found[name] for name in named])

    return {
        "dcp.load": by_dcp,
        "torch.load": lambda: by_torch(mmap=False),
        "torch.load, mmap": lambda: by_torch(mmap=True),
        "safetensors load_file": by_safetensors,
    }


def _tensors_of(found: dict[str, Any]) -> list[torch.Tensor]:
    momenta = found["optimizer"]["state"]
    return [
        *found["model"].values(),
        *(momenta[index]["momentum_buffer"] for index in sorted(momenta)),
    ]


def kill_rows(
    sidecar: Sidecar,
    plan: PeerBenchPlan,
    folder: Path,
    rng: random.Random,
    on_message: Callable[[str], None],
) -> KillResults:
    """Kill a worker with a small state many times, while it saves and while it persists."""
    subject = BenchJob(plan.kill_nbytes, plan.kill_tensors)
    results = KillResults()
    worker = KilledWorker(sidecar, subject, plan.kill_tensors, folder, folder / "persistent")
    try:
        for number in range(plan.kills):
            on_message(f"kill {number + 1} of {plan.kills}")
            kill_and_restore(worker, results, rng)
    finally:
        worker.close()
    return results
