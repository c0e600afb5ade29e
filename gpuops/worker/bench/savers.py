"""The ways to save that are measured: gpuops, and the limits of memory and disk."""

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient, connect_rank
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.types import CheckpointError
from gpuops.worker.checkpointer import Checkpointer

HEAD_WIDTH = 128
_N_HEAD = 4  # two weights and their momenta
_FLOAT_BYTES = 4
HEAD_BYTES = _N_HEAD * HEAD_WIDTH**2 * _FLOAT_BYTES
_TRIES = 5


class BenchJob:
    """*n_tensors* tensors, half of them momenta, of *nbytes* together; one step takes *step_s*."""

    def __init__(self, nbytes: int, n_tensors: int, *, step_s: float = 0.0) -> None:
        n_body = max(n_tensors - _N_HEAD, 2) // 2
        count = max((nbytes - HEAD_BYTES) // (2 * n_body * _FLOAT_BYTES), 1)
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        self.model.body = nn.ParameterList(torch.zeros(count) for _ in range(n_body))
        self._weights = [
            nn.Parameter(torch.randn(HEAD_WIDTH, HEAD_WIDTH, generator=generator) / HEAD_WIDTH)
            for _ in range(2)
        ]
        self.model.head = nn.ParameterList(self._weights)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9, momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._batch = torch.randn(HEAD_WIDTH, HEAD_WIDTH, generator=generator)
        self._n_passes = 1
        if step_s:
            self._n_passes = max(round(step_s / min(self.step() for _ in range(_TRIES))), 1)

    def tensors(self) -> list[torch.Tensor]:
        parameters = list(self.model.parameters())
        momenta = [self.optimizer.state[each]["momentum_buffer"] for each in parameters]
        return [each.detach() for each in parameters] + momenta

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def step(self) -> float:
        """Make a training step; return its seconds."""
        begun_s = time.perf_counter()
        first, second = self._weights
        for _ in range(self._n_passes):
            loss = ((self._batch @ first).relu() @ second).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun_s


def warm_copies(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return memory of all *tensors* together, populated, and views of it shaped like them."""
    whole = torch.ones(sum(tensor.numel() for tensor in tensors))
    pieces = whole.split([tensor.numel() for tensor in tensors])
    return whole, [piece.view(like.shape) for piece, like in zip(pieces, tensors, strict=True)]


def copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes: as fast as torch copies memory."""
    torch._foreach_copy_(targets, sources)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


SCHEMA = "gpuops.checkpoint-bench/1"
ROWS = ("save", "small", "recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """The plan of the measurements; ``only`` are names of `ROWS`. Each row has one more cold round.

    ``n_beside``: steps before and after a save that it is compared with.
    """

    nbytes: int = 2 * 10**9
    n_tensors: int = 300
    small_tensors: int = 20_000
    small_tensor_bytes: int = 64
    rounds: int = 7
    step_s: float = 0.01
    n_beside: int = 30
    only: tuple[str, ...] = ROWS


MEMCPY, RAW, RAW_DIRECT = "memcpy", "write + fsync", "write past the cache + fsync"
GPUOPS = "gpuops"
_WRITE_BYTES = 16 * 2**20
_LEASE_S = 60.0
_READ_BACK_TIMEOUT_S = 600.0
_POLL_S = 0.02
_KEEPER_CALL_S = 1.0


class BenchError(CheckpointError):
    """Something was not saved, or not restored: there is nothing to measure."""


class BenchSaver:
    """One way to save; this one does nothing."""

    name: str

    def save(self, step: int, /) -> None:
        """Begin to save; return when training may continue."""

    def is_done(self) -> bool:
        """Return whether the state is durable; never waits.

        Raises:
            BenchError: It will not be.
        """
        return True

    def settle(self) -> None:
        """Wait for what goes on once the state is durable; it would slow what is measured next."""

    def recoverable_s(self, _stall_s: float, _durable_s: float, /) -> float | None:
        """Return how long after the step the state survives a SIGKILL of the worker."""
        return None

    def clean(self) -> None:
        """Remove the written files."""

    def close(self) -> None:
        """Shut down."""


class MemcpySaver(BenchSaver):
    """The limit of a stall: the same tensors copied into populated memory."""

    name = MEMCPY

    def __init__(self, job: BenchJob) -> None:
        self._sources = job.tensors()
        self.whole, self._targets = warm_copies(self._sources)

    def save(self, _step: int, /) -> None:
        copy_into(self._targets, self._sources)


class RawWriteSaver(BenchSaver):
    """The limit of durability: the same bytes, already in memory, written and fsynced."""

    def __init__(self, whole: torch.Tensor, folder: Path, *, is_direct: bool = False) -> None:
        self.name = RAW_DIRECT if is_direct else RAW
        self._flags = os.O_DIRECT if is_direct else 0
        # O_DIRECT needs whole pages.
        view = bytes_of(whole)
        skipped = -whole.data_ptr() % mmap.PAGESIZE if is_direct else 0
        end = len(view) - (len(view) - skipped) % mmap.PAGESIZE if is_direct else len(view)
        self._view = view[skipped:end]
        self._path = folder / "raw"
        self._thread = threading.Thread()

    def save(self, _step: int, /) -> None:
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def clean(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _write(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._flags
        fd = os.open(self._path, flags, 0o600)
        try:
            for at in range(0, len(self._view), _WRITE_BYTES):
                piece = self._view[at : at + _WRITE_BYTES]
                while piece:
                    piece = piece[os.write(fd, piece) :]
            os.fsync(fd)
        finally:
            os.close(fd)


class GpuopsSaver(BenchSaver):
    """The checkpointer, with its own keeper; each state is persisted once it is complete."""

    name = GPUOPS

    def __init__(self, job: BenchJob, folder: Path) -> None:
        self.socket_path, self._end_keeper = start_keeper(folder / "keeper")
        self.directory = folder / "gpuops"
        self._agent_client = KeeperClient.connect(self.socket_path)
        # Old states are removed between the measurements, by `clean`.
        self.checkpointer = Checkpointer(
            model=job.model,
            optimizer=job.optimizer,
            every=1,
            directory=self.directory,
            persist_every=0.0,
            keep_last=1000,
            keeper=connect_only_rank(self.socket_path),
        )
        if self.checkpointer.restore():
            raise BenchError(f"{folder} is not empty")
        self._step = 0
        self._next_call_s = 0.0

    def save(self, step: int, /) -> None:
        self._step, self._next_call_s = step, 0.0
        self.checkpointer.step(step)

    def is_done(self) -> bool:
        # The keeper's answers would slow the training that is measured: until the state is in its
        # directory they come as often as to an agent.
        is_there = any(self.directory.glob(f"step-{self._step:012}.e?????"))
        if not is_there and time.monotonic() < self._next_call_s:
            return False
        self._next_call_s = time.monotonic() + _KEEPER_CALL_S
        stats = self._agent_client.stats()
        if stats.get("persist_trouble"):
            raise BenchError(f"step {self._step} was not persisted: {stats['persist_trouble']}")
        persisted = stats.get("persisted")
        if persisted and persisted[1] >= self._step:
            return True
        saved = self.checkpointer.stats
        if saved["last_step"] != self._step:
            raise BenchError(f"step {self._step} was not saved: {saved['off'] or saved['skipped']}")
        return False

    def settle(self) -> None:
        store, end_s = DirectoryStore(self.directory), time.monotonic() + _READ_BACK_TIMEOUT_S
        while not all(stored.is_verified for stored in store.list_states()):
            if time.monotonic() > end_s:
                raise BenchError(f"step {self._step} was not read back")
            time.sleep(_POLL_S)

    def recoverable_s(self, stall_s: float, _durable_s: float, /) -> float | None:
        hash_s = self._agent_client.stats().get("hash_s")  # from the last image to the commit
        return None if hash_s is None else stall_s + float(hash_s)

    def clean(self) -> None:
        for path in self.directory.glob("step-*"):
            shutil.rmtree(path)

    def close(self) -> None:
        self.checkpointer.close()
        self._agent_client.close()
        self._end_keeper()


def connect_only_rank(socket_path: Path) -> RankKeeperClient:
    """Return the connection of the only rank of a job."""
    return connect_rank(socket_path, rank=0, world=1, local_rank=0, local_world=1)


def start_keeper(folder: Path) -> tuple[Path, Callable[[], None]]:
    """Start a keeper for one measurement; return its socket, and the function that ends it."""
    process = start_or_adopt(folder, lease_s=_LEASE_S)
    return process.socket_path, process.kill
