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

from gpuops.checkpoint.arena import SlotMemory
from gpuops.checkpoint.digest import digest_of
from gpuops.config import environ
from gpuops.host.companion import Companion, start_companion
from gpuops.worker.checkpointer import Checkpointer
from gpuops.worker.checkpointer_bench.plan import Plan
from gpuops.worker.checkpointer_bench.rounds import figures
from gpuops.worker.checkpointer_bench.savers import (
    MEMCPY,
    OURS,
    BenchError,
    bytes_of,
    rank_line,
    start_keeper,
)
from gpuops.worker.checkpointer_bench.subject import Subject, copy_into, warm_copies
from gpuops.worker.checkpointer_bench.victim import NOTE

_VICTIM = "gpuops.worker.checkpointer_bench.victim"
KILL_S_MAX = 0.5
FIRST_MAPPING = "memcpy out of another process's memory"  # its pages are mapped here as it goes


@dataclass(slots=True)
class Kills:
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
def nursery() -> Iterator[Companion]:
    """Yield what the workers that are to be killed come from."""
    found = start_companion([sys.executable, "-P", "-m", _VICTIM], environ())
    try:
        yield found
    finally:
        found.part()


class Patient:
    """A subject whose worker is killed again and again, and the keeper that outlives it."""

    def __init__(
        self,
        nursery: Companion,
        subject: Subject,
        n_tensors: int,
        folder: Path,
        directory: Path | None = None,
    ) -> None:
        self.subject = subject
        self._nursery = nursery
        self._socket, self._end = start_keeper(folder / "keeper")
        self._note = folder / "saved"
        self._told = json.dumps(
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
        self._nursery.say(self._told)
        said = self._nursery.hear().split()
        if len(said) != 3 or said[0] != "committed":
            raise BenchError("the worker that was to be killed saved nothing")
        time.sleep(after_s)
        os.kill(int(said[1]), signal.SIGKILL)
        if self._nursery.hear() != "ended":
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
            keeper=rank_line(self._socket),
        )
        step = checkpointer.restore()
        took_s = time.perf_counter() - begun_s
        checkpointer.close()
        return step, took_s

    def close(self) -> None:
        """End the keeper."""
        self._end()


def kill_and_restore(patient: Patient, kills: Kills, rng: random.Random) -> None:
    """Kill a worker once, at a random moment of its saving, and restore; note what came of it."""
    patient.kill(rng.uniform(0, KILL_S_MAX))
    step, took_s = patient.restore()
    kills.n += 1
    kills.restore_s.append(took_s)
    if step == 0:
        kills.unrecoverable += 1
    elif not patient.subject.is_filled(step):
        kills.wrong += 1
    last, before = patient.saved()
    kills.lost_max = max(kills.lost_max, 0 if step >= last else 1 if step >= before else 2)


def recovery_rows(
    home: Companion,
    plan: Plan,
    folder: Path,
    rng: random.Random,
    tell: Callable[[str], None],
) -> tuple[list[dict[str, Any]], Kills]:
    """Return the seconds of each way to have the state back in a live process, and the kills."""
    subject = Subject(plan.nbytes, plan.n_tensors)
    patient = Patient(home, subject, plan.n_tensors, folder)
    kills = Kills()
    whole, saved = warm_copies(subject.tensors())

    def ours() -> float:
        kill_and_restore(patient, kills, rng)
        return kills.restore_s[-1]

    other = SlotMemory.create("gpuops-bench", whole.nbytes)
    other.view[:] = bytes_of(whole)

    def first_mapping() -> None:
        with SlotMemory.attach(os.dup(other.fd), writable=False) as mapped:
            flat = torch.frombuffer(mapped.view, dtype=whole.dtype)
            pieces = flat.split([tensor.numel() for tensor in saved])
            copy_into([t.view(-1) for t in subject.tensors()], list(pieces))

    ways: dict[str, Callable[[], float]] = {
        MEMCPY: lambda: _timed(lambda: copy_into(subject.tensors(), saved)),
        FIRST_MAPPING: lambda: _timed(first_mapping),
        "hash, one thread": lambda: _timed(lambda: digest_of(other.view)),
        OURS: ours,
        **{name: _timer(way) for name, way in _torch_ways(subject, folder).items()},
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(plan.rounds + 1):
            names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            for name in names:
                tell(f"recovery {number} of {plan.rounds}: {name}")
                took[name].append(ways[name]())
    finally:
        patient.close()
        other.close()
    return [{"way": name, "seconds": figures(seconds)} for name, seconds in took.items()], kills


def _torch_ways(subject: Subject, folder: Path) -> dict[str, Callable[[], None]]:
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


def _timed(act: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    act()
    return time.perf_counter() - begun_s


def _timer(act: Callable[[], object]) -> Callable[[], float]:
    return lambda: _timed(act)


def kill_rows(
    home: Companion,
    plan: Plan,
    folder: Path,
    rng: random.Random,
    tell: Callable[[str], None],
) -> Kills:
    """Kill a worker with a small state many times, while it saves and while it persists."""
    subject = Subject(plan.kill_nbytes, plan.kill_tensors)
    kills = Kills()
    patient = Patient(home, subject, plan.kill_tensors, folder, folder / "persistent")
    try:
        for number in range(plan.kills):
            tell(f"kill {number + 1} of {plan.kills}")
            kill_and_restore(patient, kills, rng)
    finally:
        patient.close()
    return kills
