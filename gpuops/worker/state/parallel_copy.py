"""Fill the tensors of a job from the images of a state, on the host with several threads.

One thread does not reach the bandwidth of memory; while a job restores, its other cores are idle.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gpuops.checkpoint.hashed_image import HashedImage, TargetPart
from gpuops.checkpoint.image import PlacedTensor
from gpuops.checkpoint.partial_image import OpenedImage
from gpuops.checkpoint.types import CHUNK_BYTES

_BATCH_BYTES = 16 * 2**20
# Smaller ones are copied in batches, which takes less time than a call for each.
_DIRECT_BYTES_MIN = 64 * 2**10
_THREADS_MAX = 8
TensorPair = tuple[torch.Tensor, torch.Tensor]
DirectTensor = tuple[torch.Tensor, OpenedImage, PlacedTensor]


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
    works = (partial(_copy, batch) for batch in batches)
    _run_parallel(works, n_threads, first=partial(_copy, elsewhere))


def read_parallel(wanted: Iterable[DirectTensor], n_threads: int) -> list[DirectTensor]:
    """Read what is in hashed images into the tensors; return those that have to be copied.

    All that these need of hashed images is verified as well.

    Raises:
        CorruptError: A part is damaged; the content of all tensors is then undefined.
    """
    rest: list[DirectTensor] = []
    chunks: dict[tuple[HashedImage, int], list[TargetPart]] = {}
    ends: defaultdict[HashedImage, int] = defaultdict(int)
    for each in sorted(wanted, key=lambda each: each[2].begin):
        target, opened, placed = each
        if not isinstance(opened, HashedImage):
            rest.append(each)
            continue
        memory = None
        if placed.begin >= ends[opened] and _is_readable_into(target):
            memory, ends[opened] = _bytes_of(target), placed.end
        else:
            rest.append(each)
        for number in range(placed.begin // CHUNK_BYTES, -(-placed.end // CHUNK_BYTES)):
            parts = chunks.setdefault((opened, number), [])
            if memory is not None:
                at = max(placed.begin, number * CHUNK_BYTES)
                end = (number + 1) * CHUNK_BYTES
                parts.append((at, memory[at - placed.begin : end - placed.begin]))
    reads = (partial(image.read_chunk, n, parts) for (image, n), parts in chunks.items())
    _run_parallel(reads, n_threads)
    return rest


def _is_readable_into(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.numel() * tensor.element_size() >= _DIRECT_BYTES_MIN
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _run_parallel(
    works: Iterator[Callable[[], None]],
    n_threads: int,
    *,
    first: Callable[[], None] = lambda: None,
) -> None:
    """Call all of *works* in *n_threads* threads, this one included; raise what one raises.

    *first* is called in this thread.
    """
    errors: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    do = next(works, None)
                if do is None:
                    return
                do()
        except BaseException as exc:  # noqa: BLE001 boundary: raised in the caller's thread
            errors.append(exc)

    threads = [threading.Thread(target=work, name="gpuops-fill") for _ in range(n_threads - 1)]
    for thread in threads:
        thread.start()
    try:
        first()
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
