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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.config.resolve import environ
from gpuops.host.process.sidecar import Sidecar, start_sidecar
from gpuops.worker.bench.plan import BenchPlan
from gpuops.worker.bench.rounds import summarize
from gpuops.worker.bench.savers import (
    MEMCPY,
    OURS,
    BenchError,
    bytes_of,
    connect_only_rank,
    start_keeper,
)
from gpuops.worker.bench.subject import BenchJob, copy_into, warm_copies
from gpuops.worker.bench.victim import NOTE
from gpuops.worker.checkpointer import Checkpointer

_VICTIM_MODULE = "gpuops.worker.bench.victim"
KILL_S_MAX = 0.5
FIRST_MAPPING = "memcpy out of another process's memory"  # its pages are mapped here as it goes


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
    found = start_sidecar([sys.executable, "-P", "-m", _VICTIM_MODULE], environ())
    try:
        yield found
    finally:
        found.part()


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
        self._sidecar.say(self._request)
        reply = self._sidecar.hear().split()
        if len(reply) != 3 or reply[0] != "committed":
            raise BenchError("the worker that was to be killed saved nothing")
        time.sleep(after_s)
        os.kill(int(reply[1]), signal.SIGKILL)
        if self._sidecar.hear() != "ended":
            raise BenchError("the worker that was killed did not end")

    def saved(self) -> tuple[int, int]:
        """Return the last two steps that the killed worker had saved."""
        last, before = struct.unpack(NOTE, self._note.read_bytes())
        return last, before

    def restore(self) -> tuple[int, float]:
        """Restore as a new worker does; return the step and the seconds."""
        begun_s = time.perf_counter()
        checkpointer = Checkpointer(
            model=self.subject.model,
            optimizer=self.subject.optimizer,
            every=1,
            keeper=connect_only_rank(self._socket),
        )
        step = checkpointer.restore()
        took_s = time.perf_counter() - begun_s
        checkpointer.close()
        return step, took_s

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
    elif not worker.subject.is_filled(step):
        results.wrong += 1
    last, before = worker.saved()
    results.lost_max = max(results.lost_max, 0 if step >= last else 1 if step >= before else 2)


def recovery_rows(
    sidecar: Sidecar,
    plan: BenchPlan,
    folder: Path,
    rng: random.Random,
    on_message: Callable[[str], None],
) -> tuple[list[dict[str, Any]], KillResults]:
    """Return the seconds of each way to have the state back in a live process, and the kills."""
    subject = BenchJob(plan.nbytes, plan.n_tensors)
    worker = KilledWorker(sidecar, subject, plan.n_tensors, folder)
    results = KillResults()
    whole, saved = warm_copies(subject.tensors())

    def ours() -> float:
        kill_and_restore(worker, results, rng)
        return results.restore_s[-1]

    buffer = SharedBuffer.create("gpuops-bench", whole.nbytes)
    buffer.view[:] = bytes_of(whole)

    def first_mapping() -> None:
        with SharedBuffer.attach(os.dup(buffer.fd), writable=False) as mapped:
            flat = torch.frombuffer(mapped.view, dtype=whole.dtype)
            pieces = flat.split([tensor.numel() for tensor in saved])
            copy_into([t.view(-1) for t in subject.tensors()], list(pieces))

    ways: dict[str, Callable[[], float]] = {
        MEMCPY: lambda: _timed(lambda: copy_into(subject.tensors(), saved)),
        FIRST_MAPPING: lambda: _timed(first_mapping),
        "hash, one thread": lambda: _timed(lambda: compute_digest(buffer.view)),
        OURS: ours,
        **{name: _timer(way) for name, way in _torch_ways(subject, folder).items()},
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(plan.rounds + 1):
            names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in names:
                on_message(f"recovery {number} of {plan.rounds}: {name}")
                took[name].append(ways[name]())
    finally:
        worker.close()
        buffer.close()
    return [{"way": name, "seconds": summarize(seconds)} for name, seconds in took.items()], results


def _torch_ways(subject: BenchJob, folder: Path) -> dict[str, Callable[[], None]]:
    """Save once for each of torch's ways, warm in the page cache; return what loads it."""
    state = subject.state_dict()
    directory, file, tensors = folder / "dcp", folder / "state.pt", folder / "state.safetensors"
    dcp_save(state, checkpoint_id=directory, no_dist=True)
    torch.save(state, file)
    named = {f"{index}": tensor for index, tensor in enumerate(subject.tensors())}
    save_file(named, tensors)

    def by_dcp() -> None:
        dcp_load(subject.state_dict(), checkpoint_id=directory, no_dist=True)

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


def _timed(function: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def _timer(function: Callable[[], object]) -> Callable[[], float]:
    return lambda: _timed(function)


def kill_rows(
    sidecar: Sidecar,
    plan: BenchPlan,
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
