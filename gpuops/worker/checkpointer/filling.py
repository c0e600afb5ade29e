"""Fills the tensors of a job from the images of a state, on the host with several threads.

An image that another process made is mapped here for the first time, and the kernel enters it into
this process's page table page by page, as the mapping is read: half as long again as the copying
takes. So what is long is read from the image's file into the tensor's own memory, where the kernel
copies and maps nothing. One thread does not reach the rate of memory: while a job restores, its
other cores have nothing to do.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer.tensors import PLAIN

_AT_ONCE_BYTES = 16 * 2**20
_READ_BYTES_MIN = 64 * 1024
_THREADS_MAX = 8

Pair = tuple[torch.Tensor, torch.Tensor]


class FileRead(NamedTuple):
    """A tensor on the host, all of which is read from place *begin* of a file on."""

    target: torch.Tensor
    fd: int
    begin: int


def can_be_read(target: torch.Tensor) -> bool:
    """Say whether the memory of *target* is nothing but its items in their order, and many."""
    return (
        type(target) in PLAIN
        and target.device.type == "cpu"
        and target.numel() * target.element_size() >= _READ_BYTES_MIN
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def n_threads_of(local_world: int) -> int:
    """Return how many threads each rank of this node may copy with, all of them at once."""
    n_cores = len(os.sched_getaffinity(0)) // (local_world * torch.get_num_threads())
    return min(max(n_cores, 1), _THREADS_MAX)


def fill(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    n_threads: int,
    reads: Sequence[FileRead] = (),
) -> None:
    """Copy each of *sources*, which are on the host, into the one of *targets* at its place.

    Fill those of *reads* as well, each of which `can_be_read`.

    Raises:
        CheckpointError: A file cannot be read, or ends too early.
    """
    pairs = [_without_repeats(a, b) for a, b in zip(targets, sources, strict=True)]
    elsewhere = [pair for pair in pairs if pair[0].device.type != "cpu"]
    batches = _batches([pair for pair in pairs if pair[0].device.type == "cpu"])
    jobs: Iterator[Callable[[], None]] = chain(
        chain.from_iterable(map(_reading, reads)), (partial(_copy, batch) for batch in batches)
    )
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                job()
        except BaseException as exc:  # noqa: BLE001 boundary: raised where the copy was wanted
            errors.append(exc)

    threads = [threading.Thread(target=work, name="gpuops-fill") for _ in range(n_threads - 1)]
    for thread in threads:
        thread.start()
    try:
        _copy(elsewhere)
        work()
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    # Autograd has not seen what was written: what a graph still keeps of it has changed.
    torch.autograd.graph.increment_version(read.target for read in reads)


def _reading(read: FileRead) -> Iterator[Callable[[], None]]:
    address = read.target.data_ptr()
    nbytes = read.target.numel() * read.target.element_size()
    for at in range(0, nbytes, _AT_ONCE_BYTES):
        piece_bytes = min(_AT_ONCE_BYTES, nbytes - at)
        yield partial(_read, read.fd, read.begin + at, address + at, piece_bytes)


def _read(fd: int, begin: int, address: int, nbytes: int) -> None:
    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    done = 0
    while done < nbytes:
        try:
            n_read = os.preadv(fd, [memory[done:]], begin + done)
        except OSError as exc:
            raise CheckpointError(
                f"cannot read a checkpoint's image at byte {begin + done}: {exc.strerror}"
            ) from exc
        if n_read == 0:
            raise CheckpointError(
                f"a checkpoint's image ends at byte {begin + done}, before byte {begin + nbytes}"
            )
        done += n_read


@torch.no_grad()
def _copy(pairs: Sequence[Pair]) -> None:
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


@torch.no_grad()
def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield all *pairs* in lists of about as many bytes; long tensors are cut."""
    batch: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        for piece in _cut(*pair):
            batch.append(piece)
            nbytes += piece[0].numel() * piece[0].element_size()
            if nbytes >= _AT_ONCE_BYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _cut(target: torch.Tensor, source: torch.Tensor) -> Iterator[Pair]:
    count = _AT_ONCE_BYTES // target.element_size()
    is_flat = target.is_contiguous() and source.is_contiguous() and target.shape == source.shape
    if is_flat and target.numel() > count:
        yield from zip(target.view(-1).split(count), source.view(-1).split(count), strict=True)
    else:
        yield target, source


def _without_repeats(
    target: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both without the dimensions that *target* merely repeats (an expanded tensor)."""
    repeats = any(
        step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)
    )
    if not repeats:
        return target, source
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    return target[once], source[once]
