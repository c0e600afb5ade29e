"""The ways to save a state that are measured: ours, torch's, and what the hardware allows.

Waiting for what another process does.
"""

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gpuops.checkpoint.keeper.agent_client import AgentKeeperClient
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import RankKeeperClient, connect_rank
from gpuops.checkpoint.types import CheckpointError
from gpuops.worker.bench.subject import BenchJob, copy_into, warm_copies
from gpuops.worker.checkpointer import Checkpointer

MEMCPY, RAW = "memcpy", "write + fsync"
RAW_DIRECT = "write past the cache + fsync"
OURS = "gpuops"
DCP_SAVE, DCP_THREAD = "dcp.save", "dcp.async_save, thread"
State = dict[str, Any]
_WRITE_BYTES = 16 * 2**20


class BenchError(CheckpointError):
    """Something was not saved, or not restored: there is nothing to measure."""


class BenchSaver(Protocol):
    """One way to save. ``recoverable_s`` and ``durable_s`` are filled in by what knows better."""

    name: str

    def save(self, step: int, /) -> None:
        """Begin to save; return when training may go on."""
        ...

    def is_done(self) -> bool:
        """Say whether the state is durable by now; never waits.

        Raises:
            BenchError: It will not be.
        """
        ...

    def recoverable_s(self, stall_s: float, durable_s: float, /) -> float | None:
        """Return from when on after the step the state outlives a SIGKILL of the worker."""
        ...

    def clean(self) -> None:
        """Remove what was written."""
        ...

    def close(self) -> None:
        """End it."""
        ...


@dataclass(frozen=True, slots=True)
class SaverFactory:
    """A way to save that is made only when its turns begin."""

    name: str
    make: Callable[[], BenchSaver]


class MemcpySaver:
    """The limit of a stall: the same tensors copied into memory that is there already."""

    name = MEMCPY

    def __init__(self, subject: BenchJob) -> None:
        self._sources = subject.tensors()
        self.whole, self.targets = warm_copies(self._sources)

    def save(self, _step: int, /) -> None:
        copy_into(self.targets, self._sources)

    def is_done(self) -> bool:
        return True

    def recoverable_s(self, _stall_s: float, _durable_s: float, /) -> float | None:
        return None

    def clean(self) -> None:
        pass

    def close(self) -> None:
        pass


class RawWriteSaver:
    """The limit of durability: the same bytes, already in memory, written and fsynced."""

    def __init__(self, whole: torch.Tensor, folder: Path, *, is_direct: bool = False) -> None:
        self.name = RAW_DIRECT if is_direct else RAW
        self._flags = os.O_DIRECT if is_direct else 0
        # Past the cache goes only what begins and ends at a page.
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

    def recoverable_s(self, _stall_s: float, _durable_s: float, /) -> float | None:
        return None

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


class GpuopsSaver:
    """Our checkpointer, with a keeper of its own, each state persisted as soon as it is whole."""

    name = OURS

    def __init__(self, subject: BenchJob, folder: Path) -> None:
        self.socket_path, self._end = start_keeper(folder / "keeper")
        self.directory = folder / "gpuops"
        self._agent_client = AgentKeeperClient.connect(self.socket_path)
        self._keeper = connect_only_rank(self.socket_path)
        self.checkpointer = Checkpointer(
            model=subject.model,
            optimizer=subject.optimizer,
            every=1,
            directory=self.directory,
            persist_every=0.0,
            keep_last=1000,  # old states are removed between the measurements, by `clean`
            keeper=self._keeper,
        )
        if self.checkpointer.restore():
            raise BenchError(f"{folder} is not empty")
        self._step = 0
        self._saved = 0

    def save(self, step: int, /) -> None:
        self._step = step
        self.checkpointer.step(step)

    def is_done(self) -> bool:
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

    def recoverable_s(self, stall_s: float, _durable_s: float, /) -> float | None:
        hash_s = self._agent_client.stats().get("hash_s")  # from the seal to the commit
        return None if hash_s is None else stall_s + float(hash_s)

    def clean(self) -> None:
        if self.directory.is_dir():
            for path in self.directory.glob("step-*"):
                shutil.rmtree(path)

    def close(self) -> None:
        self.checkpointer.close()
        self._agent_client.close()
        self._end()


