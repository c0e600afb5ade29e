"""Tensors are filled by several threads as by one, whatever their shapes."""

import os
import threading

import pytest
import torch

from gpuops.checkpoint.states import CheckpointError
from gpuops.worker.checkpointer import filling
from gpuops.worker.checkpointer.filling import FileRead, can_be_read, fill, n_threads_of

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

    fill(targets, sources, n_threads)

    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))


def test_parameters_are_filled_in_place():
    parameter = torch.nn.Parameter(torch.zeros(6 * 2**20))
    address = parameter.data_ptr()

    fill([parameter], [torch.ones(6 * 2**20)], 2)

    assert parameter.data_ptr() == address
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert bool((parameter == 1).all())


def test_what_goes_wrong_in_any_thread_is_raised_and_none_goes_on():
    shapes = [(5 * 2**20,)] * 6
    targets = [torch.zeros(shape) for shape in shapes]
    sources = [torch.ones(shape) for shape in shapes]
    sources[3] = torch.ones(7)

    with pytest.raises(RuntimeError, match="size"):
        fill(targets, sources, 3)

    assert not [each for each in threading.enumerate() if each.name == "gpuops-fill"]


def test_threads_are_shared_among_the_ranks_of_a_node():
    assert n_threads_of(10**6) == 1
    assert 1 <= n_threads_of(1) <= filling._THREADS_MAX


@pytest.fixture
def image(tmp_path):
    """Yield the descriptor of a file, and the numbers that are in it from byte 12 on."""
    numbers = torch.arange(9 * 2**20, dtype=torch.float32)
    path = tmp_path / "image"
    path.write_bytes(bytes(12) + numbers.numpy().tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield fd, numbers
    os.close(fd)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_long_tensors_are_read_into_their_own_memory(image, n_threads):
    fd, numbers = image
    long = torch.nn.Parameter(torch.zeros(7 * 2**20))
    short = torch.zeros(2, 2**20)
    beside = torch.zeros(3)
    address, version = long.data_ptr(), long._version

    fill(
        [beside],
        [torch.ones(3)],
        n_threads,
        [FileRead(long, fd, 12), FileRead(short, fd, 12 + 7 * 2**22)],
    )

    assert torch.equal(long, numbers[: 7 * 2**20])
    assert torch.equal(short.view(-1), numbers[7 * 2**20 :])
    assert bool((beside == 1).all())
    assert long.data_ptr() == address
    assert long._version > version


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("long", True),
        ("parameter", True),
        ("short", False),
        ("transposed", False),
        ("expanded", False),
        ("conjugate", False),
        ("negated", False),
        ("meta", False),
    ],
)
def test_only_what_lies_in_memory_as_in_the_image_is_read(kind, wanted):
    made = {
        "long": lambda: torch.zeros(256, 256),
        "parameter": lambda: torch.nn.Parameter(torch.zeros(256, 256)),
        "short": lambda: torch.zeros(256),
        "transposed": lambda: torch.zeros(256, 512).t(),
        "expanded": lambda: torch.zeros(256, 1).expand(256, 256),
        "conjugate": lambda: torch.zeros(256, 256, dtype=torch.complex64).conj(),
        "negated": lambda: torch.zeros(2**16, dtype=torch.complex64).conj().imag,
        "meta": lambda: torch.zeros(256, 256, device="meta"),
    }[kind]()

    assert can_be_read(made) is wanted


def test_an_image_that_ends_too_early_or_cannot_be_read_is_said(image):
    fd, _ = image
    write_only = os.open(os.devnull, os.O_WRONLY)
    try:
        with pytest.raises(CheckpointError, match="ends at byte 37748748, before byte"):
            fill([], [], 2, [FileRead(torch.zeros(10 * 2**20), fd, 12)])
        with pytest.raises(CheckpointError, match="cannot read a checkpoint's image at byte 5"):
            fill([], [], 2, [FileRead(torch.zeros(2**20), write_only, 5)])
    finally:
        os.close(write_only)
