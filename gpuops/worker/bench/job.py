"""A training job to be saved: a state of so many bytes in so many tensors, and steps that compute.

Only a small head is trained, so that a step runs forward, backward and the optimizer with all its
hooks; the rest of the state is only there to be saved.
"""

import time
from typing import Any

import torch
from torch import nn

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
        """Return all tensors of the state."""
        parameters = list(self.model.parameters())
        momenta = [self.optimizer.state[each]["momentum_buffer"] for each in parameters]
        return [each.detach() for each in parameters] + momenta

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
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
    """Return memory of all *tensors* together, every page of it there, and it cut like them."""
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
