"""Bus bandwidths against figures that nccl-tests printed."""

import pytest

from gpuops.burnin.bandwidth import COLLECTIVES, algbw_gbs, busbw_gbs, size_text


def test_the_published_run_of_eight_h200() -> None:
    """stas00/ml-engineering, network/README.md: all_reduce of 16 GiB, algbw 275.58 GB/s."""
    size = 16 * 2**30
    seconds = size / 275.58e9
    assert algbw_gbs(size, seconds) == pytest.approx(275.58)
    assert busbw_gbs("all_reduce", 8, size, seconds) == pytest.approx(482.26, abs=0.01)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_of_two_ranks_at_least_half_of_the_buffer_crosses_the_link(collective: str) -> None:
    assert busbw_gbs(collective, 2, 2_000_000_000, 1.0) in (1.0, 2.0)


@pytest.mark.parametrize(
    ("size", "text"),
    [(8, "8B"), (1000, "1000B"), (1536, "1536B"), (3 * 2**20, "3MiB"), (2**33, "8GiB")],
)
def test_sizes_are_named_as_in_floors(size: int, text: str) -> None:
    assert size_text(size) == text
