"""Small tensors of a device, gathered there, so that one transfer takes many of them."""

from collections.abc import Sequence
from contextlib import suppress

import torch

from gpuops.checkpoint.image import SMALL_TENSOR_BYTES, PlacedTensor
from gpuops.worker.staging.copy_plan import CopyPlan
from gpuops.worker.staging.tensor_copy import copy_tensors

STAGED_BYTES_MAX = 64 * 2**20
_Run = list[tuple[PlacedTensor, int]]


class SmallTensors:
    """Small tensors of the state *plan* is of, on *device*, that lie together in the image.

    ``places`` are theirs among *tensors*. `gather` copies them on the device, into memory that is
    kept, of `STAGED_BYTES_MAX` bytes at most; what is written to them later is not in the copy.
    """

    def __init__(
        self, plan: CopyPlan, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self.places: list[int] = []
        self._gathered: list[torch.Tensor] = []
        self._wholes: list[tuple[int, torch.Tensor]] = []
        with suppress(torch.OutOfMemoryError):  # none, or fewer, are gathered then
            for run in _runs(plan, tensors, device):
                first = tensors[run[0][1]]
                counts = [tensors[place].numel() for _, place in run]
                whole = torch.empty(sum(counts), dtype=first.dtype, device=device)
                parts = zip(whole.split(counts), run, strict=True)
                self._gathered += [part.view(tensors[place].shape) for part, (_, place) in parts]
                self._wholes.append((run[0][0].begin, whole))
                self.places += [place for _, place in run]

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy them together, on the current stream."""
        copy_tensors(self._gathered, [tensors[place] for place in self.places], non_blocking=True)

    def transfer(self, image: memoryview) -> None:
        """Copy what is gathered into the *image*, on the current stream."""
        targets = [
            torch.frombuffer(image, dtype=whole.dtype, count=whole.numel(), offset=begin)
            for begin, whole in self._wholes
        ]
        copy_tensors(targets, [whole for _, whole in self._wholes], non_blocking=True)


def _runs(plan: CopyPlan, tensors: Sequence[torch.Tensor], device: torch.device) -> list[_Run]:
    """Return the small tensors on *device* of one dtype that lie together, in order."""
    place_by_name = {name: place for place, name in enumerate(plan.names)}
    runs: list[_Run] = []
    nbytes, end = 0, -1
    for placed in sorted(plan.layout.tensors, key=lambda it: it.begin):
        place = place_by_name[placed.spec.name]
        tensor = tensors[place]
        if not (
            0 < tensor.nbytes < SMALL_TENSOR_BYTES
            and tensor.device == device
            and tensor.is_contiguous()
            and nbytes + tensor.nbytes <= STAGED_BYTES_MAX
        ):
            continue
        nbytes += tensor.nbytes
        if placed.begin != end or tensor.dtype is not tensors[runs[-1][-1][1]].dtype:
            runs.append([])
        runs[-1].append((placed, place))
        end = placed.end
    return [run for run in runs if len(run) > 1]
