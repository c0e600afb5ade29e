"""Copies of many tensors at once."""

from collections.abc import Iterable, Sequence

import torch

PIECE_BYTES = 64 * 2**20  # 1.2 ms of PCIe 5.0 x16


def copy_tensors(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    non_blocking: bool = False,
) -> None:
    """Copy each of *sources*, on the current stream; without blocking in pieces."""
    if non_blocking and any(source.nbytes > PIECE_BYTES for source in sources):
        pieces = [piece for pair in zip(targets, sources, strict=True) for piece in _cut(*pair)]
        targets, sources = zip(*pieces, strict=True)
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def _cut(target: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pieces of a large tensor: what others copy meanwhile comes in between."""
    if source.nbytes <= PIECE_BYTES or not source.is_contiguous():
        return [(target, source)]
    n = PIECE_BYTES // source.element_size()
    return zip(target.view(-1).split(n), source.view(-1).split(n), strict=True)
