"""Tensors are filled by several threads as by one, whatever their shapes."""

import threading

import pytest
import torch

from gpuops.worker.state import parallel_copy
from gpuops.worker.state.parallel_copy import copy_parallel, copy_threads

SHAPES = [(3,), (0,), (5, 7), (9 * 2**20,), (1024, 5000), (2, 3, 4)]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_all_are_filled_long_and_short_contiguous_or_not(n_threads):
    generator = torch.Generator().manual_seed(n_threads)
    sources = [torch.randn(shape, generator=generator) for shape in SHAPES]
    sources.append(torch.arange(10**6, dtype=torch.int64).view(1000, 1000).t())
    sources.append(torch.ones(4, 1).expand(4, 6))
    targets = [torch.full(each.shape, -1, dtype=each.dtype) for each in sources]
    targets[4] = torch.zeros(5000, 1024).t()
    targets[-1] = torch.zeros(4, 1).expand(4, 6)

    copy_parallel(targets, sources, n_threads)

    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))


def test_parameters_are_filled_in_place():
    parameter = torch.nn.Parameter(torch.zeros(6 * 2**20))
    address = parameter.data_ptr()

    copy_parallel([parameter], [torch.ones(6 * 2**20)], 2)

    assert parameter.data_ptr() == address
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert bool((parameter == 1).all())


def test_what_goes_wrong_in_any_thread_is_raised_and_none_continues():
    shapes = [(5 * 2**20,)] * 6
    targets = [torch.zeros(shape) for shape in shapes]
    sources = [torch.ones(shape) for shape in shapes]
    sources[3] = torch.ones(7)

    with pytest.raises(RuntimeError, match="size"):
        copy_parallel(targets, sources, 3)

    assert not [each for each in threading.enumerate() if each.name == "gpuops-fill"]


def test_threads_are_shared_among_the_ranks_of_a_node():
    assert copy_threads(10**6) == 1
    assert 1 <= copy_threads(1) <= parallel_copy._THREADS_MAX
