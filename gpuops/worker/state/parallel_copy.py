"""Fill the tensors of a job from the images of a state, on the host with several threads.

The first read of another process's image makes the kernel map it here page by page. That takes as
long as the copy itself, and one thread does not reach the bandwidth of memory; while a job
restores, its other cores are idle. Reading the image's file into the tensors instead (preadv) is no
faster: the kernel then looks up and copies each page.
"""

import os
import threading
from collections.abc import Iterator, Sequence

import torch

_BATCH_BYTES = 16 * 2**20
_THREADS_MAX = 8
TensorPair = tuple[torch.Tensor, torch.Tensor]


def copy_threads(local_world: int) -> int:
    """Return how many threads each rank of this node may copy with, all of them at once."""
    n_cores = len(os.sched_getaffinity(0)) // (local_world * torch.get_num_threads())
    return min(max(n_cores, 1), _THREADS_MAX)


def copy_parallel(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], n_threads: int
) -> None:
    """Copy each of *sources*, which are on the host, into its counterpart in *targets*."""
    pairs = [_without_repeats(a, b) for a, b in zip(targets, sources, strict=True)]
    elsewhere = [pair for pair in pairs if pair[0].device.type != "cpu"]
    batches = _batches([pair for pair in pairs if pair[0].device.type == "cpu"])
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                _copy(batch)
        except BaseException as exc:  # noqa: BLE001 boundary: raised in the caller's thread
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


@torch.no_grad()
def _copy(pairs: Sequence[TensorPair]) -> None:
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


@torch.no_grad()
def _batches(pairs: Sequence[TensorPair]) -> Iterator[list[TensorPair]]:
    """Yield all *pairs* in batches of about equal size; long tensors are split."""
    batch: list[TensorPair] = []
    nbytes = 0
    for pair in pairs:
        for part in _cut(*pair):
            batch.append(part)
            nbytes += part[0].numel() * part[0].element_size()
            if nbytes >= _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _cut(target: torch.Tensor, source: torch.Tensor) -> Iterator[TensorPair]:
    count = _BATCH_BYTES // target.element_size()
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