class TorchSaver:
    """``torch.save`` into a file; the fsync after it does not count as stall."""

    name = "torch.save"

    def __init__(self, subject: BenchJob, folder: Path) -> None:
        self._subject = subject
        self._path = folder / "torch.pt"
        self._thread = threading.Thread()

    def save(self, _step: int, /) -> None:
        torch.save(self._subject.state_dict(), self._path)
        self._thread = threading.Thread(target=self._sync)
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def recoverable_s(self, stall_s: float, _durable_s: float, /) -> float | None:
        return stall_s

    def clean(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _sync(self) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DcpSaver:
    """``dcp.save`` and ``dcp.async_save`` in one of their settings; each into a new directory."""

    def __init__(
        self, name: str, subject: BenchJob, folder: Path, save: Callable[..., Future[Any] | None]
    ) -> None:
        self.name = name
        self._subject = subject
        self._folder = folder / name.replace(" ", "-").replace(",", "")
        self._folder.mkdir()
        self._save = save
        self._future: Future[Any] | None = None
        self._is_async = False

    def save(self, step: int, /) -> None:
        path = self._folder / f"step-{step}"
        self._future = self._save(self._subject.state_dict(), path)
        self._is_async = self._future is not None

    def is_done(self) -> bool:
        if self._future is None:
            return True
        if not self._future.done():
            return False
        error = self._future.exception()
        if error is not None:
            raise BenchError(f"{self.name} failed: {error!r}") from error
        self._future = None  # which may hold on to all that was staged
        return True

    def recoverable_s(self, stall_s: float, durable_s: float, /) -> float | None:
        # What it holds in memory dies with the worker, and a process of its with its parent.
        return durable_s if self._is_async else stall_s

    def clean(self) -> None:
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def close(self) -> None:
        end_s = time.monotonic() + 600
        while not self.is_done() and time.monotonic() < end_s:
            time.sleep(0.01)


def dcp_savers(subject: BenchJob, folder: Path) -> list[BenchSaver]:
    """Return the ways of DCP that keep no memory between two saves."""

    def save(state: State, path: Path) -> None:
        dcp_save(state, checkpoint_id=path, no_dist=True)

    def save_tuned(state: State, path: Path) -> None:
        writer = FileSystemWriter(path, sync_files=False, thread_count=2)
        dcp_save(state, storage_writer=writer, no_dist=True)

    def thread(state: State, path: Path) -> Any:  # noqa: ANN401 torch's own type
        return async_save(state, checkpoint_id=path, no_dist=True)

    ways: dict[str, Callable[..., Any]] = {
        DCP_SAVE: save,
        "dcp.save, 2 threads, no fsync": save_tuned,
        DCP_THREAD: thread,
    }
    return [DcpSaver(name, subject, folder, way) for name, way in ways.items()]


def dcp_kept_factories(subject: BenchJob, folder: Path) -> list[SaverFactory]:
    """Return the ways of DCP that keep memory, a process, or both; tuned as well as can be."""
    process = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    ways: list[tuple[str, bool | None, dict[str, Any]]] = [
        ("dcp.async_save, thread, kept stager", False, {"no_dist": True}),
        ("dcp.async_save, process", None, process),
        ("dcp.async_save, process, kept stager", True, process),
    ]

    def make(name: str, is_shared: bool | None, options: dict[str, Any]) -> BenchSaver:
        kept = dict(options)
        if is_shared is not None:
            stager = DefaultStager(StagingOptions(False, is_shared, False, False))
            kept["async_stager"] = stager

        def save(state: State, path: Path) -> Any:  # noqa: ANN401 torch's own type
            return async_save(state, checkpoint_id=path, **kept)

        return DcpSaver(name, subject, folder, save)

    return [SaverFactory(way[0], partial(make, *way)) for way in ways]


def end_dcp_process() -> None:
    """End the process that DCP keeps for all saves, and that keeps the last state."""
    _async_process_executor._CHECKPOINT_PROCESS = None  # noqa: SLF001 nothing public ends it


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def connect_only_rank(socket_path: Path) -> RankKeeperClient:
    """Return the line of the only rank of a job."""
    return connect_rank(socket_path, rank=0, world=1, local_rank=0, local_world=1)


def start_keeper(folder: Path) -> tuple[Path, Callable[[], None]]:
    """Start a keeper for one measurement; return its socket, and what ends it."""
    process = start_or_adopt(folder, lease_s=60.0)
    return process.socket_path, process.kill


T = TypeVar("T")
_PAUSE_S = 0.002


def wait_until(probe: Callable[[], T | None], deadline_s: float, description: str) -> T:
    """Return the first true thing that *probe* returns.

    Raises:
        BenchError: There was none within *deadline_s*.
    """
    end_s = time.monotonic() + deadline_s
    while not (found := probe()):
        if time.monotonic() > end_s:
            raise BenchError(f"{description} did not come about within {deadline_s:g} s")
        time.sleep(_PAUSE_S)
    return found
