"""The savers of torch and DCP, as `BenchSaver`s; waiting for what another process does."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gpuops.worker.bench.savers import BenchError, BenchJob, BenchSaver

DCP_SAVE, DCP_THREAD = "dcp.save", "dcp.async_save, thread"
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SaverFactory:
    """A way to save that is made only when its turns begin."""

    name: str
    make: Callable[[], BenchSaver]


def state_dict_of(subject: BenchJob) -> State:
    """Return the state as torch's savers take it; its tensors are those of the job."""
    return {"model": subject.model.state_dict(), "optimizer": subject.optimizer.state_dict()}


class TorchSaver(BenchSaver):
    """``torch.save`` into a file; the fsync after it does not count as stall."""

    name = "torch.save"

    def __init__(self, subject: BenchJob, folder: Path) -> None:
        self._subject = subject
        self._path = folder / "torch.pt"
        self._thread = threading.Thread()

    def save(self, _step: int, /) -> None:
        torch.save(state_dict_of(self._subject), self._path)
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


class DcpSaver(BenchSaver):
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
        self._future = self._save(state_dict_of(self._subject), path)
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

    def thread(state: State, path: Path) -> Any:
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

        def save(state: State, path: Path) -> Any:
            return async_save(state, checkpoint_id=path, **kept)

        return DcpSaver(name, subject, folder, save)

    return [SaverFactory(way[0], partial(make, *way)) for way in ways]


def end_dcp_process() -> None:
    """End the process that DCP keeps for all saves, and that keeps the last state."""
    _async_process_executor._CHECKPOINT_PROCESS = None


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
